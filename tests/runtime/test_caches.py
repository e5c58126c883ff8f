"""Views of the pools: they alias the bytes that the layout names, each byte once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.runtime.caches import CacheCounters, Caches
from tests.runtime.test_cache_layout import TINY, build


def views_of(caches: Caches) -> list[Tensor]:
    views = [caches.window(w.layer_id) for w in caches.layout.windows]
    views += [caches.compression(c.layer_id) for c in caches.layout.compression]
    for section in caches.layout.paged:
        view = caches.paged(section.layer_id)
        views += [part for part in (view.main, view.codes, view.scales) if part is not None]
    return views


@pytest.mark.parametrize("release", [True, False])
def test_views_cover_disjoint_bytes(release: bool) -> None:
    """Filling one view after the other with ones counts every byte of a section exactly once."""
    caches = Caches(build(TINY, release), 3, 2)
    layout = caches.layout
    expected = 3 * sum(s.index_bytes + s.entries * s.main_bytes for s in layout.paged)
    expected += 2 * sum(part.num_bytes for part in (*layout.windows, *layout.compression))
    total = 0
    for view in views_of(caches):
        view.view(torch.uint8)[...] = 1
        size = view.numel() * view.element_size()
        total += size
        written = int(caches.blocks.sum(dtype=torch.int64) + caches.slots.sum(dtype=torch.int64))
        assert written == total, f"{view.shape=} overlaps an earlier one"
    assert total == expected


def test_release_records_lie_where_the_layout_says() -> None:
    caches = Caches(build(TINY), 3, 2)
    section, window, ring = caches.layout.paged[1], caches.layout.windows[5], caches.layout.compression[1]
    view = caches.paged(section.layer_id)
    view.main[2, 7, 5] = 11
    view.codes[1, 9, 3] = 12
    view.scales[1, 9, 3] = 13
    caches.window(5)[1, 133, 527] = 14
    caches.compression(ring.layer_id)[1, 6, 1, 511] = 1.0
    assert caches.blocks[2, section.main_offset + 7 * 288 + 5] == 11
    assert caches.blocks[1, section.index_offset + 9 * 64 + 3] == 12
    assert caches.blocks[1, section.index_offset + 64 * 64 + 9 * 4 + 3] == 13
    assert caches.slots[1, window.offset + 133 * 528 + 527] == 14
    last = ring.offset + 7 * 4096
    assert caches.slots[1, last - 4 : last].view(torch.float32).item() == 1.0
    assert int((caches.blocks != 0).sum()) == 3


def test_shapes() -> None:
    caches = Caches(build(TINY), 3, 2)
    assert caches.window(0).shape == (2, 134, 528)
    assert caches.main(1).shape == (3, 64, 288)
    assert caches.index_codes(4).shape == (3, 128, 64)
    assert caches.index_scales(4).shape == (3, 128, 4)
    assert caches.compression(3).shape == (2, 7, 2, 512)
    plain = Caches(build(TINY, release=False), 3, 2)
    assert plain.window(0).shape == (2, 134, 512) and plain.window(0).dtype == torch.float32
    assert plain.main(1).shape == (3, 64, 512)
    assert plain.index_codes(1).shape == (3, 64, 128) and plain.index_scales(1) is None


def test_counters_reset() -> None:
    counters = CacheCounters(1, 2, 3, 4, 5, 6, 7)
    counters.reset()
    assert counters == CacheCounters()


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(0, 1), (1, 0)])
def test_pools_hold_their_reserved_part(num_blocks: int, num_slots: int) -> None:
    with pytest.raises(ValueError, match="reserved"):
        Caches(build(TINY), num_blocks, num_slots)
