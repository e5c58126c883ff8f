"""select_state_slice on CUDA: a thread moves up to 16 bytes."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.records import flat_words

THREADS = 128


@cuda_kernel(
    builds=lambda model: [
        {"window": model.sliding_window, "words": (model.head_dim + model.head_dim // 32) // 4, "lanes": 4}
    ]
)
def kernel(window: int, words: int, lanes: int):
    """Records of `words` 32-bit words, `lanes` of them for a thread."""
    layers, size = T.dynamic("layers"), T.dynamic("size")
    pieces = words // lanes

    @T.prim_func
    def select_state_slice(
        rings: T.Tensor((size, lanes), "int32"),
        out: T.Tensor((layers, window * pieces, lanes), "int32"),
        end: T.int32,
        ring: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(window * pieces, THREADS), layers, threads=THREADS) as (block, layer):
            flat = block * THREADS + T.get_thread_binding()
            position = T.alloc_var("int32", init=end - window + flat // pieces)
            if flat < window * pieces:
                if position >= 0:
                    position = T.cast(T.cast(position, "uint32") % T.cast(ring, "uint32"), "int32")
                    source = layer * stride + position * pieces + flat % pieces
                    for j in T.vectorized(lanes):
                        out[layer, flat, j] = rings[source, j]
                else:
                    for j in T.vectorized(lanes):
                        out[layer, flat, j] = 0

    return select_state_slice


def run(rings: Tensor, end: int, window: int) -> Tensor:
    layers, ring, fields = rings.shape
    out = torch.empty(layers, window, fields, dtype=rings.dtype, device=rings.device)
    source, stride, lanes = flat_words(rings)
    program = kernel(window=window, words=fields * rings.element_size() // 4, lanes=lanes)
    program(source, out.view(torch.int32).view(layers, -1, lanes), end, ring, stride)
    return out
