"""gather_rows on CUDA: 16 bytes a thread; the rows are moved as bytes of whatever they hold."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.sizes import ModelSizes

THREADS = 128
UNITS = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}  # bytes -> the type that rows are moved in


def _builds(model: ModelSizes) -> list[dict[str, Any]]:
    """Angles of rotations, and what narrows in a prefill."""
    hidden, streams = model.hidden_size, model.hc_mult
    narrowing = {
        2 * hidden,  # an activation
        hidden,  # its codes
        2 * (model.q_lora_rank + model.head_dim),
        2 * streams * hidden,
        4 * streams,
        4 * streams * streams,
        2 * model.dspark_num_targets * hidden,
        4 * model.sliding_window,
        4 * model.index_topk,
        4 * model.candidate_topk_blocks,
        4 * model.engram_columns,
        4,
        8,
        1,  # flags
    }
    found = [("int64", row_bytes) for row_bytes in sorted(narrowing)]
    found.append(("int32", 2 * model.qk_rope_head_dim))
    return [{**_units(row_bytes, 0), "index_type": index_type} for index_type, row_bytes in found]


def _units(row_bytes: int, offset: int) -> dict[str, Any]:
    """In which type rows are moved that begin at a multiple of the type's size behind `offset` bytes."""
    size = next(b for b in UNITS if row_bytes % b == 0 and offset % b == 0)
    return {"width": row_bytes // size, "unit": UNITS[size]}


@cuda_kernel(builds=_builds)
def kernel(width: int, unit: str, index_type: str):
    """`width` of a row, in units."""
    n, num_rows = T.dynamic("n"), T.dynamic("num_rows")
    step = 2 if width % 2 == 0 else 1
    parts = width // step
    lanes = min(THREADS, 1 << (parts - 1).bit_length())  # threads of a row
    rows = THREADS // lanes

    @T.prim_func
    def gather_rows(
        src: T.Tensor((num_rows, width), unit),
        index: T.Tensor((n,), index_type),
        out: T.Tensor((n, width), unit),
        divisor: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            for r, lane in T.Parallel(rows, lanes):
                if block * rows + r < n:
                    number = T.alloc_var(index_type)
                    row = T.alloc_var("int64")
                    number = index[block * rows + r]
                    row = -1
                    if number >= 0:
                        row = T.cast(T.truncdiv(number, T.cast(divisor, index_type)), "int64")
                    for i in T.unroll(T.ceildiv(parts, lanes)):
                        part = i * lanes + lane
                        if part < parts:
                            moved = T.alloc_local((step,), unit)
                            for k in T.vectorized(step):
                                moved[k] = T.cast(0, unit)
                            if row >= 0 and row < num_rows:
                                for k in T.vectorized(step):
                                    moved[k] = src[row, part * step + k]
                            for k in T.vectorized(step):
                                out[block * rows + r, part * step + k] = moved[k]

    return gather_rows


def run(src: Tensor, index: Tensor, divisor: int) -> Tensor:
    out = torch.empty(*index.shape, src.shape[1], dtype=src.dtype, device=src.device)
    row_bytes = src.shape[1] * src.element_size()
    sizes = _units(row_bytes, src.storage_offset() * src.element_size())
    unit = getattr(torch, sizes["unit"])
    rows = src.view(torch.uint8).view(unit)
    index_type = str(index.dtype).removeprefix("torch.")
    program = kernel(**sizes, index_type=index_type)
    program(
        rows, index.contiguous().view(-1), out.view(-1, src.shape[1]).view(torch.uint8).view(unit), divisor
    )
    return out
