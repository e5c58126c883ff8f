"""Cases of the operators that write, move and read cache records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, equal, returning, seeded
from tilelang_ops.common.numerics import (
    decode_fp4,
    decode_fp8,
    decode_mxfp4,
    encode_fp4,
    encode_fp8,
    encode_mxfp4,
)
from tilelang_ops.common.records import flat_rows, row_numbers
from tilelang_ops.kv_cache import (
    copy_records,
    copy_rows,
    load_index_keys,
    load_records,
    select_state_slice,
    store_index_keys,
    store_main,
    store_window,
)
from tilelang_ops.kv_cache.copy_records import reference as copy_records_reference
from tilelang_ops.kv_cache.copy_rows import reference as copy_rows_reference
from tilelang_ops.kv_cache.load_index_keys import reference as load_index_keys_reference
from tilelang_ops.kv_cache.load_records import reference as load_records_reference
from tilelang_ops.kv_cache.select_state_slice import reference as state_slice_reference
from tilelang_ops.kv_cache.store_index_keys import reference as index_keys_reference
from tilelang_ops.kv_cache.store_main import reference as main_reference
from tilelang_ops.kv_cache.store_window import reference as window_reference

WIDTH, RING, BLOCK = 512, 134, 128


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    sizes = (3, 300) if small else (256, 8192, 65536)
    num_bytes = 1 << 10 if small else 1 << 21
    stores = [
        ("store_window", store_window, window_reference.run, encode_fp8, 528, RING),
        ("store_main", store_main, main_reference.run, encode_fp4, 288, BLOCK),
    ]
    found = [_store(rows, *store) for store in stores for rows in sizes]
    found += [_store_index_keys(rows) for rows in sizes]
    found += [_copy_records(rows) for rows in sizes]
    found += [_load(rows, "window", decode_fp8, 528, RING) for rows in sizes[1:]]
    found += [_load(rows, "main", decode_fp4, 288, BLOCK) for rows in sizes[1:]]
    found += [_load_index_keys(rows) for rows in sizes[1:]]
    return [*found, _copy_rows(8, num_bytes), _copy_rows(24, num_bytes), _state_slice(20)]


def _pool(rows: int, records: int, num_bytes: int) -> Tensor:
    """Zeros with gaps between the parts, as sections of a block have them."""
    parts = -(-rows // records) + 1
    return torch.zeros(parts, records + 3, num_bytes, dtype=torch.uint8)[:, :records]


def _index(rows: int, pool: Tensor, generator: torch.Generator) -> Tensor:
    """Records one after the other in blocks that lie anywhere, as sequences own them."""
    parts, records = pool.shape[:2]
    order = torch.randperm(parts, generator=generator)
    return (order[:, None] * records + torch.arange(records)).flatten()[:rows]


def _put(pool: Tensor, index: Tensor, records: Tensor) -> None:
    flat_rows(pool).index_copy_(0, row_numbers(pool, index), records)


def _take(pool: Tensor, index: Tensor) -> Tensor:
    return flat_rows(pool).index_select(0, row_numbers(pool, index))


def _store(
    rows: int,
    name: str,
    op: Callable[..., None],
    meaning: Callable[..., None],
    encode: Callable[[Tensor], tuple[Tensor, Tensor]],
    num_bytes: int,
    records: int,
) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        pool = _pool(rows, records, num_bytes)
        values = torch.randn(rows, WIDTH, generator=generator).bfloat16()
        return values, pool, _index(rows, pool, generator)

    def in_torch(values: Tensor, pool: Tensor, index: Tensor) -> None:
        _put(pool, index, torch.cat(encode(values), dim=1))

    return Case(
        op=f"kv_cache.{name}",
        size=f"{rows} rows",
        bytes=rows * (WIDTH * 2 + num_bytes + 8),
        flops=0,
        make=make,
        run=returning(1, op),
        torch=returning(1, in_torch),
        check=equal(returning(1, meaning)),
    )


def _store_index_keys(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        codes, scales = _pool(rows, BLOCK, 64), _pool(rows, BLOCK, 4)
        keys = torch.randn(rows, 128, generator=generator).bfloat16()
        return keys, codes, scales, _index(rows, codes, generator)

    def in_torch(keys: Tensor, codes: Tensor, scales: Tensor, index: Tensor) -> None:
        for pool, fields in zip((codes, scales), encode_mxfp4(keys), strict=True):
            _put(pool, index, fields)

    pools = slice(1, 3)
    return Case(
        op="kv_cache.store_index_keys",
        size=f"{rows} rows",
        bytes=rows * (128 * 2 + 68 + 8),
        flops=0,
        make=make,
        run=returning(pools, store_index_keys),
        torch=returning(pools, in_torch),
        check=equal(returning(pools, index_keys_reference.run)),
    )


def _copy_records(rows: int) -> Case:
    """Window records from a line to rings."""

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        line = torch.randint(0, 256, (1, rows, 528), dtype=torch.uint8, generator=generator)
        rings = _pool(rows, RING, 528)
        return line, torch.arange(rows), rings, _index(rows, rings, generator)

    def in_torch(src: Tensor, src_index: Tensor, dst: Tensor, dst_index: Tensor) -> None:
        _put(dst, dst_index, src[0].index_select(0, src_index))

    return Case(
        op="kv_cache.copy_records",
        size=f"{rows} window records",
        bytes=rows * (2 * 528 + 16),
        flops=0,
        make=make,
        run=returning(2, copy_records),
        torch=returning(2, in_torch),
        check=equal(returning(2, copy_records_reference.run)),
    )


def _load(
    rows: int,
    name: str,
    decode: Callable[[Tensor, Tensor], Tensor],
    num_bytes: int,
    records: int,
) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        pool = _pool(rows, records, num_bytes)
        pool.random_(0, 120, generator=generator)
        return pool, _index(rows, pool, generator)

    def in_torch(pool: Tensor, index: Tensor) -> Tensor:
        code_bytes = WIDTH if num_bytes > WIDTH else WIDTH // 2
        return decode(*_take(pool, index).tensor_split([code_bytes], dim=1)).bfloat16()

    return Case(
        op="kv_cache.load_records",
        size=f"{rows} {name} records",
        bytes=rows * (WIDTH * 2 + num_bytes + 8),
        flops=0,
        make=make,
        run=lambda pool, index: load_records(pool, index, WIDTH),
        torch=in_torch,
        check=equal(lambda *args: load_records_reference.run(*args, WIDTH, torch.bfloat16)),
    )


def _load_index_keys(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        codes, scales = _pool(rows, BLOCK, 64), _pool(rows, BLOCK, 4)
        for pool in (codes, scales):
            pool.copy_(torch.randint(0, 150, pool.shape, generator=generator, dtype=torch.uint8))
        return codes, scales, _index(rows, codes, generator)

    def in_torch(codes: Tensor, scales: Tensor, index: Tensor) -> Tensor:
        return decode_mxfp4(_take(codes, index), _take(scales, index)).bfloat16()

    return Case(
        op="kv_cache.load_index_keys",
        size=f"{rows} keys",
        bytes=rows * (128 * 2 + 68 + 8),
        flops=0,
        make=make,
        run=load_index_keys,
        torch=in_torch,
        check=equal(lambda *args: load_index_keys_reference.run(*args, torch.bfloat16)),
    )


def _copy_rows(count: int, num_bytes: int) -> Case:
    """Whole blocks within a pool."""

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        shape = 2 * count, num_bytes
        pool = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        pairs = torch.arange(2 * count).view(2, count).T.int().contiguous()
        return pool, pairs

    return Case(
        op="kv_cache.copy_rows",
        size=f"{count} rows of {num_bytes / 1e6:.1f} MB",
        bytes=2 * count * num_bytes,
        flops=0,
        make=make,
        run=returning(0, copy_rows),
        torch=returning(0, copy_rows_reference.run),
        check=equal(returning(0, copy_rows_reference.run)),
    )


def _state_slice(layers: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        shape = layers, RING, 528
        return (torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed)),)

    def in_torch(rings: Tensor) -> Tensor:
        return state_slice_reference.run(rings, 5000, 128)

    return Case(
        op="kv_cache.select_state_slice",
        size=f"{layers} layers",
        bytes=2 * layers * 128 * 528,
        flops=0,
        make=make,
        run=lambda rings: select_state_slice(rings, 5000, 128),
        torch=in_torch,
        check=equal(in_torch),
    )
