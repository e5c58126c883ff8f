"""apply_token_bitmask on CUDA: a thread per token; allowed logits are neither read nor written."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 256


@cuda_kernel(builds=lambda model: [{"vocab": model.vocab_size}])
def kernel(vocab: int):
    num_rows, num_masks, stride = T.dynamic("num_rows"), T.dynamic("num_masks"), T.dynamic("stride")
    words = -(-vocab // 32)

    @T.prim_func
    def apply_token_bitmask(
        logits: T.StridedTensor((num_rows, vocab), (stride, 1), "float32"),
        bitmask: T.Tensor((num_masks, words), "int32"),
        rows: T.Tensor((num_masks,), "int32"),
    ):
        with T.Kernel(num_masks, T.ceildiv(vocab, THREADS * 4), threads=THREADS) as (mask, tile):
            thread = T.get_thread_binding(0)
            row = T.alloc_local((1,), "int32")
            row[0] = rows[mask]
            for step in T.unroll(4):
                token = tile * (THREADS * 4) + step * THREADS + thread
                if token < vocab and ((bitmask[mask, token // 32] >> (token % 32)) & 1) == 0:
                    logits[row[0], token] = -T.infinity("float32")

    return apply_token_bitmask


def run(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    kernel(vocab=logits.shape[1])(logits, bitmask, rows.contiguous())
