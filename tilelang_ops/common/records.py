"""Address the records of a strided pool [parts, records, fields] by one flat number.

Record i of a pool is `pool[i // records, i % records]`. Pools are laid out so that the stride of a part is a
multiple of a record, so all records of a pool are rows of one contiguous matrix.
"""

from __future__ import annotations

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
