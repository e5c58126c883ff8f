"""gather_slots on CUDA: a block per place, 16 bytes a thread at a time; empty places are left as they are."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(
    builds=lambda model: [
        {"width": model.hidden_size // 4, "num_slots": slots}
        for slots in (model.num_experts_per_tok, model.dspark_num_experts_per_tok)
    ]
)
def kernel(width: int, num_slots: int):
    """`width` of a row in units of 8 bytes, even."""
    n, num_places = T.dynamic("n"), T.dynamic("num_places")
    parts = width // 2

    @T.prim_func
    def gather_slots(
        rows: T.Tensor((n, width), "int64"),
        weights: T.Tensor((n * num_slots,), "float32"),
        slots: T.Tensor((num_places,), "int32"),
        out: T.Tensor((num_places, width), "int64"),
        factors: T.Tensor((num_places,), "float32"),
    ):
        with T.Kernel(num_places, threads=THREADS) as place:
            slot = T.alloc_var("int32")
            slot = slots[place]
            if slot >= 0:
                row = T.truncdiv(slot, num_slots)
                for i in T.unroll(T.ceildiv(parts, THREADS)):
                    part = i * THREADS + T.get_thread_binding()
                    if part < parts:
                        moved = T.alloc_local((2,), "int64")
                        for k in T.vectorized(2):
                            moved[k] = rows[row, part * 2 + k]
                        for k in T.vectorized(2):
                            out[place, part * 2 + k] = moved[k]
                if T.get_thread_binding() == 0:
                    factors[place] = weights[slot]

    return gather_slots


def run(rows: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    out = rows.new_empty(slots.shape[0], rows.shape[1])
    factors = weights.new_empty(slots.shape[0])
    wide, out_wide = (t.view(torch.uint8).view(torch.int64) for t in (rows, out))
    program = kernel(width=wide.shape[1], num_slots=weights.shape[1])
    program(wide, weights.view(-1), slots, out_wide, factors)
    return out, factors
