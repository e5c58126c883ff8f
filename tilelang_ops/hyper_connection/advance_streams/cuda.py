"""advance_streams on CUDA: a block per row; a thread mixes a few channels of all its streams."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(
    builds=lambda model: [
        {
            "width": model.hidden_size,
            "num_streams": model.hc_mult,
            "source": "bfloat16",
            "expands": expands,
            "collapses": collapses,
        }
        for expands, collapses in ((True, True), (False, True), (True, False))
    ]
)
def kernel(width: int, num_streams: int, source: str, expands: bool, collapses: bool):
    """`expands` adds a pending output; `collapses` gives the collapsed vector and the mean square."""
    n = T.dynamic("n")
    m = num_streams
    step = 8 if width % 8 == 0 else 1  # channels of a thread at a time
    parts = width // step
    # Items of the loop: a number that divides, or is divided by, that of the threads.
    items = T.ceildiv(parts, THREADS) * THREADS if parts > THREADS else 1 << (parts - 1).bit_length()

    @T.prim_func
    def advance_streams(
        streams: T.Tensor((n, m, width), source),
        pre: T.Tensor((n, m), "float32"),
        output: T.Tensor((n, width), source),
        post: T.Tensor((n, m), "float32"),
        comb: T.Tensor((n, m, m), "float32"),
        advanced: T.Tensor((n, m, width), source),
        collapsed: T.Tensor((n, width), source),
        mean_square: T.Tensor((n,), "float32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            squares = T.alloc_fragment((items,), "float32")
            total = T.alloc_fragment((1,), "float32")
            mix = T.alloc_local((m, m), "float32")
            spread = T.alloc_local((m,), "float32")
            weights = T.alloc_local((m,), "float32")
            if expands:
                for i, j in T.grid(m, m):
                    mix[i, j] = comb[row, i, j]
                for j in T.serial(m):
                    spread[j] = post[row, j]
            if collapses:
                for j in T.serial(m):
                    weights[j] = pre[row, j]
            for p in T.Parallel(items):
                old = T.alloc_local((m, step), "float32")
                added = T.alloc_local((step,), "float32")
                sum_ = T.alloc_local((step,), "float32")
                vector = T.alloc_local((step,), "float32")
                square = T.alloc_var("float32")
                square = 0.0
                if p < parts:
                    for i in T.unroll(m):
                        for k in T.vectorized(step):
                            old[i, k] = T.cast(streams[row, i, p * step + k], "float32")
                    if expands:
                        for k in T.vectorized(step):
                            added[k] = T.cast(output[row, p * step + k], "float32")
                    for k in T.unroll(step):
                        vector[k] = 0.0
                    for j in T.unroll(m):
                        for k in T.unroll(step):
                            if expands:
                                sum_[k] = mix[0, j] * old[0, k]
                                for i in T.unroll(m - 1):
                                    sum_[k] = sum_[k] + mix[i + 1, j] * old[i + 1, k]
                                sum_[k] = T.cast(T.cast(sum_[k] + spread[j] * added[k], source), "float32")
                            else:
                                sum_[k] = old[j, k]
                            if collapses:
                                vector[k] = vector[k] + weights[j] * sum_[k]
                                square = square + sum_[k] * sum_[k]
                        if expands:
                            for k in T.vectorized(step):
                                advanced[row, j, p * step + k] = T.cast(sum_[k], source)
                    if collapses:
                        for k in T.vectorized(step):
                            collapsed[row, p * step + k] = T.cast(vector[k], source)
                if collapses:
                    squares[p] = square
            if collapses:
                T.reduce_sum(squares, total, dim=0)
                for k in T.Parallel(1):
                    mean_square[row] = total[k] / (m * width)

    return advance_streams


def launch(
    streams: Tensor,
    pre: Tensor | None,
    output: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Streams with the output if there is one; the collapsed vector and mean square if there is `pre`."""
    num_rows, num_streams, width = streams.shape
    advanced = streams if output is None else torch.empty_like(streams)
    collapsed = mean_square = None
    if pre is not None:
        collapsed = streams.new_empty(num_rows, width)
        mean_square = streams.new_empty(num_rows, dtype=torch.float32)
    if num_rows > 0:
        program = kernel(
            width=width,
            num_streams=num_streams,
            source=str(streams.dtype).removeprefix("torch."),
            expands=output is not None,
            collapses=pre is not None,
        )
        mixes = [None if t is None else t.contiguous() for t in (pre, output, post, comb)]
        program(streams, *mixes, None if output is None else advanced, collapsed, mean_square)
    return advanced, collapsed, mean_square


def run(
    streams: Tensor, pre: Tensor, output: Tensor | None, post: Tensor | None, comb: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return launch(streams, pre, output, post, comb)
