"""rotate on CUDA: every thread turns four pairs of two vectors, in place."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
VECTORS_PER_THREAD = 2


@cuda_kernel(
    builds=lambda model: [
        {"width": width, "source": "bfloat16", "pairs": model.qk_rope_head_dim // 2, "heads": heads}
        for width, heads in (
            (model.head_dim, model.num_attention_heads),
            (model.head_dim, 1),
            (model.index_head_dim, model.index_n_heads),
            (model.index_head_dim, 1),
        )
    ]
)
def kernel(width: int, source: str, pairs: int, heads: int):
    n, positions = T.dynamic("n"), T.dynamic("positions")
    step = 4 if pairs % 4 == 0 else 1  # pairs of a thread
    parts = pairs // step
    rows = max(1, VECTORS_PER_THREAD * THREADS // parts)
    start = width - 2 * pairs

    @T.prim_func
    def rotate(
        x: T.Tensor((n, width), source),
        cos: T.Tensor((positions, pairs), "float32"),
        sin: T.Tensor((positions, pairs), "float32"),
        direction: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            for r, p in T.Parallel(rows, parts):
                row = block * rows + r
                if row < n:
                    v = T.alloc_local((2 * step,), source)
                    c = T.alloc_local((step,), "float32")
                    s = T.alloc_local((step,), "float32")
                    for k in T.vectorized(2 * step):
                        v[k] = x[row, start + p * 2 * step + k]
                    for k in T.vectorized(step):
                        c[k] = cos[row // heads, p * step + k]
                    for k in T.vectorized(step):
                        s[k] = sin[row // heads, p * step + k] * direction
                    for k in T.unroll(step):
                        a = T.cast(v[2 * k], "float32")
                        b = T.cast(v[2 * k + 1], "float32")
                        v[2 * k] = T.cast(a * c[k] - b * s[k], source)
                        v[2 * k + 1] = T.cast(a * s[k] + b * c[k], source)
                    for k in T.vectorized(2 * step):
                        x[row, start + p * 2 * step + k] = v[k]

    return rotate


def run(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    width = x.shape[-1]
    vectors = x.view(-1, width)
    program = kernel(
        width=width,
        source=str(x.dtype).removeprefix("torch."),
        pairs=cos.shape[1],
        heads=vectors.shape[0] // x.shape[0],
    )
    program(vectors, cos.contiguous(), sin.contiguous(), -1.0 if inverse else 1.0)
