"""gather_slots on CUDA: a block per place, 16 bytes a thread at a time; empty places are left as they are."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import E4M3
from tilelang_ops.common.row_codes import UNIT, RowCodes
from tilelang_ops.common.sizes import ModelSizes

THREADS = 128


def row_forms(model: ModelSizes) -> list[dict[str, Any]]:
    """Rows as programs take them, of bfloat16 values or of codes."""
    coded = [{"width": model.hidden_size, "is_coded": True}] if model.hidden_size % UNIT == 0 else []
    return [{"width": model.hidden_size // 4, "is_coded": False}, *coded]


def tensor_shapes(width: int, is_coded: bool) -> tuple[int, str, int, str, int]:
    """Width and dtype of rows and of the result, and parts of a row; `width` in units of 8 bytes, even, or
    channels of codes, which become bfloat16."""
    if is_coded:
        return width, "float8_e4m3fn", width, "bfloat16", width // 8
    return width, "int64", width, "int64", width // 2


@T.macro
def move(rows, scales, out, row, place, part, is_coded):
    """16 bytes of the result."""
    if is_coded:
        code = T.alloc_local((8,), "float8_e4m3fn")
        for k in T.vectorized(8):
            code[k] = rows[row, part * 8 + k]
        scale = T.alloc_var("float32")
        scale = scales[part // (UNIT // 8), row]
        for k in T.vectorized(8):
            out[place, part * 8 + k] = T.cast(T.cast(code[k], "float32") * scale, "bfloat16")
    else:
        moved = T.alloc_local((2,), "int64")
        for k in T.vectorized(2):
            moved[k] = rows[row, part * 2 + k]
        for k in T.vectorized(2):
            out[place, part * 2 + k] = moved[k]


@cuda_kernel(
    builds=lambda model: [
        {**form, "num_slots": slots}
        for slots in (model.num_experts_per_tok, model.dspark_num_experts_per_tok)
        for form in row_forms(model)
    ]
)
def kernel(width: int, is_coded: bool, num_slots: int):
    n, num_places, padded = (T.dynamic(name) for name in ("n", "num_places", "padded"))
    row_width, row_type, out_width, out_type, parts = tensor_shapes(width, is_coded)
    padded = padded if is_coded else n

    @T.prim_func
    def gather_slots(
        rows: T.Tensor((n, row_width), row_type),
        scales: T.Tensor((T.ceildiv(width, UNIT), padded), "float32"),
        weights: T.Tensor((n * num_slots,), "float32"),
        slots: T.Tensor((num_places,), "int32"),
        out: T.Tensor((num_places, out_width), out_type),
        factors: T.Tensor((num_places,), "float32"),
    ):
        with T.Kernel(num_places, threads=THREADS) as place:
            slot = T.alloc_var("int32")
            slot = slots[place]
            if slot >= 0:
                row = T.truncdiv(slot, num_slots)
                for i in T.unroll(T.ceildiv(parts, THREADS)):
                    part = i * THREADS + T.get_thread_binding()
                    if part < parts:
                        move(rows, scales, out, row, place, part, is_coded)
                if T.get_thread_binding() == 0:
                    factors[place] = weights[slot]

    return gather_slots


def operands(rows: Tensor | RowCodes, num_places: int) -> tuple[dict[str, Any], Tensor, Any, Any]:
    """Sizes of programs, the result, and the rows and the result as programs take them."""
    if isinstance(rows, RowCodes):
        width = rows.codes.shape[1]
        out = torch.empty(num_places, width, dtype=torch.bfloat16, device=rows.codes.device)
        return {"width": width, "is_coded": True}, out, (rows.codes.view(E4M3), rows.scales), out
    out = rows.new_empty(num_places, rows.shape[1])
    wide, out_wide = (t.view(torch.uint8).view(torch.int64) for t in (rows, out))
    return {"width": wide.shape[1], "is_coded": False}, out, (wide, None), out_wide


def run(rows: Tensor | RowCodes, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    sizes, out, inputs, out_wide = operands(rows, slots.shape[0])
    factors = weights.new_empty(slots.shape[0])
    kernel(**sizes, num_slots=weights.shape[1])(*inputs, weights.view(-1), slots, out_wide, factors)
    return out, factors
