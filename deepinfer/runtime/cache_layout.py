"""Bytes of the two cache pools: a pure function of a model's spec. No tensors here.

A paged block holds, for every layer that owns compressed KV, an index section and a main section; a state
slot holds the window rings and the compressors' rings of one sequence:

    block   [ index keys | main KV ] of each owner, in layer order, each section padded to 32 bytes
            index section   n code fields, then n scale fields (n = block_size / ratio entries)
            main section    n records
    slot    [ window rings of the layers below the first decoder layer   <- what a prefix cache stores
            | window rings of the later layers and the drafter
            | compression rings ]

Records in the release's formats (width 512, index width 128) and as float32, for debugging:

    window   512 E4M3, 16 E8M0                  528 bytes    or 2048
    main     256 pairs of E2M1, 32 E4M3         288 bytes    or 2048
    index    64 pairs of E2M1 | 4 E8M0          64 + 4 bytes or 512 + 0
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from deepinfer.models.base import ModelSpec

SECTION_ALIGN = 32  # bytes; every section starts at a multiple
BLOCK_ALIGN = 128  # bytes; what index kernels want of a block's stride
FLOAT_BYTES = 4
MX_GROUP = 32  # channels per E8M0 scale
FP4_GROUP = 16  # channels per E4M3 scale


@dataclass(frozen=True)
class WindowRing:
    """The ring of one layer's window KV in a state slot; position p lies at `p % ring`."""

    layer_id: int
    offset: int  # bytes from the start of the slot
    ring: int  # records
    record_bytes: int
    width: int  # channels

    @property
    def num_bytes(self) -> int:
        """Bytes of the section, padding excluded."""
        return self.ring * self.record_bytes


@dataclass(frozen=True)
class PagedSection:
    """Index keys and main KV of one owner in a paged block; entry j lies in block j // entries."""

    layer_id: int
    ratio: int
    entries: int  # entries per block
    index_offset: int  # bytes from the start of the block: code fields
    scale_offset: int  # scale fields, directly behind the code fields
    main_offset: int
    code_bytes: int  # of one index key
    scale_bytes: int  # of one index key; 0 in float32
    main_bytes: int  # of one main record
    width: int
    index_width: int

    @property
    def index_bytes(self) -> int:
        """Bytes of the index section, padding excluded."""
        return self.entries * (self.code_bytes + self.scale_bytes)


@dataclass(frozen=True)
class CompressionRing:
    """Float32 gate scores and latents of a compressor's last tokens; position p lies at `p % ring`."""

    layer_id: int
    offset: int  # bytes from the start of the slot
    ring: int  # positions, each [2, width] float32: gate score, latent
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the section."""
        return self.ring * 2 * self.width * FLOAT_BYTES


@dataclass(frozen=True)
class CacheLayout:
    """Every offset and size of the two pools, in bytes.

    Attributes:
        release: records in the release's formats; False for float32 records.
        block_size: tokens per paged block.
        block_bytes: stride of the paged pool.
        slot_bytes: stride of the state pool.
        stored_slot_bytes: the leading part of a slot, the encoder's window rings: all that a store keeps
            where bounded replay computes the decoder's anew.
        windows, paged, compression: sections in the order they lie in.
    """

    release: bool
    block_size: int
    block_bytes: int
    slot_bytes: int
    stored_slot_bytes: int
    windows: tuple[WindowRing, ...]
    paged: tuple[PagedSection, ...]
    compression: tuple[CompressionRing, ...]

    @classmethod
    def build(cls, spec: ModelSpec, *, release: bool, block_size: int, max_backtracking: int) -> CacheLayout:
        """Lay out the pools of a model.

        Args:
            spec: the model's caches.
            release: the release's record formats, else float32.
            block_size: tokens per paged block, a multiple of every ratio.
            max_backtracking: positions that a decode step may take back; rings are that much longer.

        Raises:
            ValueError: the block size does not hold whole entries, or no step could ever be taken back.
        """
        if max_backtracking < 1:
            raise ValueError(f"max_backtracking is {max_backtracking}; it must be at least 1")
        paged, block_bytes = _lay_out_block(spec, release, block_size)
        windows, compression, stored, slot_bytes = _lay_out_slot(spec, release, max_backtracking)
        return cls(release, block_size, block_bytes, slot_bytes, stored, windows, paged, compression)

    def bytes_per_token(self) -> float:
        """Bytes that one more token takes in the paged pool, padding excluded."""
        return sum((s.main_bytes + s.code_bytes + s.scale_bytes) / s.ratio for s in self.paged)


def _lay_out_block(spec: ModelSpec, release: bool, block_size: int) -> tuple[tuple[PagedSection, ...], int]:
    """Sections of a block and its stride, a multiple of every record so that records have flat ids."""
    sections = []
    offset = 0
    for owner in spec.paged:
        if block_size % owner.ratio:
            raise ValueError(
                f"block_size {block_size} is not a multiple of layer {owner.layer_id}'s ratio {owner.ratio}"
            )
        entries = block_size // owner.ratio
        if release:
            code_bytes, scale_bytes = owner.index_width // 2, owner.index_width // MX_GROUP
            main_bytes = owner.width // 2 + owner.width // FP4_GROUP
        else:
            code_bytes, scale_bytes, main_bytes = (
                owner.index_width * FLOAT_BYTES,
                0,
                owner.width * FLOAT_BYTES,
            )
        main_offset = _round_up(offset + entries * (code_bytes + scale_bytes), SECTION_ALIGN)
        sections.append(
            PagedSection(
                layer_id=owner.layer_id,
                ratio=owner.ratio,
                entries=entries,
                index_offset=offset,
                scale_offset=offset + entries * code_bytes,
                main_offset=main_offset,
                code_bytes=code_bytes,
                scale_bytes=scale_bytes,
                main_bytes=main_bytes,
                width=owner.width,
                index_width=owner.index_width,
            )
        )
        offset = _round_up(main_offset + entries * main_bytes, SECTION_ALIGN)
    records = [size for s in sections for size in (s.main_bytes, s.code_bytes, s.scale_bytes) if size]
    return tuple(sections), _round_up(offset, lcm(BLOCK_ALIGN, *records))


def _lay_out_slot(
    spec: ModelSpec, release: bool, max_backtracking: int
) -> tuple[tuple[WindowRing, ...], tuple[CompressionRing, ...], int, int]:
    """Window rings, compression rings, bytes of the stored part, stride of a slot."""
    windows = []
    offset = stored = 0
    for window in sorted(spec.windows, key=lambda w: w.layer_id):
        record_bytes = window.width + window.width // MX_GROUP if release else window.width * FLOAT_BYTES
        ring = WindowRing(
            window.layer_id, offset, window.window + max_backtracking, record_bytes, window.width
        )
        windows.append(ring)
        offset = _round_up(offset + ring.num_bytes, SECTION_ALIGN)
        if window.layer_id < spec.first_decoder_layer:
            stored = offset
    compression = []
    for state in spec.compression:
        ring_size = state.ratio + max(0, max_backtracking - 1)
        section = CompressionRing(state.layer_id, offset, ring_size, state.width)
        compression.append(section)
        offset = _round_up(offset + section.num_bytes, SECTION_ALIGN)
    stride = lcm(SECTION_ALIGN, *(w.record_bytes for w in windows))
    return tuple(windows), tuple(compression), stored, _round_up(offset, stride)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
