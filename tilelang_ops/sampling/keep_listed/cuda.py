"""keep_listed on CUDA: a block per row marks the listed tokens in shared memory, then writes the others."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 512


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size}],
    pass_configs={"tl.disable_thread_storage_sync": True},
)
def kernel(vocab: int):
    num_rows, num_lists, stride = T.dynamic("num_rows"), T.dynamic("num_lists"), T.dynamic("stride")
    num_offsets, num_tokens = T.dynamic("num_offsets"), T.dynamic("num_tokens")

    @T.prim_func
    def keep_listed(
        logits: T.StridedTensor((num_rows, vocab), (stride, 1), "float32"),
        rows: T.Tensor((num_lists,), "int32"),
        offsets: T.Tensor((num_offsets,), "int32"),
        tokens: T.Tensor((num_tokens,), "int32"),
    ):
        with T.Kernel(num_lists, threads=THREADS) as block:
            thread = T.get_thread_binding(0)
            listed = T.alloc_shared((vocab,), "uint8")
            at = T.alloc_local((1,), "int32")
            row = T.alloc_local((1,), "int32")
            row[0] = rows[block]
            at[0] = thread
            while at[0] < vocab:
                listed[at[0]] = T.uint8(0)
                at[0] = at[0] + THREADS
            T.sync_threads()
            at[0] = offsets[block] + thread
            while at[0] < offsets[block + 1]:
                listed[tokens[at[0]]] = T.uint8(1)
                at[0] = at[0] + THREADS
            T.sync_threads()
            at[0] = thread
            while at[0] < vocab:
                if listed[at[0]] == T.uint8(0):
                    logits[row[0], at[0]] = -T.infinity("float32")
                at[0] = at[0] + THREADS

    return keep_listed


def run(logits: Tensor, rows: Tensor, offsets: Tensor, tokens: Tensor) -> None:
    if tokens.shape[0] == 0:
        tokens = tokens.new_zeros(1)
    kernel(vocab=logits.shape[1])(logits, rows.contiguous(), offsets.contiguous(), tokens.contiguous())
