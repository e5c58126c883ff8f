"""window_index on CUDA: a thread writes up to 4 neighbouring record numbers."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


def _builds(model):
    widths = model.sliding_window, model.sliding_window - 1  # of queries, and of the history before a chunk
    return [{"window": w, "lanes": lanes_of(w), "source": "int32"} for w in widths]


def lanes_of(window: int) -> int:
    """Record numbers of a thread."""
    return 4 if window % 4 == 0 else 1


@cuda_kernel(builds=_builds)
def kernel(window: int, lanes: int, source: str):
    n = T.dynamic("n")
    pieces = window // lanes

    @T.prim_func
    def window_index(
        positions: T.Tensor((n,), source),
        base: T.Tensor((n,), "int64"),
        out: T.Tensor((n, window), "int32"),
        ring: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * pieces, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, piece = flat // pieces, flat % pieces
            record = T.alloc_local((lanes,), "int32")
            if row < n:
                first = T.alloc_var(
                    "int32", init=T.cast(positions[row], "int32") - (window - 1) + piece * lanes
                )
                start = T.alloc_var("int32", init=T.cast(base[row], "int32"))
                for j in T.unroll(lanes):
                    record[j] = -1
                    if first + j >= 0:
                        place = T.alloc_var("int32", init=first + j)
                        if ring > 0:
                            place = T.cast(T.cast(place, "uint32") % T.cast(ring, "uint32"), "int32")
                        record[j] = start + place
                for j in T.vectorized(lanes):
                    out[row, piece * lanes + j] = record[j]

    return window_index


def run(positions: Tensor, base: Tensor, window: int, ring: int) -> Tensor:
    out = torch.empty(positions.shape[0], window, dtype=torch.int32, device=positions.device)
    source = str(positions.dtype).removeprefix("torch.")
    kernel(window=window, lanes=lanes_of(window), source=source)(
        positions.contiguous(), base.long().contiguous(), out, ring
    )
    return out
