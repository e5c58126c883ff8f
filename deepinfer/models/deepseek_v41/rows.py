"""RowSet: the rows that a layer works on, and the index lists that follow from them.

All layers of a step that work on the same rows share one RowSet, so positions become cosines, slots and
record numbers once a step and not once a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepinfer.layers.rotary import RotaryTable, RotaryTables, plain_frequencies, yarn_frequencies
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.needed_rows import Part
from deepinfer.runtime.batch import Batch
from tilelang_ops.common.formulas import num_visible, ring_slot
from tilelang_ops.kv_index import entry_slots, visible_entries, window_index


def rotary_tables(config: DeepseekV41Config, device: torch.device | str = "cpu") -> RotaryTables:
    """The tables of a model; they grow with the positions that are asked for."""
    width, yarn = config.qk_rope_head_dim, config.yarn
    slow = yarn_frequencies(
        width,
        config.compress_rope_theta,
        yarn.factor,
        yarn.beta_fast,
        yarn.beta_slow,
        yarn.original_max_position_embeddings,
    )
    fast = plain_frequencies(width, config.rope_theta)
    return RotaryTables(RotaryTable(fast.to(device)), RotaryTable(slow.to(device)))


@dataclass(frozen=True)
class Groups:
    """The groups of tokens that end among the rows of a set; each gives one compressed entry.

    Attributes:
        ends: [g] int64 place of the last token of each group.
        slots: [g] int64 record number of the entry in its owner's pools.
        cos, sin: float32 [g, rotary width / 2] at the position of the group's first token.
    """

    ends: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class RowSet:
    """Rows of a batch, in sequence order; those of a sequence are consecutive positions that end its chunk.

    Attributes:
        batch: the step's inputs.
        rotary: tables of both rotations.
        index: [n] int64 row of the batch.
        positions: [n] int32 position in the sequence.
        row_seq: [n] int32 sequence of the batch.
        window_starts: [num_seqs] int32 first position of each sequence that windows see and rings receive;
            None for all positions.
    """

    batch: Batch
    rotary: RotaryTables
    index: Tensor
    positions: Tensor
    row_seq: Tensor
    window_starts: Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def whole(cls, batch: Batch, rotary: RotaryTables) -> RowSet:
        """Every row of a batch."""
        index = torch.arange(batch.num_rows, device=batch.positions.device)
        return cls(batch, rotary, index, batch.positions, batch.row_seq)

    def narrowed(self, part: Part) -> RowSet:
        """A part of the rows; of each sequence a trailing part or none."""
        return self.take(part.places)

    def take(self, places: Tensor) -> RowSet:
        """The rows at `places` ([m] int64, ascending); of each sequence a trailing part or none."""
        return RowSet(
            self.batch,
            self.rotary,
            self.index.index_select(0, places),
            self.positions.index_select(0, places),
            self.row_seq.index_select(0, places),
            self.window_starts,
        )

    def bounded(self, window_starts: Tensor) -> RowSet:
        """The same rows with windows that begin at the given positions, [num_seqs] int32."""
        return RowSet(self.batch, self.rotary, self.index, self.positions, self.row_seq, window_starts)

    @property
    def num_rows(self) -> int:
        """n."""
        return self.index.shape[0]

    @cached_property
    def slots(self) -> Tensor:
        """[n] int64 state slot of each row."""
        return self.batch.state_slots.index_select(0, self.row_seq).long()

    @cached_property
    def preceding(self) -> Tensor:
        """[n] int64 rows of the same sequence before each row in this set."""
        places = torch.arange(self.num_rows, device=self.index.device)
        return places - self._starts.index_select(0, self.row_seq)

    @cached_property
    def following(self) -> Tensor:
        """[n] int64 rows of the same sequence behind each row in this set."""
        return (self._counts.index_select(0, self.row_seq) - 1) - self.preceding

    @cached_property
    def first_positions(self) -> Tensor:
        """[num_seqs] int64 first position of each sequence in this set; 0 where it has no row."""
        first = torch.where(self.preceding == 0, self.positions.long(), 0)
        return torch.zeros_like(self._counts).index_add_(0, self.row_seq.long(), first)

    def rotation(self, yarn: bool) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [n, rotary width / 2] each, at the rows' positions."""
        table = self.rotary.yarn if yarn else self.rotary.plain
        return self._once(("rotation", yarn), lambda: table.rows(self.positions, self.batch.max_seqlen_k))

    def num_visible(self, ratio: int) -> Tensor:
        """[n] int32 compressed entries that each row sees."""
        return self._once(("visible", ratio), lambda: num_visible(self.positions, ratio))

    def visible_entries(self, ratio: int, k: int) -> Tensor:
        """[n, k] int32: the entries that each row sees, for rows that see at most `k`; -1 behind the last."""
        return visible_entries(self.num_visible(ratio), k)

    def groups(self, ratio: int, entries_per_block: int) -> Groups:
        """Groups of `ratio` tokens that end in this set."""
        return self._once(("groups", ratio), lambda: self._find_groups(ratio, entries_per_block))

    def ring_index(self, ring: int) -> Tensor:
        """[n] int64 record of each row in a ring of its state slot; -1 when a later row takes its place, and
        when no window sees it."""

        def make() -> Tensor:
            is_written = self.following < ring
            if self._row_starts is not None:
                is_written &= self.positions >= self._row_starts
            return torch.where(is_written, ring_slot(self.slots, self.positions, ring), -1)

        return self._once(("ring", ring), make)

    def window_in_ring(self, window: int, ring: int) -> Tensor:
        """[n, window] int32 records of each row's window in the rings of the state slots."""
        return self._once(
            ("window in ring", window, ring),
            lambda: self._bound(window_index(self.positions, self.slots * ring, window, ring)),
        )

    def window_in_line(self, window: int, stored: RowSet) -> Tensor:
        """[n, window] int32 records of each row's window in the line of `stored` (see `line_index`)."""

        def make() -> Tensor:
            starts = stored.line_index(window)[1].index_select(0, self.row_seq)
            return self._bound(window_index(self.positions, starts, window))

        return self._once(("window in line", window), make) if self is stored else make()

    def line_index(self, window: int) -> tuple[Tensor, Tensor]:
        """Places in a line of records: of each sequence, `window - 1` records of history, then its rows.

        Returns:
            [n] int64 record of each row, and [num_seqs] int64 record at which position 0 of each sequence
            would stand.
        """

        def make() -> tuple[Tensor, Tensor]:
            history = window - 1
            seqs = torch.arange(1, self._counts.shape[0] + 1, device=self.index.device)
            first_record = seqs * history + self._starts
            rows = (self.row_seq + 1) * history + torch.arange(self.num_rows, device=self.index.device)
            return rows, first_record - self.first_positions

        return self._once(("line", window), make)

    def history_index(self, window: int, ring: int) -> tuple[Tensor, Tensor]:
        """What is copied to the line: ring records before each sequence's rows (-1: none), and where to."""

        def make() -> tuple[Tensor, Tensor]:
            history = window - 1
            slots = self.batch.state_slots.long()
            sources = window_index(self.first_positions - 1, slots * ring, history, ring).long()
            place = torch.arange(history, device=self.index.device)
            seqs = torch.arange(self._counts.shape[0], device=self.index.device)
            return sources.flatten(), ((seqs * history + self._starts)[:, None] + place).flatten()

        return self._once(("history", window, ring), make)

    def _bound(self, index: Tensor) -> Tensor:
        """-1 in place of the records [n, window] that lie before the first position that windows see."""
        if self._row_starts is None:
            return index
        place = torch.arange(1 - index.shape[1], 1, dtype=torch.int32, device=index.device)
        return torch.where(self.positions[:, None] + place < self._row_starts[:, None], -1, index)

    @cached_property
    def _row_starts(self) -> Tensor | None:
        """[n] int32 first position that each row's window may hold; None without a bound."""
        starts = self.window_starts
        return None if starts is None else starts.index_select(0, self.row_seq)

    @cached_property
    def _counts(self) -> Tensor:
        """[num_seqs] int64 rows of each sequence in this set."""
        return torch.bincount(self.row_seq, minlength=self.batch.num_seqs)

    @cached_property
    def _starts(self) -> Tensor:
        """[num_seqs] int64 place of the first row of each sequence."""
        return self._counts.cumsum(0) - self._counts

    def _find_groups(self, ratio: int, entries_per_block: int) -> Groups:
        ends = ((self.positions + 1) % ratio == 0).nonzero().squeeze(1)
        positions = self.positions.index_select(0, ends)
        slots = entry_slots(
            (positions // ratio)[:, None],
            self.row_seq.index_select(0, ends),
            self.batch.block_tables,
            entries_per_block,
        )
        cos, sin = self.rotary.yarn.rows(positions - (ratio - 1), self.batch.max_seqlen_k)
        return Groups(ends, slots.squeeze(1).long(), cos, sin)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
