"""Which rows of a batch each decoder layer computes, so that prefill skips what no later token reads.

Let a sequence have n known tokens (`Batch.total_lens`), W the window and `last` the last layer. Tokens
after this step stand at positions >= n, and of this step only the output rows are wanted, the earliest of
which is n - 1 (prompts that want every row's output set `keep_all`). What they read of a decoder layer:

- compressed KV and index keys, which the first decoder layer makes from *every* row's input;
- window KV of the last layer at p >= n - 1 - (W - 1) = n - W, made from that layer's input at p;
- the layer's input at p is the output of the layer before at p, whose query reads W - 1 positions
  further back.

So, counting from the last layer down, the input of decoder layer l is needed for

    p >= n - W - (last - l) * (W - 1)

and its queries, attention and experts for the rows whose output layer l + 1 needs, in the last layer for
the output rows alone. Skipping is exact: kept rows find every value they would find without it. The
drafter's context, the last W positions before n, is made from inputs of the last layers and is complete.

Encoder layers compute every row, because a decoder layer's entries need them.

Bounded replay in compact mode cuts more, and is not exact: decoder windows begin at the position lo of
`Batch.window_starts`, so no row before it is read. Both rules apply together; a chunk that lies wholly before
lo has no decoder row left. (The release keeps its last row in place, because its shapes may not be empty; so
does this plan when the first rule is switched off.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.runtime.batch import Batch
from deepinfer.utils.upload import upload

_ALL = -1  # number of a part that has every row
_INPUTS = ("positions", "row_seq", "seqlens_k", "total_lens", "keep_all", "window_starts", "output_rows")


@dataclass(frozen=True)
class Part:
    """A part of the rows that a layer has.

    Attributes:
        places: [k] int64, ascending, among those rows.
        rows: [k] rows of the batch, on the host.
        bounds: [num_seqs + 1] int32 sums of the sequences' rows in the part.
    """

    places: Tensor
    rows: np.ndarray
    bounds: Tensor


@dataclass(frozen=True)
class NeededRows:
    """Where the rows of a batch narrow on their way up.

    Attributes:
        kv: of the rows of the batch, those whose window KV the first decoder layer makes; None for all.
        queries: for each layer, of the rows it makes window KV for, those whose queries it computes; None for
            all. The next layer's rows are these.
    """

    kv: Part | None
    queries: tuple[Part | None, ...]

    @property
    def kv_places(self) -> Tensor | None:
        """Places of `kv`."""
        return None if self.kv is None else self.kv.places

    @property
    def query_places(self) -> tuple[Tensor | None, ...]:
        """Places of `queries`."""
        return tuple(None if part is None else part.places for part in self.queries)

    @classmethod
    def build(
        cls,
        batch: Batch,
        num_layers: int,
        first_decoder_layer: int,
        window: int,
        *,
        is_cut: bool = False,
        skip: bool = True,
    ) -> NeededRows:
        """Plan a forward from what the host knows; a decode step needs nothing.

        Args:
            batch: the step's inputs.
            num_layers: backbone layers.
            first_decoder_layer: rows narrow from here on.
            window: tokens that a query sees.
            is_cut: leave out rows before `batch.window_starts`.
            skip: leave out rows that nobody reads.
        """
        if not batch.is_prefill:  # its rows are the newest of their sequences: all of them are read
            return cls.all_rows(batch, num_layers)
        device = batch.positions.device
        batch = batch.on_host(*_INPUTS)
        last = num_layers - 1
        deepest = deepest_layers(batch, last, window) if skip else torch.full_like(batch.positions, last)
        if is_cut:
            deepest = torch.where(_is_dropped(batch, keeps_placeholder=not skip), -1, deepest)
        needed = deepest.numpy()
        outputs = batch.output_rows.numpy()
        rows = np.flatnonzero(needed >= first_decoder_layer)
        plan = _Plan(batch, device)
        kv_places = plan.add(rows, rows, batch.num_rows)
        query_places: list[int] = [_ALL] * num_layers
        for layer_id in range(first_decoder_layer, last):
            kept = np.flatnonzero(needed[rows] > layer_id)
            query_places[layer_id] = plan.add(kept, rows[kept], rows.size)
            rows = rows[kept]
        kept = np.searchsorted(rows, outputs)
        assert np.array_equal(rows[kept], outputs), "an output row is not among the rows that are kept"
        query_places[last] = plan.add(kept, outputs, rows.size)
        parts = plan.parts()
        return cls(parts[kv_places], tuple(parts[number] for number in query_places))

    @classmethod
    def all_rows(cls, batch: Batch, num_layers: int) -> NeededRows:
        """Skip nothing but the last layer's queries that are no output."""
        before = (None,) * (num_layers - 1)
        if batch.output_rows.shape[0] == batch.num_rows:
            return cls(None, (*before, None))
        outputs = batch.on_host("output_rows", "row_seq")
        plan = _Plan(outputs, batch.positions.device)
        rows = outputs.output_rows.numpy()
        number = plan.add(rows, rows, batch.num_rows)
        return cls(None, (*before, plan.parts()[number]))


def deepest_layers(batch: Batch, last: int, window: int) -> Tensor:
    """[Q] the last layer that needs each row as input; can lie below the decoder, even below 0."""
    total_lens = batch.total_lens.index_select(0, batch.row_seq)
    keep_all = batch.keep_all.index_select(0, batch.row_seq)
    beyond = total_lens - batch.positions - window  # > 0: not read by the last layer's window
    layers_up = -torch.div(-beyond, max(window - 1, 1), rounding_mode="floor")  # rounded up
    return torch.where(keep_all != 0, last, last - layers_up.clamp_min(0))


def _is_dropped(batch: Batch, keeps_placeholder: bool) -> Tensor:
    """[Q] rows that bounded replay leaves out: the first clamp(lo - start, 0, rows - 1) of each sequence, or
    without a placeholder all of them that lie before lo."""
    seqs = batch.row_seq
    bounds = batch.window_starts
    if keeps_placeholder:
        bounds = torch.minimum(bounds, batch.seqlens_k - 1)
    return batch.positions < bounds.index_select(0, seqs)


class _Plan:
    """Parts, handed to the device together.

    Args:
        batch: on the host.
        device: where the lists go.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._row_seq = batch.row_seq.numpy()
        self._num_seqs = batch.num_seqs
        self._device = device
        self._places: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._bounds: list[np.ndarray] = []

    def add(self, places: np.ndarray, rows: np.ndarray, num_rows: int) -> int:
        """A part: `places` among `num_rows`, the `rows` of the batch; its number."""
        if places.size == num_rows:
            return _ALL
        self._places.append(places.astype(np.int64))
        self._rows.append(rows)
        counts = np.bincount(self._row_seq[rows], minlength=self._num_seqs)
        self._bounds.append(np.concatenate([[0], counts.cumsum()]).astype(np.int32))
        return len(self._places) - 1

    def parts(self) -> list[Part | None]:
        """The parts by number; the last is None, for `_ALL`."""
        lists = upload([*self._places, *self._bounds], self._device)
        count = len(self._places)
        return [*map(Part, lists[:count], self._rows, lists[count:]), None]
