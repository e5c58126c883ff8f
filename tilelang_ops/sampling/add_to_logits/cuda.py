"""add_to_logits on CUDA: a thread per pair."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(builds=lambda model: [{"vocab": model.vocab_size, "has_values": v} for v in (False, True)])
def kernel(vocab: int, has_values: bool):
    num_rows, num_pairs, stride = T.dynamic("num_rows"), T.dynamic("num_pairs"), T.dynamic("stride")

    @T.prim_func
    def add_to_logits(
        logits: T.StridedTensor((num_rows, vocab), (stride, 1), "float32"),
        rows: T.Tensor((num_pairs,), "int32"),
        tokens: T.Tensor((num_pairs,), "int32"),
        values: T.Tensor((num_pairs if has_values else 1,), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_pairs, THREADS), threads=THREADS) as block:
            pair = block * THREADS + T.get_thread_binding(0)
            place = T.alloc_local((2,), "int32")
            if pair < num_pairs:
                place[0] = rows[pair]
                place[1] = tokens[pair]
                if has_values:
                    logits[place[0], place[1]] = logits[place[0], place[1]] + values[pair]
                else:
                    logits[place[0], place[1]] = -T.infinity("float32")

    return add_to_logits


def run(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor | None) -> None:
    program = kernel(vocab=logits.shape[1], has_values=values is not None)
    numbers = logits.new_empty(1) if values is None else values.contiguous()
    program(logits, rows.contiguous(), tokens.contiguous(), numbers)
