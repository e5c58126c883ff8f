"""judge_rows on CUDA: a thread per row; NaN is told by its bits."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.cuda_numerics import float_bits
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.sampling.judge_rows.op import NO_TOKEN, NUMERICS

THREADS = 128
INFINITY = 0x7F800000
MINUS_INFINITY = 0xFF800000 - 2**32


@cuda_kernel(builds=lambda model: [{}])
def kernel():
    n = T.dynamic("n")

    @T.prim_func
    def judge_rows(
        token_ids: T.Tensor((n,), "int32"),
        best: T.Tensor((n,), "float32"),
        outside: T.Tensor((n,), "float32"),
        sound_ids: T.Tensor((n,), "int32"),
        faults: T.Tensor((n,), "uint8"),
    ):
        with T.Kernel(T.ceildiv(n, THREADS), threads=THREADS) as block:
            row = block * THREADS + T.get_thread_binding()
            bits = T.alloc_local((2,), "int32")
            fault = T.alloc_local((1,), "int32")
            if row < n:
                bits[0] = float_bits(best[row])
                bits[1] = float_bits(outside[row])
                fault[0] = 0
                if bits[0] == MINUS_INFINITY:
                    fault[0] = T.if_then_else(bits[1] == MINUS_INFINITY, NUMERICS, NO_TOKEN)
                for i in T.unroll(2):
                    if (bits[i] & 0x7FFFFFFF) > INFINITY or bits[i] == INFINITY:
                        fault[0] = NUMERICS
                faults[row] = T.cast(fault[0], "uint8")
                sound_ids[row] = T.if_then_else(fault[0] == 0, token_ids[row], 0)

    return judge_rows


def run(token_ids: Tensor, best: Tensor, outside: Tensor | None, sound_ids: Tensor, faults: Tensor) -> None:
    kernel()(token_ids, best, best if outside is None else outside, sound_ids, faults)
