"""ring_index on CUDA: a thread for each position."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(builds=lambda model: [{"slot_type": kind} for kind in ("int32", "int64")])
def kernel(slot_type: str):
    n = T.dynamic("n")

    @T.prim_func
    def ring_index(
        state_slots: T.Tensor((n,), slot_type),
        positions: T.Tensor((n,), "int32"),
        out: T.Tensor((n,), "int64"),
        ring: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, THREADS), threads=THREADS) as block:
            row = block * THREADS + T.get_thread_binding()
            if row < n:
                place = T.cast(positions[row], "uint32") % T.cast(ring, "uint32")
                out[row] = T.cast(state_slots[row], "int64") * ring + T.cast(place, "int64")

    return ring_index


def run(state_slots: Tensor, positions: Tensor, ring: int) -> Tensor:
    out = torch.empty(positions.shape[0], dtype=torch.int64, device=positions.device)
    kernel(slot_type=str(state_slots.dtype).removeprefix("torch."))(state_slots, positions, out, ring)
    return out
