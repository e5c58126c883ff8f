"""Address the records of a strided pool [parts, records, fields] by one flat number.

Record i of a pool is `pool[i // records, i % records]`. Pools are laid out so that the stride of a part is a
multiple of a record, so all records of a pool are rows of one contiguous matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flat_rows(pool: Tensor) -> Tensor:
    """[rows, fields] contiguous alias of a pool [parts, records, fields], other sections' bytes included."""
    parts, records, fields = pool.shape
    per_part = rows_per_part(pool)
    return pool.as_strided(((parts - 1) * per_part + records, fields), (fields, 1), pool.storage_offset())


def row_numbers(pool: Tensor, index: Tensor) -> Tensor:
    """Rows of `flat_rows(pool)` where the records `index` (non-negative) lie."""
    records = pool.shape[1]
    per_part = rows_per_part(pool)
    return index if per_part == records else (index // records) * per_part + index % records


def rows_per_part(pool: Tensor) -> int:
    """Distance of two parts, in records."""
    fields = pool.shape[2]
    if pool.shape[0] == 1:
        return pool.shape[1]
    assert pool.stride(2) == 1 and pool.stride(1) == fields and pool.stride(0) % fields == 0, (
        f"{pool.stride()=}"
    )
    return pool.stride(0) // fields


def whole_rows(x: Tensor) -> tuple[Tensor, int]:
    """The rows, contiguous, that x [n, width] is columns of, and the first of those columns.

    They begin where a row of that length begins in x's storage.
    """
    length = x.stride(0)
    if length == x.shape[1]:
        return x, 0
    offset = x.storage_offset() % length
    assert x.stride(1) == 1 and offset + x.shape[1] <= length, f"{x.shape=} {x.stride()=}"
    return x.as_strided((x.shape[0], length), (length, 1), x.storage_offset() - offset), offset


def flat_words(pool: Tensor) -> tuple[Tensor, int, int]:
    """A pool [parts, records, fields] as 32-bit words, for kernels that move bytes.

    Returns:
        [size, lanes] int32 alias from its first word to its last; the distance of two parts in rows of it;
        lanes, 4 where every record starts at a multiple of 16 bytes, else 1.
    """
    parts, records, fields = pool.shape
    stride = pool.stride(0) if parts > 1 else records * fields
    scale = 4 // pool.element_size()
    assert pool.stride(2) == 1 and fields % scale == stride % scale == 0, f"{pool.stride()=}"
    size = (parts - 1) * stride + records * fields
    words = pool.as_strided((size,), (1,), pool.storage_offset()).view(torch.int32)
    stride, fields = stride // scale, fields // scale
    lanes = 4 if stride % 4 == 0 and fields % 4 == 0 and words.data_ptr() % 16 == 0 else 1
    return words.view(-1, lanes), stride // lanes, lanes
