"""correct_rows on CUDA: a thread for each row, and for the sequence of the same number."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 64


@cuda_kernel(
    builds=lambda model: [
        {"width": model.engram_max_ngram_size, "has_drafts": d, "has_windows": True} for d in (False, True)
    ]
)
def kernel(width: int, has_drafts: bool, has_windows: bool):
    """`width` columns of the windows, which stay as they are without `has_windows`."""
    num_rows, num_seqs, num_bounds = T.dynamic("num_rows"), T.dynamic("num_seqs"), T.dynamic("num_bounds")
    num_before, most, num_drafts = T.dynamic("num_before"), T.dynamic("most"), T.dynamic("num_drafts")
    num_draft_rows, vocab, num_flags = T.dynamic("num_draft_rows"), T.dynamic("vocab"), T.dynamic("num_flags")
    window_rows, history_rows, history = (T.dynamic(x) for x in ("window_rows", "history_rows", "history"))

    @T.macro
    def token_at(emitted, drafts, source, count, index, token):
        """Token `index` behind the committed ones: emitted, then drafted."""
        token[0] = emitted[source, T.max(T.min(index, most - 1), 0)]
        if has_drafts and index >= count:
            token[0] = drafts[source, T.min(index - count, num_drafts - 1)]

    @T.prim_func
    def correct_rows(
        input_ids: T.Tensor((num_rows,), "int32"),
        positions: T.Tensor((num_rows,), "int32"),
        row_seq: T.Tensor((num_rows,), "int32"),
        ngram_ids: T.Tensor((window_rows, width), "int32"),
        cu_seqlens_q: T.Tensor((num_bounds,), "int32"),
        seqlens_k: T.Tensor((num_seqs,), "int32"),
        total_lens: T.Tensor((num_seqs,), "int32"),
        sources: T.Tensor((num_seqs,), "int32"),
        committed_lens: T.Tensor((num_seqs,), "int32"),
        ngram_history: T.Tensor((history_rows, history), "int32"),
        emitted: T.Tensor((num_before, most), "int32"),
        num_emitted: T.Tensor((num_before,), "int32"),
        drafts: T.Tensor((num_draft_rows, num_drafts), "int32"),
        token_map: T.Tensor((vocab,), "int32"),
        is_barrier: T.Tensor((num_flags,), "uint8"),
        new_ids: T.Tensor((num_rows,), "int32"),
        new_positions: T.Tensor((num_rows,), "int32"),
        new_seqlens_k: T.Tensor((num_seqs,), "int32"),
        new_total_lens: T.Tensor((num_seqs,), "int32"),
        new_ngram_ids: T.Tensor((window_rows, width), "int32"),
        pad_id: T.int32,
    ):
        with T.Kernel(T.ceildiv(T.max(num_rows, num_seqs), THREADS), threads=THREADS) as block:
            # Conditions on a register lower several times faster than on an expression of threads.
            place = T.alloc_var("int32", init=block * THREADS + T.get_thread_binding())
            token = T.alloc_local((1,), "int32")
            if place < num_seqs:
                own = T.alloc_var("int32", init=sources[place])
                length = T.alloc_var("int32", init=seqlens_k[place])
                total = T.alloc_var("int32", init=total_lens[place])
                if own >= 0:
                    rows = cu_seqlens_q[place + 1] - cu_seqlens_q[place]
                    length = committed_lens[place] + num_emitted[own] - 1 + rows
                    total = length
                new_seqlens_k[place] = length
                new_total_lens[place] = total
            if place < num_rows:
                seq = T.alloc_var("int32", init=row_seq[place])
                source = T.alloc_var("int32", init=sources[seq])
                if source >= 0:
                    count = T.alloc_var("int32", init=num_emitted[source])
                    ahead = T.alloc_var("int32", init=place - cu_seqlens_q[seq])
                    token_at(emitted, drafts, source, count, count - 1 + ahead, token)
                    new_ids[place] = token[0]
                    new_positions[place] = committed_lens[seq] + count - 1 + ahead
                    if has_windows:
                        is_behind = T.alloc_var("int32", init=0)  # a barrier has been met
                        for back in tuple(range(width)):
                            index = T.alloc_var("int32", init=count - 1 + ahead - back)
                            known = T.alloc_var("int32", init=pad_id)
                            if back == 0 or index >= 0:
                                token_at(emitted, drafts, source, count, T.max(index, 0), token)
                                known = token_map[token[0]]
                                if index >= 0 and is_barrier[token[0]] != 0:
                                    is_behind = 1
                            else:  # the history has one column less, and its own barriers are pads already
                                known = ngram_history[seq, T.min(-1 - index, history - 1)]
                            new_ngram_ids[place, back] = T.if_then_else(is_behind == 1, pad_id, known)
                else:
                    new_ids[place] = input_ids[place]
                    new_positions[place] = positions[place]
                    if has_windows:
                        for back in T.unroll(width):
                            new_ngram_ids[place, back] = ngram_ids[place, back]

    return correct_rows


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
    has_windows = token_map is not None and is_barrier is not None
    planned = input_ids, positions, seqlens_k, total_lens
    # A thread writes what it alone has read.
    corrected = planned if in_place else tuple(torch.empty_like(part) for part in planned)
    windows = torch.empty_like(ngram_ids) if has_windows and not in_place else ngram_ids
    unread = emitted.new_empty(1, 1)  # a program's tensors are never None
    width = ngram_ids.shape[1] if has_windows else 1
    program = kernel(width=width, has_drafts=drafts is not None, has_windows=has_windows)
    program(
        input_ids,
        positions,
        row_seq,
        ngram_ids if has_windows else unread,
        cu_seqlens_q,
        seqlens_k,
        total_lens,
        sources,
        committed_lens,
        ngram_history if width > 1 else unread,
        emitted,
        num_emitted,
        unread if drafts is None else drafts,
        token_map if has_windows else unread[0],
        is_barrier.view(torch.uint8) if has_windows else unread[0].view(torch.uint8),
        *corrected,
        windows if has_windows else unread,
        pad_id,
    )
    return *corrected, windows
