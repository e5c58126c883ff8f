"""The two cache pools on one device, and the views of them that layers read and write.

A pool is one uint8 tensor; a view is a strided alias of it whose last dimension is contiguous, so a layer and
a kernel address records in place. In the release's formats views are uint8, in float32 layouts float32. Which
block or slot a sequence owns is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from deepinfer.runtime.cache_layout import CacheLayout, CompressionRing, PagedSection, WindowRing
from tilelang_ops.kv_cache import copy_rows

SCORE_BYTES, SCORE_BYTES_ON_A_GPU = 64 << 20, 512 << 20


def default_score_bytes(device_type: str) -> int:
    """Bytes of index scores that a forward holds at a time, unless the environment says otherwise."""
    return SCORE_BYTES if device_type == "cpu" else SCORE_BYTES_ON_A_GPU


@dataclass
class CacheCounters:
    """What the forward passes read from the pools and wrote to them since the last reset.

    Reads are counted as the widths that kernels walk (a window and a selection per query; per index
    query all visible entries, or those of its candidate blocks), from numbers that the host knows, so
    counting never waits for a device.
    """

    window_records_read: int = 0
    main_records_read: int = 0
    index_keys_read: int = 0
    bytes_read: int = 0
    window_records_written: int = 0
    entry_rows: int = 0  # rows that went through a compressor
    query_rows: int = 0  # rows that went through an attention

    def reset(self) -> None:
        """Set every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)


@dataclass(frozen=True)
class PagedView:
    """One owner's part of the paged pool.

    Attributes:
        section: where it lies.
        main: [num_blocks, entries, record] main KV.
        codes: [num_blocks, entries, fields] code fields of the index keys, or whole float32 keys.
        scales: [num_blocks, entries, fields] scale fields of the index keys; None in float32.
    """

    section: PagedSection
    main: Tensor
    codes: Tensor
    scales: Tensor | None


class Caches:
    """Paged pool and state pool of a model.

    Attributes:
        layout: offsets and sizes.
        blocks: uint8 [num_blocks, block_bytes]; block 0 belongs to nobody.
        slots: uint8 [num_state_slots, slot_bytes]; slot 0 belongs to nobody.
        counters: records read and written.
        score_bytes: most bytes of index scores that a forward holds at a time, or those of one row; rows are
            worked off in parts.
    """

    def __init__(
        self, layout: CacheLayout, num_blocks: int, num_state_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate zeroed pools; both counts include the reserved first one."""
        if num_blocks < 1 or num_state_slots < 1:
            raise ValueError(f"pools need their reserved first element: {num_blocks=} {num_state_slots=}")
        self.layout = layout
        self.blocks = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self.slots = torch.zeros(num_state_slots, layout.slot_bytes, dtype=torch.uint8, device=device)
        self.counters = CacheCounters()
        self.score_bytes = default_score_bytes(self.blocks.device.type)
        self._windows = {w.layer_id: self._window_view(w) for w in layout.windows}
        self._paged = {s.layer_id: self._paged_view(s) for s in layout.paged}
        self._compression = {c.layer_id: self._compression_view(c) for c in layout.compression}

    def window(self, layer_id: int) -> Tensor:
        """[num_state_slots, ring, record]: window KV of a layer, uint8 records or float32 vectors."""
        return self._windows[layer_id]

    def paged(self, layer_id: int) -> PagedView:
        """Compressed KV and index keys that a layer owns."""
        return self._paged[layer_id]

    def main(self, layer_id: int) -> Tensor:
        """[num_blocks, entries, record]: compressed KV that a layer owns."""
        return self._paged[layer_id].main

    def index_codes(self, layer_id: int) -> Tensor:
        """[num_blocks, entries, fields]: code fields of the index keys of a layer."""
        return self._paged[layer_id].codes

    def index_scales(self, layer_id: int) -> Tensor | None:
        """[num_blocks, entries, fields]: scale fields of the index keys of a layer; None in float32."""
        return self._paged[layer_id].scales

    def compression(self, layer_id: int) -> Tensor:
        """[num_state_slots, ring, 2, width] float32: gate scores and latents of a compressor."""
        return self._compression[layer_id]

    def copy_slots(self, copies: Tensor) -> None:
        """Copy whole slots, int32 [n, 2] of (source, target); sources are read before targets are written."""
        copy_rows(self.slots, copies)

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy whole blocks, as `copy_slots`."""
        copy_rows(self.blocks, copies)

    def _window_view(self, window: WindowRing) -> Tensor:
        return self._fields(self.slots, window.offset, window.ring, window.record_bytes)

    def _paged_view(self, section: PagedSection) -> PagedView:
        n = section.entries
        return PagedView(
            section,
            main=self._fields(self.blocks, section.main_offset, n, section.main_bytes),
            codes=self._fields(self.blocks, section.index_offset, n, section.code_bytes),
            scales=self._fields(self.blocks, section.scale_offset, n, section.scale_bytes)
            if section.scale_bytes
            else None,
        )

    def _compression_view(self, section: CompressionRing) -> Tensor:
        pool = self.slots.view(torch.float32)
        start = section.offset // 4
        size = (pool.shape[0], section.ring, 2, section.width)
        stride = (pool.shape[1], 2 * section.width, section.width, 1)
        return pool.as_strided(size, stride, start)

    def _fields(self, pool: Tensor, offset: int, count: int, num_bytes: int) -> Tensor:
        """[num_parts, count, num_bytes] alias of the fields that start at `offset` of each part of a pool."""
        if self.layout.release:
            return pool.as_strided((pool.shape[0], count, num_bytes), (pool.shape[1], num_bytes, 1), offset)
        floats = pool.view(torch.float32)
        width = num_bytes // 4
        return floats.as_strided((pool.shape[0], count, width), (floats.shape[1], width, 1), offset // 4)
