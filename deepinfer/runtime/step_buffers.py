"""StepBuffers: inputs at fixed addresses and of fixed shapes, which captured graphs read.

A step's arrays are copied to the front of their buffers and the rest is filled with what belongs to nobody,
all in one launch:

    rows        | of the step's sequences | of the last buffered sequence, which is always nobody's |
    sequences   | of the step             | without rows, slot 0, block 0                           |
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from deepinfer.runtime.batch import Batch
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.utils.host_memory import LayoutEntry
from deepinfer.utils.upload import upload_one
from tilelang_ops.step_inputs import pad_inputs

MAX_TABLES = 256  # on the device, of some hundred bytes
_ONE = int(np.float32(1).view(np.int32))

# Name -> words of an element, what the rest is filled with.
_BATCH_ROWS = {"input_ids": 0, "positions": 0, "row_seq": 0, "ngram_ids": 0}
_BATCH_SEQS = {
    "seqlens_k": 0,
    "state_slots": 0,
    "total_lens": 0,
    "keep_all": 0,
    "window_starts": 0,
}
_SAMPLING_ROWS = {
    "seeds": (torch.int64, 0),
    "token_index": (torch.int64, 0),
    "inv_temperature": (torch.float32, 0),
    "top_p": (torch.float32, _ONE),
    "top_k": (torch.int32, -1),
    "min_p": (torch.float32, 0),
    "draft_ids": (torch.int32, -1),
}


_SAMPLING_FILLS = {name: fill for name, (_, fill) in _SAMPLING_ROWS.items()}


class StepBuffers:
    """Buffers for the batch and the sampling parameters of decode steps.

    Args:
        max_rows, max_seqs: of a step.
        max_ngram: columns of the n-gram windows.
        max_blocks: columns of the block tables.
        device: where they lie.
    """

    def __init__(
        self, max_rows: int, max_seqs: int, max_ngram: int, max_blocks: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.num_seqs = max_seqs + 1  # one more, nobody's
        self._device = device
        self._output_rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        rows = {name: (max_rows, max_ngram if name == "ngram_ids" else 1) for name in _BATCH_ROWS}
        seqs = dict.fromkeys(_BATCH_SEQS, (self.num_seqs, 1))
        self._batch = _Region(
            {
                **rows,
                **seqs,
                "cu_seqlens_q": (self.num_seqs + 1, 1),
                "block_tables": (self.num_seqs, max_blocks),
            },
            device,
        )
        self._sampling = _Region(
            {
                **{name: (max_rows, kind.itemsize // 4) for name, (kind, _) in _SAMPLING_ROWS.items()},
                "row_offsets": (self.num_seqs + 1, 1),
            },
            device,
        )

    def batch(self, num_rows: int, num_seqs: int, bound: int, num_blocks: int) -> Batch:
        """The buffers as the batch of a graph.

        Args:
            num_rows, num_seqs: of the graph; the last sequence is nobody's.
            bound: tokens that a sequence may have.
            num_blocks: columns of its block tables.
        """
        shown = {name: self._batch.view(name, num_rows) for name in _BATCH_ROWS if name != "ngram_ids"}
        shown |= {name: self._batch.view(name, num_seqs) for name in _BATCH_SEQS}
        return Batch(
            **shown,
            ngram_ids=self._batch.table("ngram_ids", num_rows),
            cu_seqlens_q=self._batch.view("cu_seqlens_q", num_seqs + 1),
            block_tables=self._batch.table("block_tables", num_seqs, num_blocks),
            output_rows=self._output_rows[:num_rows],
            max_seqlen_k=bound,
            is_prefill=False,
        )

    def sampling(self, name: str, count: int) -> Tensor:
        """The first elements of an array of the sampling parameters."""
        kind = _SAMPLING_ROWS[name][0] if name in _SAMPLING_ROWS else torch.int32
        return self._sampling.view(name, count).view(kind)

    def put_batch(self, batch: Batch, num_seqs: int, num_blocks: int) -> None:
        """Fill the buffers of a batch.

        Args:
            batch: of a decode step.
            num_seqs, num_blocks: of the graph that will read it.
        """
        fills = {**_BATCH_ROWS, **_BATCH_SEQS, "row_seq": num_seqs - 1, "cu_seqlens_q": batch.num_rows}
        self._batch.put(batch, fills, {"block_tables": (num_seqs, num_blocks)})

    def put_sampling(self, inputs: SamplingInputs) -> None:
        """Fill the buffers of sampling parameters."""
        self._sampling.put(inputs, {**_SAMPLING_FILLS, "row_offsets": inputs.num_rows}, {})


class _Region:
    """Arrays of int32 words behind one another.

    Args:
        shapes: by name, rows and words of a row.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        self._shapes = shapes
        self._starts: dict[str, int] = {}
        end = 0
        for name, (rows, width) in shapes.items():
            self._starts[name] = end
            end += (rows * width + 63) // 64 * 64  # as aligned as kernels could want
        self._words = torch.zeros(end, dtype=torch.int32, device=device)
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def view(self, name: str, count: int) -> Tensor:
        """int32 [count * words of a row], the front of an array."""
        start = self._starts[name]
        return self._words[start : start + count * self._shapes[name][1]]

    def table(self, name: str, rows: int, width: int | None = None) -> Tensor:
        """int32 [rows, width], the front of an array seen as a table; its full width when None."""
        width = self._shapes[name][1] if width is None else width
        start = self._starts[name]
        return self._words[start : start + rows * width].view(rows, width)

    def put(
        self,
        record: Batch | SamplingInputs,
        fills: Mapping[str, int],
        shapes: Mapping[str, tuple[int, int]],
    ) -> None:
        """Copy a record's arrays and fill up what is behind them.

        Args:
            record: whose arrays, those of the region.
            fills: by name, the words to fill up with; 0 where there is none.
            shapes: by name, rows and width of the table that is to be filled; the whole buffer where missing.
        """
        if record.packed is None:
            for words, places in pack(record, tuple(self._shapes)):
                if rows := self._table(places, fills, shapes):
                    table = upload_one(np.array(rows, dtype=np.int32), self._words.device)
                    pad_inputs(words, table, self._words)
            return
        key = record.packed.layout, tuple(fills.values()), tuple(shapes.values())
        table = self._tables.get(key)
        if table is None:  # steps of one shape have the same
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            places = places_of(record.packed.layout)
            assert self._shapes.keys() <= places.keys(), f"{self._shapes.keys() - places.keys()}"
            rows = self._table(places, fills, shapes)
            table = upload_one(np.array(rows, dtype=np.int32), self._words.device)
            self._tables[key] = table
        pad_inputs(record.packed.words, table, self._words)

    def _table(
        self,
        places: Mapping[str, tuple[int, int, int]],
        fills: Mapping[str, int],
        shapes: Mapping[str, tuple[int, int]],
    ) -> list[tuple[int, ...]]:
        """The table of `pad_inputs` for arrays in one piece of memory."""
        table = []
        for name in self._shapes.keys() & places.keys():
            start, rows, width = places[name]
            full_rows, full_width = shapes.get(name, self._shapes[name])
            assert rows <= full_rows and width <= full_width, (
                f"{name=} {rows=} {width=} {full_rows=} {full_width=}"
            )
            if full_rows * full_width > 0:
                place = self._starts[name], full_rows, full_width
                table.append((start, rows, width, *place, fills.get(name, 0)))
        return table


def places_of(layout: tuple[LayoutEntry, ...]) -> dict[str, tuple[int, int, int]]:
    """By name an array's first word, rows and words of a row."""
    return {
        name: (offset // 4, shape[0], np.dtype(dtype).itemsize // 4 * math.prod(shape[1:]))
        for name, dtype, shape, offset in layout
    }


def pack(
    record: Batch | SamplingInputs, names: tuple[str, ...]
) -> list[tuple[Tensor, dict[str, tuple[int, int, int]]]]:
    """A record's arrays by the memory that they lie in.

    Returns:
        words int32 [n] of each piece of memory, and by name an array's first word, rows and words of a row.
    """
    found: dict[int, tuple[Tensor, dict[str, tuple[int, int, int]]]] = {}
    key = 0
    for name in names:
        array = getattr(record, name)
        storage = array.untyped_storage()
        if array.numel() > 0 or not found:  # what is empty is anywhere
            key = storage._cdata
        if key not in found:
            words = torch.empty(0, dtype=torch.int32, device=array.device)
            found[key] = words.set_(storage, 0, (storage.nbytes() // 4,)), {}
        assert array.is_contiguous(), f"{name}: {array.stride()=}"
        rows, words_per_element = array.shape[0], array.itemsize // 4
        width = words_per_element * (array.numel() // rows) if rows else 1
        found[key][1][name] = array.storage_offset() * words_per_element, rows, width
    return list(found.values())
