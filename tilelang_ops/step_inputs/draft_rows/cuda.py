"""draft_rows on CUDA: a thread per sequence."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 64


@cuda_kernel(builds=lambda model: [{"has_list": has_list} for has_list in (False, True)])
def kernel(has_list: bool):
    n, num_seqs, width, num_drafts = (T.dynamic(x) for x in ("n", "num_seqs", "width", "num_drafts"))
    num_rows, num_outputs, num_listed = (T.dynamic(x) for x in ("num_rows", "num_outputs", "num_listed"))

    @T.prim_func
    def draft_rows(
        emitted: T.Tensor((num_seqs, width), "int32"),
        num_emitted: T.Tensor((num_seqs,), "int32"),
        final_rows: T.Tensor((num_seqs,), "int32"),
        positions: T.Tensor((num_rows,), "int32"),
        output_rows: T.Tensor((num_outputs,), "int32"),
        state_slots: T.Tensor((num_seqs,), "int32"),
        inv_temperature: T.Tensor((num_outputs,), "float32"),
        top_k: T.Tensor((num_outputs,), "int32"),
        top_p: T.Tensor((num_outputs,), "float32"),
        min_p: T.Tensor((num_outputs,), "float32"),
        seeds: T.Tensor((num_outputs,), "int64"),
        token_index: T.Tensor((num_outputs,), "int64"),
        seqs: T.Tensor((num_listed,), "int32"),
        ints: T.Tensor((4, n), "int32"),
        floats: T.Tensor((3, n), "float32"),
        own_seeds: T.Tensor((n,), "int64"),
        own_index: T.Tensor((num_drafts, n), "int64"),
        first: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, THREADS), threads=THREADS) as block:
            place = block * THREADS + T.get_thread_binding()
            seq = T.alloc_local((1,), "int32")
            last = T.alloc_local((1,), "int32")
            final = T.alloc_local((1,), "int32")
            row = T.alloc_local((1,), "int32")
            if place < n:
                seq[0] = first + place
                if has_list:
                    seq[0] = seqs[place]
                last[0] = T.max(num_emitted[seq[0]] - 1, 0)
                final[0] = T.max(T.min(final_rows[seq[0]], num_outputs - 1), 0)
                row[0] = output_rows[final[0]]
                ints[0, place] = emitted[seq[0], last[0]]
                ints[1, place] = positions[row[0]] + 1
                ints[2, place] = state_slots[seq[0]]
                ints[3, place] = top_k[final[0]]
                floats[0, place] = inv_temperature[final[0]]
                floats[1, place] = top_p[final[0]]
                floats[2, place] = min_p[final[0]]
                own_seeds[place] = seeds[final[0]]
                for step in T.serial(num_drafts):
                    own_index[step, place] = token_index[final[0]] + T.cast(step + 1, "int64")

    return draft_rows


def run(
    emitted: Tensor,
    num_emitted: Tensor,
    final_rows: Tensor,
    positions: Tensor,
    output_rows: Tensor,
    state_slots: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    num_drafts: int,
    seqs: Tensor | None,
    first: int,
) -> tuple[Tensor, ...]:
    n = num_emitted.shape[0] - first if seqs is None else seqs.shape[0]
    ints = emitted.new_empty(4, n)
    floats = torch.empty(3, n, device=emitted.device)
    own_seeds, own_index = seeds.new_empty(n), seeds.new_empty(num_drafts, n)
    if n > 0:
        kernel(has_list=seqs is not None)(
            emitted,
            num_emitted,
            final_rows,
            positions,
            output_rows,
            state_slots,
            inv_temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            token_index,
            num_emitted if seqs is None else seqs,
            ints,
            floats,
            own_seeds,
            own_index,
            first,
        )
    anchors, own_positions, slots, own_k = ints
    inverse, own_p, own_min_p = floats
    return anchors, own_positions, slots, inverse, own_k, own_p, own_min_p, own_seeds, own_index
