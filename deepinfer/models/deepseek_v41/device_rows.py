"""DeviceRows: what `RowSet` is, for a device that nobody waits for.

All lists of a set come out of one operator at their first use. No shape depends on data: lists of groups
have a place for every row, -1 where none ends, and rows behind the last sequence of a decode step, which a
captured graph may have, see nothing and write to the pools' reserved first elements at most.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from deepinfer.layers.rotary import RotaryTables
from deepinfer.layers.rows import take_rows
from deepinfer.models.deepseek_v41.needed_rows import Part
from deepinfer.models.deepseek_v41.rows import Groups
from deepinfer.runtime.batch import Batch
from tilelang_ops.kv_index import decode_metadata, prefill_metadata, visible_entries
from tilelang_ops.kv_index.decode_metadata.op import DecodeMetadata
from tilelang_ops.kv_index.prefill_metadata.op import PrefillMetadata


@dataclass(frozen=True)
class ListSizes:
    """Compile-time sizes of the lists.

    Attributes:
        window: tokens that a query sees, itself included.
        ring: records of a window ring.
        block_size: tokens of a paged block.
        ratios: tokens of a compressed entry, of each kind of layer, ascending.
    """

    window: int
    ring: int
    block_size: int
    ratios: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Rows of a batch, in sequence order; the attributes that layers read are those of `RowSet`.

    Attributes:
        batch: the step's inputs.
        rotary: tables of both rotations.
        sizes: of the lists.
        cu_rows: [num_seqs + 1] int32 sums of the sequences' rows.
        index, host_index: [n] row of the batch, on the device (int64) and on the host; None for all rows.
        own_positions, own_seqs: [n] int32 of a part of a prefill's rows; None where those of the batch count.
        window_starts: [num_seqs] int32 first position of each sequence that windows see; None for all.
        parent, places: the set that these rows were taken from, and where they stood in it.
    """

    batch: Batch
    rotary: RotaryTables
    sizes: ListSizes
    cu_rows: Tensor
    index: Tensor | None = None
    host_index: np.ndarray | None = None
    own_positions: Tensor | None = None
    own_seqs: Tensor | None = None
    window_starts: Tensor | None = None
    parent: DeviceRows | None = None
    places: Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def whole(cls, batch: Batch, rotary: RotaryTables, sizes: ListSizes) -> DeviceRows:
        """Every row of a batch."""
        return cls(batch, rotary, sizes, batch.cu_seqlens_q)

    def narrowed(self, part: Part) -> DeviceRows:
        """A part of a prefill's rows; of each sequence a trailing part or none."""
        assert self.batch.is_prefill, "rows of a decode step do not narrow"
        return DeviceRows(
            self.batch,
            self.rotary,
            self.sizes,
            part.bounds,
            index=part.places if self.index is None else take_rows(self.index, part.places),
            host_index=part.rows,
            own_positions=take_rows(self.positions, part.places),
            own_seqs=take_rows(self.row_seq, part.places),
            window_starts=self.window_starts,
            parent=self,
            places=part.places,
        )

    def bounded(self, window_starts: Tensor) -> DeviceRows:
        """The same rows with windows that begin at the given positions, [num_seqs] int32.

        In a decode step there is nothing to bound: more than a window of every prompt is kept, and what a
        step may take back (`EngineArgs.resolve_replay`).
        """
        if not self.batch.is_prefill:
            return self
        return dataclasses.replace(self, window_starts=window_starts, parent=None, places=None, _made={})

    @property
    def num_rows(self) -> int:
        """n."""
        return self.batch.num_rows if self.index is None else self.index.shape[0]

    @property
    def positions(self) -> Tensor:
        """[n] int32 position in the sequence; 0 of padding."""
        if self.own_positions is not None:
            return self.own_positions
        return self.batch.positions if self.batch.is_prefill else self._decode.positions

    @property
    def row_seq(self) -> Tensor:
        """[n] int32 sequence of the batch; 0 of padding."""
        if self.own_seqs is not None:
            return self.own_seqs
        return self.batch.row_seq if self.batch.is_prefill else self._decode.row_seq

    @property
    def slots(self) -> Tensor:
        """[n] int64 state slot of each row."""
        return self._lists.slots

    @property
    def preceding(self) -> Tensor:
        """[n] int64 rows of the same sequence before each row in this set."""
        return self._lists.preceding

    @property
    def following(self) -> Tensor:
        """[n] int64 rows of the same sequence behind each row in this set."""
        return self._lists.following

    def rotation(self, yarn: bool) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [n, rotary width / 2] each, at the rows' positions."""
        key = ("rotation", yarn)
        if key not in self._made:
            table = self.rotary.yarn if yarn else self.rotary.plain
            self._made[key] = table.rows(self.positions, self.batch.max_seqlen_k)
        return self._made[key]

    def num_visible(self, ratio: int) -> Tensor:
        """[n] int32 compressed entries that each row sees."""
        return self._lists.num_visible[self._number(ratio)]

    def visible_entries(self, ratio: int, k: int) -> Tensor:
        """[n, k] int32: the entries that each row sees, for rows that see at most `k`; -1 behind the last."""
        return visible_entries(self.num_visible(ratio), k)

    def groups(self, ratio: int, entries_per_block: int) -> Groups:
        """A place for every row, -1 where no group of `ratio` tokens ends."""
        assert entries_per_block * ratio == self.sizes.block_size, f"{entries_per_block=} {ratio=}"
        key = ("groups", ratio)
        if key not in self._made:
            number, table = self._number(ratio), self.rotary.yarn
            bound = self.batch.max_seqlen_k
            rotation = (
                self.rotation(yarn=True) if ratio == 1 else table.group_rows(self.positions, ratio, bound)
            )
            lists = self._lists
            self._made[key] = Groups(lists.group_ends[number], lists.group_slots[number], *rotation)
        return self._made[key]

    def ring_index(self, ring: int) -> Tensor:
        """[n] int64 record of each row in a ring of its state slot, or -1 as in `RowSet`."""
        assert ring == self.sizes.ring, f"{ring=} {self.sizes=}"
        return self._lists.ring_index

    def window_in_ring(self, window: int, ring: int) -> Tensor:
        """[n, window] int32 records of each row's window in the rings of the state slots."""
        assert (window, ring) == (self.sizes.window, self.sizes.ring), f"{window=} {ring=} {self.sizes=}"
        return self._decode.window_index

    def window_in_line(self, window: int, stored: DeviceRows) -> Tensor:
        """[n, window] int32 records of each row's window in the line of `stored` (see `line_index`)."""
        assert window == self.sizes.window, f"{window=} {self.sizes=}"
        if stored is self:
            return self._prefill.window_index
        assert stored is self.parent and self.places is not None, "a line of rows that these do not come from"
        return take_rows(stored._prefill.window_index, self.places)

    def line_index(self, window: int) -> tuple[Tensor, None]:
        """[n] int64 places in a line of records: of each sequence `window - 1` of history, then its rows."""
        assert window == self.sizes.window, f"{window=} {self.sizes=}"
        return self._prefill.line_index, None

    def history_index(self, window: int, ring: int) -> tuple[Tensor, Tensor]:
        """What is copied to the line: ring records before each sequence's rows (-1: none), and where to."""
        assert (window, ring) == (self.sizes.window, self.sizes.ring), f"{window=} {ring=} {self.sizes=}"
        return self._prefill.history_sources, self._prefill.history_targets

    def _number(self, ratio: int) -> int:
        return self.sizes.ratios.index(ratio)

    @property
    def _lists(self) -> DecodeMetadata | PrefillMetadata:
        return self._prefill if self.batch.is_prefill else self._decode

    @cached_property
    def _decode(self) -> DecodeMetadata:
        batch = self.batch
        assert not batch.is_prefill, "a prefill reads its windows from a line"
        lists = (batch.cu_seqlens_q, batch.seqlens_k, batch.state_slots, batch.block_tables)
        return decode_metadata(*lists, batch.num_rows, **vars(self.sizes))

    @cached_property
    def _prefill(self) -> PrefillMetadata:
        batch = self.batch
        assert batch.is_prefill, "a decode step reads its windows from the rings"
        return prefill_metadata(
            self.positions,
            self.row_seq,
            self.cu_rows,
            batch.state_slots,
            batch.block_tables,
            window_starts=self.window_starts,
            **vars(self.sizes),
        )
