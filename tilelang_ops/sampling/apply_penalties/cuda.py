"""apply_penalties on CUDA: a thread per pair. Every step is rounded by itself, as in the reference."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(builds=lambda model: [{"vocab": model.vocab_size}])
def kernel(vocab: int):
    num_rows, num_pairs, stride = T.dynamic("num_rows"), T.dynamic("num_pairs"), T.dynamic("stride")

    @T.prim_func
    def apply_penalties(
        logits: T.StridedTensor((num_rows, vocab), (stride, 1), "float32"),
        rows: T.Tensor((num_pairs,), "int32"),
        tokens: T.Tensor((num_pairs,), "int32"),
        counts: T.Tensor((num_pairs,), "int32"),
        repetition: T.Tensor((num_rows,), "float32"),
        frequency: T.Tensor((num_rows,), "float32"),
        presence: T.Tensor((num_rows,), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_pairs, THREADS), threads=THREADS) as block:
            pair = block * THREADS + T.get_thread_binding(0)
            value = T.alloc_local((1,), "float32")
            place = T.alloc_local((2,), "int32")
            if pair < num_pairs:
                place[0] = rows[pair]
                place[1] = tokens[pair]
                count = T.cast(counts[pair], "float32")
                value[0] = logits[place[0], place[1]]
                factor = repetition[place[0]]
                if value[0] > T.float32(0.0):
                    value[0] = T.ieee_fdiv(value[0], factor)
                else:
                    value[0] = T.ieee_mul(value[0], factor)
                value[0] = T.ieee_sub(value[0], T.ieee_mul(frequency[place[0]], count))
                seen = T.if_then_else(count > T.float32(0.0), T.float32(1.0), T.float32(0.0))
                value[0] = T.ieee_sub(value[0], T.ieee_mul(presence[place[0]], seen))
                logits[place[0], place[1]] = value[0]

    return apply_penalties


def run(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    parameters = (t.contiguous() for t in (rows, tokens, counts, repetition, frequency, presence))
    kernel(vocab=logits.shape[1])(logits, *parameters)
