"""linear_fp8 on CUDA: weights decoded in registers; on SM100 into shared memory, sums in tensor memory."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.matrix import matrix_program, tile_rows


def _shapes(model):
    """(columns, width, groups) of the model's FP8 weights."""
    hidden, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    inner = model.moe_intermediate_size
    return [
        (model.q_lora_rank, hidden, 1),
        (heads, model.q_lora_rank, 1),
        (model.index_n_heads * model.index_head_dim, model.q_lora_rank, 1),
        (model.head_dim, hidden, 1),
        (model.o_lora_rank, heads // model.o_groups, model.o_groups),
        (hidden, model.o_groups * model.o_lora_rank, 1),
        (2 * inner, hidden, 1),
        (hidden, inner, 1),
    ]


@cuda_kernel(
    builds=lambda model: [
        {"columns": columns, "width": width, "num_groups": groups, "block_n": block_n}
        for columns, width, groups in _shapes(model)
        for block_n in (64, 128)
    ],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, num_groups: int, block_n: int, arch: str):
    return matrix_program(
        name="linear_fp8",
        fmt="fp8",
        columns=columns,
        width=width,
        result="bfloat16",
        block_m=128,
        block_n=block_n,
        stages=4,
        num_groups=num_groups,
        arch=arch,
    )


def run(x: Tensor, weight: Tensor, columns: int, num_groups: int) -> Tensor:
    num_rows, width = x.shape[0], x.shape[1] // num_groups
    out = x.new_empty(num_rows, num_groups * columns)
    program = kernel(columns=columns, width=width, num_groups=num_groups, block_n=tile_rows(num_rows))
    program(x.contiguous(), weight.view(torch.uint32).flatten(0, 1), out)
    return out
