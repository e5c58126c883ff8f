import torch
from torch import Tensor


def run(
    input_ids: Tensor,
    positions: Tensor,
    row_seq: Tensor,
    ngram_ids: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    total_lens: Tensor,
    sources: Tensor,
    committed_lens: Tensor,
    ngram_history: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    drafts: Tensor | None,
    token_map: Tensor | None,
    is_barrier: Tensor | None,
    pad_id: int,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    source = sources.clamp(min=0).long()
    is_matched = sources >= 0
    counts = num_emitted[source]
    starts = committed_lens + counts - 1
    corrected_k = torch.where(is_matched, starts + cu_seqlens_q.diff(), seqlens_k)

    seq = row_seq.long()
    row_is_matched = is_matched[seq]
    rows = torch.arange(input_ids.shape[0], dtype=torch.int32, device=seq.device)
    place = rows - cu_seqlens_q[seq]
    # Index of each row's token among those that came after the committed ones: emitted, then drafts.
    newest = counts[seq] - 1 + place

    def tokens_at(index: Tensor) -> Tensor:
        chosen = emitted[source[seq], index.clamp(0, emitted.shape[1] - 1).long()]
        if drafts is None:
            return chosen
        draft = drafts[source[seq], (index - counts[seq]).clamp(0, drafts.shape[1] - 1).long()]
        return torch.where(index < counts[seq], chosen, draft)

    windows = ngram_ids
    if token_map is not None and is_barrier is not None:
        columns = []
        is_behind = torch.zeros_like(row_is_matched)  # a barrier has been met
        for back in range(ngram_ids.shape[1]):
            index = newest - back
            token = tokens_at(index.clamp(min=0)).long()
            is_behind = is_behind | ((index >= 0) & is_barrier[token])
            known = token_map[token]
            if back > 0:  # the history has one column less, and its own barriers are pads already
                old_place = (-1 - index).clamp(0, ngram_history.shape[1] - 1).long()
                known = torch.where(index >= 0, known, ngram_history[seq, old_place])
            columns.append(torch.where(is_behind, pad_id, known))
        windows = torch.where(row_is_matched[:, None], torch.stack(columns, 1), ngram_ids)
    corrected = (
        torch.where(row_is_matched, tokens_at(newest), input_ids),
        torch.where(row_is_matched, starts[seq] + place, positions),
        corrected_k,
        torch.where(is_matched, corrected_k, total_lens),
        windows,
    )
    if not in_place:
        return corrected
    planned = input_ids, positions, seqlens_k, total_lens, ngram_ids
    return tuple(part.copy_(new) for part, new in zip(planned, corrected, strict=True))
