"""Offsets and sizes of the pools: the release's exact numbers, and rules for any model."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deepinfer.models.base import CompressionSpec, ModelSpec, PagedSpec, WindowSpec
from deepinfer.runtime.cache_layout import CacheLayout


def spec_of(num_layers: int, first_decoder_layer: int, owners: dict[int, int], num_drafter: int) -> ModelSpec:
    """A model with 512 channels, index keys of 128, a window of 128 and `owners` (layer -> ratio)."""
    return ModelSpec(
        vocab_size=4096,
        num_layers=num_layers,
        first_decoder_layer=first_decoder_layer,
        max_ngram=4,
        draft_block_size=5,
        windows=tuple(WindowSpec(layer, 128, 512) for layer in range(num_layers + num_drafter)),
        paged=tuple(PagedSpec(layer, ratio, 512, 128) for layer, ratio in owners.items()),
        compression=tuple(CompressionSpec(layer, ratio, 512) for layer, ratio in owners.items() if ratio > 1),
    )


RELEASE = spec_of(40, 20, {2: 2, 8: 2, 14: 2, 20: 1}, 3)
TINY = spec_of(8, 4, {1: 2, 3: 2, 4: 1}, 3)


def build(spec: ModelSpec, release: bool = True, max_backtracking: int = 6) -> CacheLayout:
    return CacheLayout.build(spec, release=release, block_size=128, max_backtracking=max_backtracking)


def test_release_block() -> None:
    layout = build(RELEASE)
    assert [(s.layer_id, s.index_offset, s.main_offset) for s in layout.paged] == [
        (2, 0, 4352),
        (8, 22784, 27136),
        (14, 45568, 49920),
        (20, 68352, 77056),
    ]
    assert [(s.entries, s.index_bytes, s.entries * s.main_bytes) for s in layout.paged] == [
        (64, 4352, 18432),
        (64, 4352, 18432),
        (64, 4352, 18432),
        (128, 8704, 36864),
    ]
    assert [s.scale_offset - s.index_offset for s in layout.paged] == [4096, 4096, 4096, 8192]
    assert layout.block_bytes == 114048
    assert layout.bytes_per_token() == 890


def test_release_slot() -> None:
    layout = build(RELEASE)
    assert [w.offset for w in layout.windows] == [layer * 70752 for layer in range(43)]
    assert {(w.ring, w.record_bytes, w.num_bytes) for w in layout.windows} == {(134, 528, 70752)}
    assert layout.stored_slot_bytes == 1415040
    assert [(c.layer_id, c.offset, c.ring, c.num_bytes) for c in layout.compression] == [
        (2, 1415040 + 1627296, 7, 28672),
        (8, 1415040 + 1627296 + 28672, 7, 28672),
        (14, 1415040 + 1627296 + 57344, 7, 28672),
    ]
    assert layout.slot_bytes == 3128928


def test_tiny_configuration() -> None:
    layout = build(TINY)
    assert (layout.block_bytes, layout.slot_bytes) == (92160, 836352)
    assert layout.stored_slot_bytes == 4 * 70752
    assert layout.bytes_per_token() == 712


@pytest.mark.parametrize(("max_backtracking", "compression_ring"), [(1, 2), (2, 3), (6, 7), (9, 10)])
def test_rings_follow_backtracking(max_backtracking: int, compression_ring: int) -> None:
    layout = build(RELEASE, max_backtracking=max_backtracking)
    assert {w.ring for w in layout.windows} == {128 + max_backtracking}
    assert {c.ring for c in layout.compression} == {compression_ring}


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("spec", [RELEASE, TINY])
@pytest.mark.parametrize("max_backtracking", [1, 4, 6, 7])
def test_sections_are_aligned_and_do_not_overlap(
    spec: ModelSpec, release: bool, max_backtracking: int
) -> None:
    layout = build(spec, release, max_backtracking)
    block, slot = [], []
    for s in layout.paged:
        block.append((s.index_offset, s.index_offset + s.index_bytes))
        block.append((s.main_offset, s.main_offset + s.entries * s.main_bytes))
        assert s.scale_offset == s.index_offset + s.entries * s.code_bytes
        assert layout.block_bytes % s.main_bytes == layout.block_bytes % s.code_bytes == 0
    slot += [(w.offset, w.offset + w.num_bytes) for w in layout.windows]
    slot += [(c.offset, c.offset + c.num_bytes) for c in layout.compression]
    for parts, size in ((block, layout.block_bytes), (slot, layout.slot_bytes)):
        assert all(start % 32 == 0 for start, _ in parts)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(parts))
        assert parts[0][0] == 0 and parts[-1][1] <= size
    assert layout.block_bytes % 128 == 0 and layout.slot_bytes % layout.windows[0].record_bytes == 0


def test_float_records() -> None:
    layout = build(TINY, release=False)
    assert {w.record_bytes for w in layout.windows} == {2048}
    assert {(s.main_bytes, s.code_bytes, s.scale_bytes) for s in layout.paged} == {(2048, 512, 0)}


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"block_size 127.*layer 2.*ratio 2"):
        CacheLayout.build(RELEASE, release=True, block_size=127, max_backtracking=6)
    with pytest.raises(ValueError, match="max_backtracking is 0"):
        build(RELEASE, max_backtracking=0)
