"""Cases of the operators that write, move and read cache records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
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
from tilelang_ops.kv_cache.load_index_keys import reference as load_index_keys_reference
from tilelang_ops.kv_cache.load_records import reference as load_records_reference
from tilelang_ops.kv_cache.select_state_slice import reference as state_slice_reference
from tilelang_ops.kv_cache.store_index_keys import reference as index_keys_reference
from tilelang_ops.kv_cache.store_main import reference as main_reference
from tilelang_ops.kv_cache.store_window import reference as window_reference

RING, SLOTS = 134, 65
BLOCK = 128
ROWS = (256, 8192, 65536)


def cases() -> list[Case]:
    """The cases of this family."""
    stores = [
        ("store_window", store_window, window_reference.run, 512, 528, RING),
        ("store_main", store_main, main_reference.run, 512, 288, BLOCK),
    ]
    found = [_store(rows, *store) for store in stores for rows in ROWS]
    found += [_store_index_keys(rows) for rows in ROWS]
    found += [_copy_records(rows) for rows in ROWS]
    found += [_load(rows, "window", 512, 528, RING) for rows in ROWS[1:]]
    found += [_load(rows, "main", 512, 288, BLOCK) for rows in ROWS[1:]]
    found += [_load_index_keys(rows) for rows in ROWS[1:]]
    return [*found, _copy_rows(8, 1 << 21), _copy_rows(24, 1 << 21), _state_slice(20)]


def _pool(rows: int, records: int, num_bytes: int) -> Tensor:
    """Zeros with gaps between the parts, as sections of a block have them."""
    parts = -(-rows // records) + 1
    return torch.zeros(parts, records + 3, num_bytes, dtype=torch.uint8, device="cuda")[:, :records]


def _index(rows: int, pool: Tensor, generator: torch.Generator) -> Tensor:
    """Records one after the other in blocks that lie anywhere, as sequences own them."""
    parts, records = pool.shape[:2]
    order = torch.randperm(parts, generator=generator, device="cuda")
    return (order[:, None] * records + torch.arange(records, device="cuda")).flatten()[:rows]


def _store(
    rows: int,
    name: str,
    op: Callable[..., None],
    meaning: Callable[..., None],
    width: int,
    num_bytes: int,
    records: int,
) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        pool = _pool(rows, records, num_bytes)
        values = torch.randn(rows, width, generator=generator, device="cuda").bfloat16()
        return values, pool, _index(rows, pool, generator)

    def check(_: None, args: tuple[Tensor, ...]) -> None:
        values, pool, index = (x.cpu() for x in args)
        expected = torch.zeros(pool.shape, dtype=torch.uint8)
        meaning(values, expected, index)
        assert torch.equal(pool, expected), f"{int((pool != expected).sum())} bytes differ"

    return Case(
        op=f"kv_cache.{name}",
        size=f"{rows} rows",
        bytes=rows * (width * 2 + num_bytes + 8),
        flops=0,
        make=make,
        run=op,
        torch=None,
        check=check,
    )


def _store_index_keys(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        codes, scales = _pool(rows, BLOCK, 64), _pool(rows, BLOCK, 4)
        keys = torch.randn(rows, 128, generator=generator, device="cuda").bfloat16()
        return keys, codes, scales, _index(rows, codes, generator)

    def check(_: None, args: tuple[Tensor, ...]) -> None:
        keys, codes, scales, index = (x.cpu() for x in args)
        expected = torch.zeros(codes.shape, dtype=torch.uint8), torch.zeros(scales.shape, dtype=torch.uint8)
        index_keys_reference.run(keys, *expected, index)
        assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])

    return Case(
        op="kv_cache.store_index_keys",
        size=f"{rows} rows",
        bytes=rows * (128 * 2 + 68 + 8),
        flops=0,
        make=make,
        run=store_index_keys,
        torch=None,
        check=check,
    )


def _copy_records(rows: int) -> Case:
    """Window records from a line to rings."""

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        line = torch.randint(0, 256, (1, rows, 528), dtype=torch.uint8, device="cuda", generator=generator)
        rings = _pool(rows, RING, 528)
        return line, torch.arange(rows, device="cuda"), rings, _index(rows, rings, generator)

    def in_torch(src: Tensor, src_index: Tensor, dst: Tensor, dst_index: Tensor) -> None:
        flat = dst.as_strided((dst.shape[0] * (RING + 3), 528), (528, 1))
        flat.index_copy_(
            0, dst_index // RING * (RING + 3) + dst_index % RING, src[0].index_select(0, src_index)
        )

    def check(_: None, args: tuple[Tensor, ...]) -> None:
        line, src_index, rings, dst_index = args
        assert torch.equal(rings[dst_index // RING, dst_index % RING], line[0, src_index])

    return Case(
        op="kv_cache.copy_records",
        size=f"{rows} window records",
        bytes=rows * (2 * 528 + 16),
        flops=0,
        make=make,
        run=copy_records,
        torch=in_torch,
        check=check,
    )


def _load(rows: int, name: str, width: int, num_bytes: int, records: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        pool = _pool(rows, records, num_bytes)
        pool.random_(0, 120, generator=generator)
        return pool, _index(rows, pool, generator)

    def check(loaded: Tensor, args: tuple[Tensor, ...]) -> None:
        pool, index = (x.cpu() for x in args)
        expected = load_records_reference.run(pool, index, width, torch.bfloat16)
        assert torch.equal(loaded.cpu(), expected)

    return Case(
        op="kv_cache.load_records",
        size=f"{rows} {name} records",
        bytes=rows * (width * 2 + num_bytes + 8),
        flops=0,
        make=make,
        run=lambda pool, index: load_records(pool, index, width),
        torch=None,
        check=check,
    )


def _load_index_keys(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        codes, scales = _pool(rows, BLOCK, 64), _pool(rows, BLOCK, 4)
        for pool in (codes, scales):
            pool.copy_(
                torch.randint(0, 150, pool.shape, generator=generator, device="cuda", dtype=torch.uint8)
            )
        return codes, scales, _index(rows, codes, generator)

    def check(loaded: Tensor, args: tuple[Tensor, ...]) -> None:
        expected = load_index_keys_reference.run(*(x.cpu() for x in args), torch.bfloat16)
        assert torch.equal(loaded.cpu(), expected)

    return Case(
        op="kv_cache.load_index_keys",
        size=f"{rows} keys",
        bytes=rows * (128 * 2 + 68 + 8),
        flops=0,
        make=make,
        run=load_index_keys,
        torch=None,
        check=check,
    )


def _copy_rows(count: int, num_bytes: int) -> Case:
    """Whole blocks within a pool."""

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = 2 * count, num_bytes
        pool = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
        pairs = torch.arange(2 * count, device="cuda").view(2, count).T.int().contiguous()
        return pool, pairs

    def in_torch(pool: Tensor, pairs: Tensor) -> None:
        pool.index_copy_(0, pairs[:, 1].long(), pool.index_select(0, pairs[:, 0]))

    def check(_: None, args: tuple[Tensor, ...]) -> None:
        pool, pairs = args
        assert torch.equal(pool[pairs[:, 1].long()], pool[pairs[:, 0].long()])

    return Case(
        op="kv_cache.copy_rows",
        size=f"{count} rows of {num_bytes / 1e6:.1f} MB",
        bytes=2 * count * num_bytes,
        flops=0,
        make=make,
        run=copy_rows,
        torch=in_torch,
        check=check,
    )


def _state_slice(layers: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = layers, RING, 528
        return (torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator),)

    def check(state: Tensor, args: tuple[Tensor, ...]) -> None:
        assert torch.equal(state.cpu(), state_slice_reference.run(args[0].cpu(), 5000, 128))

    return Case(
        op="kv_cache.select_state_slice",
        size=f"{layers} layers",
        bytes=2 * layers * 128 * 528,
        flops=0,
        make=make,
        run=lambda rings: select_state_slice(rings, 5000, 128),
        torch=lambda rings: state_slice_reference.run(rings, 5000, 128),
        check=check,
    )
