import torch
from torch import Tensor


def run(
    seqlens_q: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, input_ids: Tensor, ngram_ids: Tensor
) -> tuple[Tensor, ...]:
    num_seqs, num_rows = seqlens_q.shape[0], input_ids.shape[0]
    new_cu = torch.nn.functional.pad(seqlens_q.cumsum(0, dtype=torch.int32), (1, 0))
    seqs = torch.arange(num_seqs, dtype=torch.int32, device=seqlens_q.device)
    row_seq = torch.repeat_interleave(seqs, seqlens_q, output_size=num_rows)
    planned = cu_seqlens_q.diff()
    old_start = seqlens_k - planned
    seq = row_seq.long()
    place = torch.arange(num_rows, dtype=torch.int32, device=seq.device) - new_cu[seq]
    old_row = (cu_seqlens_q[seq] + torch.minimum(place, planned[seq] - 1)).long()
    positions = old_start[seq] + place
    return new_cu, old_start + seqlens_q, row_seq, positions, input_ids[old_row], ngram_ids[old_row]
