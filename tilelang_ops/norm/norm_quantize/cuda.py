"""norm_quantize on CUDA: a block per row, or per few narrow rows, that holds them in registers."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import e8m0_inverse, fp8_scale_byte, magnitude_bits
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.norm.norm_quantize.op import Normed

THREADS = 128
GROUP = 32


def rows_per_block(width: int) -> int:
    """Rows that give every thread 8 channels at least."""
    return max(1, THREADS * 8 // width)


@cuda_kernel(
    builds=lambda model: [
        {
            "width": width,
            "source": "bfloat16",
            "keeps_values": keeps,
            "quantizes": quantizes,
            "adds_residual": False,
        }
        for width, keeps, quantizes in (
            (model.hidden_size, True, False),
            (model.hidden_size, True, True),
            (model.hidden_size, False, True),
            (model.q_lora_rank, True, False),
            (model.q_lora_rank, False, True),
            (model.head_dim, True, False),
        )
    ]
)
def kernel(width: int, source: str, keeps_values: bool, quantizes: bool, adds_residual: bool):
    n = T.dynamic("n")
    group = GROUP if quantizes else min(GROUP, width)
    groups = T.ceildiv(width, group)
    rows = rows_per_block(width)

    @T.prim_func
    def norm_quantize(
        x: T.Tensor((n, width), source),
        residual: T.Tensor((n, width), source),
        weight: T.Tensor((width,), "float32"),
        values: T.Tensor((n, width), source),
        codes: T.Tensor((n, width), "float8_e4m3fn"),
        scales: T.Tensor((n, groups), "uint8"),
        total: T.Tensor((n, width), source),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            row = T.alloc_fragment((rows, groups, group), "float32")
            squares = T.alloc_fragment((rows, groups, group), "float32")
            partial = T.alloc_fragment((rows, groups), "float32")
            inverse = T.alloc_fragment((rows,), "float32")
            for r, g, c in T.Parallel(rows, groups, group):
                row[r, g, c] = T.cast(x[block * rows + r, g * group + c], "float32")
            if adds_residual:
                for r, g, c in T.Parallel(rows, groups, group):
                    added = row[r, g, c] + T.cast(residual[block * rows + r, g * group + c], "float32")
                    row[r, g, c] = T.cast(T.cast(added, source), "float32")
                for r, g, c in T.Parallel(rows, groups, group):
                    total[block * rows + r, g * group + c] = T.cast(row[r, g, c], source)
            for r, g, c in T.Parallel(rows, groups, group):
                squares[r, g, c] = row[r, g, c] * row[r, g, c]
            T.reduce_sum(squares, partial, dim=2)
            T.reduce_sum(partial, inverse, dim=1)
            for r in T.Parallel(rows):
                inverse[r] = 1.0 / T.sqrt(inverse[r] / width + eps)
            for r, g, c in T.Parallel(rows, groups, group):
                normed = row[r, g, c] * inverse[r] * weight[g * group + c]
                row[r, g, c] = T.cast(T.cast(normed, source), "float32")
            if keeps_values:
                for r, g, c in T.Parallel(rows, groups, group):
                    values[block * rows + r, g * group + c] = T.cast(row[r, g, c], source)
            if quantizes:
                bits = T.alloc_fragment((rows, groups, group), "int32")
                amax = T.alloc_fragment((rows, groups), "int32")
                factor = T.alloc_fragment((rows, groups), "float32")
                for r, g, c in T.Parallel(rows, groups, group):
                    bits[r, g, c] = magnitude_bits(row[r, g, c])
                T.reduce_max(bits, amax, dim=2)
                for r, g in T.Parallel(rows, groups):
                    scale = fp8_scale_byte(amax[r, g])
                    factor[r, g] = e8m0_inverse(scale)
                    scales[block * rows + r, g] = T.cast(scale, "uint8")
                for r, g, c in T.Parallel(rows, groups, group):
                    codes[block * rows + r, g * group + c] = T.cast(
                        row[r, g, c] * factor[r, g], "float8_e4m3fn"
                    )

    return norm_quantize


def launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    *,
    keeps_values: bool,
    quantizes: bool,
) -> Normed:
    x = x.contiguous()
    num_rows, width = x.shape
    values = torch.empty_like(x) if keeps_values else None
    total = torch.empty_like(x) if residual is not None else None
    codes = torch.empty_like(x, dtype=torch.uint8) if quantizes else None
    scales = x.new_empty(num_rows, width // GROUP, dtype=torch.uint8) if quantizes else None
    if num_rows > 0:
        program = kernel(
            width=width,
            source=str(x.dtype).removeprefix("torch."),
            keeps_values=keeps_values,
            quantizes=quantizes,
            adds_residual=residual is not None,
        )
        encoded = None if codes is None else codes.view(torch.float8_e4m3fn)
        program(x, residual, weight, values, encoded, scales, total, eps)
    return Normed(values, codes, scales, total)


def run(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, keeps_values: bool) -> Normed:
    return launch(x, weight, eps, residual, keeps_values=keeps_values, quantizes=True)
