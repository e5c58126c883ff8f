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


@dataclass(frozen=True)
class NeededRows:
    """Where the rows of a batch narrow on their way up.

    Attributes:
        kv_places: [k] int64, rows of the batch whose window KV the first decoder layer makes; None for all.
        query_places: for each layer, [k] int64 places among the rows it makes window KV for, ascending, whose
            queries it computes; None for all. The next layer's rows are these.
    """

    kv_places: Tensor | None
    query_places: tuple[Tensor | None, ...]

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
        """Plan a forward; a prefill copies one number per row to the host, a decode step nothing.

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
        last = num_layers - 1
        query_places: list[Tensor | None] = [None] * num_layers
        device = batch.positions.device
        deepest = deepest_layers(batch, last, window) if skip else torch.full_like(batch.positions, last)
        if is_cut:
            deepest = torch.where(_is_dropped(batch, keeps_placeholder=not skip), -1, deepest)
        needed = deepest.cpu().numpy()
        outputs = batch.output_rows.cpu().numpy()
        rows = np.flatnonzero(needed >= first_decoder_layer)
        kv_places = _places(rows, batch.num_rows, device)
        for layer_id in range(first_decoder_layer, last):
            kept = np.flatnonzero(needed[rows] > layer_id)
            query_places[layer_id] = _places(kept, rows.size, device)
            rows = rows[kept]
        kept = np.searchsorted(rows, outputs)
        assert np.array_equal(rows[kept], outputs), "an output row is not among the rows that are kept"
        query_places[last] = _places(kept, rows.size, device)
        return cls(kv_places, tuple(query_places))

    @classmethod
    def all_rows(cls, batch: Batch, num_layers: int) -> NeededRows:
        """Skip nothing but the last layer's queries that are no output."""
        is_all = batch.output_rows.shape[0] == batch.num_rows
        return cls(None, (None,) * (num_layers - 1) + (None if is_all else batch.output_rows.long(),))


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


def _places(places: np.ndarray, num_rows: int, device: torch.device) -> Tensor | None:
    return None if places.size == num_rows else torch.from_numpy(places.astype(np.int64)).to(device)
