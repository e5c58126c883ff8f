"""The backbone of DeepSeek-V4.1: embedding, layers, last norm and head, over the caches of a step.

The forward is the same code for prefill and decode. It reads and writes the caches in place; a row's bits
depend on its sequence alone, never on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.config import Arithmetic, ReplayMode
from deepinfer.layers.embedding import Embedding
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.linear import Projection
from deepinfer.layers.norm import RMSNorm
from deepinfer.layers.rotary import RotaryTables
from deepinfer.layers.rows import take_rows
from deepinfer.models.base import ForwardOutput, LayerGate, ModelSpec
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.device_rows import DeviceRows, ListSizes
from deepinfer.models.deepseek_v41.engram import EngramHasher
from deepinfer.models.deepseek_v41.hyper_connection import Streams
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.needed_rows import NeededRows
from deepinfer.models.deepseek_v41.rows import RowSet, rotary_tables
from deepinfer.models.deepseek_v41.spec import model_spec
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.caches import Caches
from deepinfer.utils.aside import Aside, aside
from deepinfer.utils.upload import upload_one
from tilelang_ops.hyper_connection import mean_streams


@dataclass
class RowCounters:
    """Rows computed in each layer since the last `reset`, to see what a forward skips.

    Attributes:
        kv_rows: [layers] rows whose window KV was made.
        query_rows: [layers] rows that went through attention and experts.
    """

    kv_rows: list[int]
    query_rows: list[int]

    def reset(self) -> None:
        """Start again from zero."""
        self.kv_rows[:] = [0] * len(self.kv_rows)
        self.query_rows[:] = [0] * len(self.query_rows)


class FeatureTap:
    """Collects the drafter's features on the way up: mean streams at the attention's entry of some layers.

    Rows that narrow before the last of these layers narrow in what was collected, too.

    Args:
        targets: layers to take features from, ascending; empty to collect nothing.
    """

    def __init__(self, targets: tuple[int, ...]):
        self._targets = targets
        self._count = 0
        self._features: Tensor | None = None
        self._rows: RowSet | DeviceRows | None = None

    def add(self, layer_id: int, streams: Streams, rows: RowSet | DeviceRows) -> None:
        """Streams at the attention's entry of a layer; ignored when it is not one of the targets."""
        if layer_id not in self._targets:
            return
        assert streams.output is None, "an output is pending"
        if self._features is None:
            num_rows, _, width = streams.values.shape
            self._features = streams.values.new_empty(num_rows, len(self._targets) * width)
        mean_streams(streams.values, self._features, self._count)
        self._count += 1
        self._rows = rows

    def take(self, places: Tensor) -> None:
        """The forward goes on with the rows at `places`."""
        if self._features is not None and self._count < len(self._targets):
            self._features = take_rows(self._features, places)

    def result(self, hidden_states: Tensor, rows: RowSet | DeviceRows) -> tuple[Tensor, Any]:
        """[F, targets * hidden] features, and [F] int64 their rows in the batch, or them as `DeviceRows`."""
        if self._rows is None or self._features is None or self._count < len(self._targets):
            # The forward ended early: no row reached the last target.
            width = len(self._targets) * hidden_states.shape[1]
            assert rows.index is not None and rows.num_rows == 0, f"{rows.num_rows=}"
            index = rows if isinstance(rows, DeviceRows) else rows.index
            return hidden_states.new_empty(0, width), index
        return self._features, self._rows if isinstance(self._rows, DeviceRows) else self._rows.index


@dataclass(frozen=True)
class DeepseekV41Model:
    """The backbone with its weights, on one device.

    Attributes:
        counters: rows computed in each layer.
        skip_rows: leave out rows of decoder layers that no later token reads (see needed_rows.py). The values
            of the others are the same either way; False is for tests.
        is_packed: weights are in the packed form: a forward is made of kernels alone, and a decode step's
            shapes depend on its numbers of sequences and rows and on `Batch.max_seqlen_k`, a bound.
    """

    config: DeepseekV41Config
    spec: ModelSpec
    arithmetic: Arithmetic
    embed: Embedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Projection
    rotary: RotaryTables
    hasher: EngramHasher | None
    counters: RowCounters
    skip_rows: bool = True
    is_packed: bool = False

    @classmethod
    def load(cls, weights: Weights, config: DeepseekV41Config, arithmetic: Arithmetic) -> DeepseekV41Model:
        """Read the backbone's tensors from a proved checkpoint."""
        dtype = getattr(torch, arithmetic.compute_dtype)
        num_layers = config.num_hidden_layers
        embed = weights.tensor("embed.weight")
        return cls(
            config=config,
            spec=model_spec(config),
            arithmetic=arithmetic,
            embed=Embedding(embed, dtype),
            layers=tuple(Layer.load(weights, i, config, arithmetic) for i in range(num_layers)),
            norm=RMSNorm(weights.tensor("norm.weight", torch.float32), config.rms_norm_eps),
            head=weights.linear("head"),
            rotary=rotary_tables(config, embed.device),
            hasher=EngramHasher.build(config, embed.device) if config.engram_layer_ids else None,
            counters=RowCounters([0] * num_layers, [0] * num_layers),
            is_packed=weights.is_packed,
        )

    def forward(
        self, batch: Batch, caches: Caches, want_features: bool = False, gate: LayerGate | None = None
    ) -> ForwardOutput:
        """Run the backbone over the rows of a batch and write their cache records.

        Args:
            batch: the step's inputs.
            caches: pools that hold what earlier steps wrote for the batch's sequences.
            want_features: also hand out the drafter's features, the mean of the streams at the attention's
                entry of the layers `dspark_target_layer_ids`, side by side.
            gate: passed before each layer touches the caches; None when nothing is on its way into them.
        """
        rows = self._rows(batch, caches)
        needed = self._needed_rows(batch)
        streams = Streams.start(self.embed, batch.input_ids, self.config.hc_mult)
        table_rows = None if self.hasher is None else self.hasher(batch.ngram_ids)
        looked_up = None
        is_image = self._image_rows(batch)
        tap = FeatureTap(self.config.dspark_target_layer_ids if want_features else ())
        selection = None
        for layer in self.layers:
            mine = None if layer.engram is None else _of_rows(table_rows[layer.table], rows)
            x, streams = layer.enter(streams, mine, _of_rows(is_image, rows), looked_up)
            looked_up = self._look_up(layer.layer_id + 1, table_rows, batch)
            if gate is not None:
                gate.wait(layer.layer_id)
            layer.attention.store_entries(x, rows, caches)
            if layer.layer_id == self.spec.first_decoder_layer:
                selection = None  # it points at the encoder's entries; this layer makes its own
                if batch.replay is not ReplayMode.OFF:
                    rows = rows.bounded(batch.window_starts)
                if (part := needed.kv) is not None:
                    x, streams, rows = _taken(x, part.places), streams.take(part.places), rows.narrowed(part)
                    tap.take(part.places)
            if rows.num_rows == 0:  # no later token reads anything of this chunk from here on
                break
            keys = layer.attention.store_window(x, rows, caches)
            tap.add(layer.layer_id, streams, rows)
            self.counters.kv_rows[layer.layer_id] += rows.num_rows
            if (part := needed.queries[layer.layer_id]) is not None:
                x, streams, rows = _taken(x, part.places), streams.take(part.places), rows.narrowed(part)
                selection = None if selection is None else selection.take(part.places)
                tap.take(part.places)
            self.counters.query_rows[layer.layer_id] += rows.num_rows
            if rows.num_rows == 0:
                break
            output, selection = layer.attention.forward(x, rows, keys, caches, selection)
            streams = layer.feed_forward(streams.add(output), _of_rows(is_image, rows))
        hidden_states = streams.collapse(self.norm)
        return ForwardOutput(hidden_states, *(tap.result(hidden_states, rows) if want_features else ()))

    def reserve(self, num_positions: int) -> None:
        """Make the rotary tables hold positions below `num_positions`."""
        if self.is_packed:
            self.rotary.reserve(num_positions, self._ratios)

    @property
    def _ratios(self) -> tuple[int, ...]:
        """Tokens of a compressed entry, of each kind of layer, ascending."""
        return tuple(sorted({self.config.ratio(layer_id) for layer_id in self.config.kv_source_layer_ids}))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[n, hidden] after the last norm -> float32 [n, vocab]."""
        return self.head(hidden_states, self.arithmetic, torch.float32)

    def _rows(self, batch: Batch, caches: Caches) -> RowSet | DeviceRows:
        """Every row of a batch."""
        if not self.is_packed:
            return RowSet.whole(batch, self.rotary)
        ring = caches.window(self.layers[0].layer_id).shape[1]
        sizes = ListSizes(self.config.sliding_window, ring, caches.layout.block_size, self._ratios)
        return DeviceRows.whole(batch, self.rotary, sizes)

    def _image_rows(self, batch: Batch) -> Tensor | None:
        """[Q] bool, tokens of images; None when there is none."""
        image_token = self.config.image_token_id
        if self.is_packed and not batch.is_prefill:
            return None  # nobody draws or drafts the tokens of images
        is_image = (batch.on_host("input_ids").input_ids == image_token).numpy()
        return upload_one(is_image, batch.input_ids.device) if is_image.any() else None

    def _look_up(self, layer_id: int, table_rows: Tensor | None, batch: Batch) -> Aside[Tensor] | None:
        """Begin what Engram of the next layer finds: it depends on tokens alone.

        Not in a prefill, whose rows may narrow, and whose kernels fill the device.
        """
        engram = self.layers[layer_id].engram if layer_id < len(self.layers) else None
        if engram is None or batch.is_prefill:
            return None
        return aside(table_rows.device, engram.look_up, table_rows[self.layers[layer_id].table])

    def _needed_rows(self, batch: Batch) -> NeededRows:
        is_cut = batch.replay is ReplayMode.COMPACT
        if batch.replay is ReplayMode.MASK or not (self.skip_rows or is_cut):
            return NeededRows.all_rows(batch, self.spec.num_layers)
        return NeededRows.build(
            batch,
            self.spec.num_layers,
            self.spec.first_decoder_layer,
            self.config.sliding_window,
            is_cut=is_cut,
            skip=self.skip_rows,
        )


def _of_rows(values: Tensor | None, rows: RowSet | DeviceRows) -> Tensor | None:
    """The entries of values of the whole batch that belong to some rows."""
    if values is None or rows.index is None:
        return values
    return take_rows(values, rows.index)


def _taken(x: Tensor | Inputs, places: Tensor) -> Tensor | Inputs:
    return x.take(places) if isinstance(x, Inputs) else take_rows(x, places)
