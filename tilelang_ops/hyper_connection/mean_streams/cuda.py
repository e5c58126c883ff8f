"""mean_streams on CUDA, and any other sum over a row's streams: 8 channels a thread."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(
    builds=lambda model: [
        {
            "width": model.hidden_size,
            "num_streams": model.hc_mult,
            "source": "bfloat16",
            "out_width": out_width,
            "is_weighted": is_weighted,
        }
        for out_width, is_weighted in (
            (model.hidden_size, True),
            (model.hidden_size * model.dspark_num_targets, False),
        )
    ]
)
def kernel(width: int, num_streams: int, source: str, out_width: int, is_weighted: bool):
    n = T.dynamic("n")
    m = num_streams
    step = 8 if width % 8 == 0 else 1
    parts = width // step

    @T.prim_func
    def mean_streams(
        streams: T.Tensor((n, m, width), source),
        pre: T.Tensor((n, m), "float32"),
        out: T.Tensor((n, out_width), source),
        start: T.int32,
    ):
        with T.Kernel(n, threads=THREADS) as row:
            weights = T.alloc_local((m,), "float32")
            if is_weighted:
                for i in T.serial(m):
                    weights[i] = pre[row, i]
            for p in T.Parallel(parts):
                old = T.alloc_local((m, step), "float32")
                total = T.alloc_local((step,), "float32")
                for i in T.unroll(m):
                    for k in T.vectorized(step):
                        old[i, k] = T.cast(streams[row, i, p * step + k], "float32")
                for k in T.unroll(step):
                    total[k] = 0.0
                    for i in T.unroll(m):
                        if is_weighted:
                            total[k] = total[k] + weights[i] * old[i, k]
                        else:
                            total[k] = total[k] + old[i, k]
                    if not is_weighted:
                        total[k] = total[k] / m
                for k in T.vectorized(step):
                    out[row, start * width + p * step + k] = T.cast(total[k], source)

    return mean_streams


def run(streams: Tensor, features: Tensor, target: int) -> None:
    _, num_streams, width = streams.shape
    program = kernel(
        width=width,
        num_streams=num_streams,
        source=str(streams.dtype).removeprefix("torch."),
        out_width=features.shape[1],
        is_weighted=False,
    )
    program(streams, None, features, target)
