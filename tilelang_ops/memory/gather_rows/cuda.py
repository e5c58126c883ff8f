"""gather_rows on CUDA: 16 bytes a thread; the rows are moved as bytes of whatever they hold."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
UNITS = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}  # bytes -> the type that rows are moved in


@cuda_kernel(
    builds=lambda model: [
        {"width": model.hidden_size // 4, "unit": "int64", "index_type": index_type}
        for index_type in ("int32", "int64")
    ]
)
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
    size = next(b for b in UNITS if row_bytes % b == 0 and src.storage_offset() * src.element_size() % b == 0)
    unit = getattr(torch, UNITS[size])
    rows = src.view(torch.uint8).view(unit)
    index_type = str(index.dtype).removeprefix("torch.")
    program = kernel(width=row_bytes // size, unit=UNITS[size], index_type=index_type)
    program(
        rows, index.contiguous().view(-1), out.view(-1, src.shape[1]).view(torch.uint8).view(unit), divisor
    )
    return out
