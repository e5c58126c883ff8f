"""Random records: both cache pools as if requests had filled them, for measurements without a prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.runtime.cache_layout import FP4_GROUP, MX_GROUP
from deepinfer.runtime.caches import Caches

CHUNK_PARTS = 4096  # blocks or slots drawn at a time


def fill_with_random_records(caches: Caches, seed: int) -> None:
    """Write valid records of values of order one everywhere, in the pools' own formats.

    Selections over such index keys spread over the whole context, as the kernels' time wants it.
    """
    generator = torch.Generator(caches.blocks.device)
    generator.manual_seed(seed)
    for pool in (caches.blocks, caches.slots):
        for start in range(0, pool.shape[0], CHUNK_PARTS):
            pool[start : start + CHUNK_PARTS].random_(0, 256, generator=generator)
    for section in caches.layout.paged:
        view = caches.paged(section.layer_id)
        if not caches.layout.release:
            view.main.normal_(generator=generator)
            view.codes.normal_(generator=generator)
            continue
        assert view.scales is not None
        _draw(view.scales, 124, 126, generator)  # E8M0, 2^-3 and 2^-2, beside codes up to 6
        _draw(view.main[..., -(section.width // FP4_GROUP) :], 0x20, 0x30, generator)  # E4M3, 1/8 to 1/2
    for ring in caches.layout.windows:
        records = caches.window(ring.layer_id)
        if not caches.layout.release:
            records.normal_(generator=generator)
            continue
        codes = records[..., : -(ring.width // MX_GROUP)]
        for start in range(0, codes.shape[0], CHUNK_PARTS):
            codes[start : start + CHUNK_PARTS].bitwise_and_(0xBF)  # E4M3 of at most 1.875, no NaN
        _draw(records[..., -(ring.width // MX_GROUP) :], 127, 128, generator)  # E8M0, 1
    for section in caches.layout.compression:
        caches.compression(section.layer_id).normal_(generator=generator)


def _draw(view: Tensor, low: int, high: int, generator: torch.Generator) -> None:
    """Bytes low ... high - 1 into a strided view."""
    for start in range(0, view.shape[0], CHUNK_PARTS):
        part = view[start : start + CHUNK_PARTS]
        drawn = torch.empty(part.shape, dtype=torch.uint8, device=view.device)
        part.copy_(drawn.random_(low, high, generator=generator))
