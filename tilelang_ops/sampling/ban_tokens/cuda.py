"""ban_tokens on CUDA: a block per row; floats are compared by integers of the same order, NaN above all."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import float_bits
from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
NAN = 0x7FC00000


@cuda_kernel(builds=lambda model: [{}])
def kernel():
    n, vocab, num_ids = T.dynamic("n"), T.dynamic("vocab"), T.dynamic("num_ids")

    @T.prim_func
    def ban_tokens(
        logits: T.Tensor((n, vocab), "float32"),
        token_ids: T.Tensor((num_ids,), "int32"),
        largest: T.Tensor((n,), "float32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            thread = T.get_thread_binding()
            keys = T.alloc_fragment((THREADS,), "int32")
            top = T.alloc_fragment((1,), "int32")
            bits = T.alloc_local((1,), "int32")
            token = T.alloc_local((1,), "int32")
            for lane in T.Parallel(THREADS):
                keys[lane] = T.int32(-(2**31))
                for i in T.serial(T.ceildiv(num_ids, THREADS)):
                    if i * THREADS + lane < num_ids:
                        token[0] = token_ids[i * THREADS + lane]
                        bits[0] = float_bits(logits[row, token[0]])
                        logits[row, token[0]] = -T.infinity("float32")
                        if (bits[0] & 0x7FFFFFFF) > 0x7F800000:
                            bits[0] = NAN
                        elif bits[0] < 0:
                            bits[0] = bits[0] ^ 0x7FFFFFFF
                        keys[lane] = T.max(keys[lane], bits[0])
            T.reduce_max(keys, top, dim=0)
            if thread == 0:
                bits[0] = top[0]
                if bits[0] < 0:
                    bits[0] = bits[0] ^ 0x7FFFFFFF
                largest[row] = T.reinterpret(bits[0], "float32")

    return ban_tokens


def run(logits: Tensor, token_ids: Tensor) -> Tensor:
    largest = torch.empty(logits.shape[0], device=logits.device)
    kernel()(logits, token_ids, largest)
    return largest
