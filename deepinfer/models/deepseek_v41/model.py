"""The backbone of DeepSeek-V4.1: embedding, layers, last norm and head, over the caches of a step.

The forward is the same code for prefill and decode. It reads and writes the caches in place; a row's bits
depend on its sequence alone, never on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic, ReplayMode
from deepinfer.layers.embedding import Embedding
from deepinfer.layers.linear import Linear
from deepinfer.layers.norm import RMSNorm
from deepinfer.layers.rotary import RotaryTables
from deepinfer.models.base import ForwardOutput, LayerGate, ModelSpec
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram import EngramHasher
from deepinfer.models.deepseek_v41.hyper_connection import Streams
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.needed_rows import NeededRows
from deepinfer.models.deepseek_v41.rows import RowSet, rotary_tables
from deepinfer.models.deepseek_v41.spec import model_spec
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.caches import Caches


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
        self._parts: list[Tensor] = []
        self._rows: Tensor | None = None

    def add(self, layer_id: int, streams: Streams, rows: RowSet) -> None:
        """Streams at the attention's entry of a layer; ignored when it is not one of the targets."""
        if layer_id in self._targets:
            self._parts.append(streams.mean())
            self._rows = rows.index

    def take(self, places: Tensor) -> None:
        """The forward goes on with the rows at `places`."""
        if len(self._parts) < len(self._targets):
            self._parts = [part.index_select(0, places) for part in self._parts]

    def result(self, hidden_states: Tensor, rows: RowSet) -> tuple[Tensor, Tensor]:
        """[F, targets * hidden] features, and [F] int64 their rows in the batch."""
        if len(self._parts) < len(self._targets):  # the forward ended early: no row reached the last target
            width = len(self._targets) * hidden_states.shape[1]
            return hidden_states.new_empty(0, width), rows.index[:0]
        return torch.cat(self._parts, 1), self._rows


@dataclass(frozen=True)
class DeepseekV41Model:
    """The backbone with its weights, on one device.

    Attributes:
        counters: rows computed in each layer.
        skip_rows: leave out rows of decoder layers that no later token reads (see needed_rows.py). The values
            of the others are the same either way; False is for tests.
    """

    config: DeepseekV41Config
    spec: ModelSpec
    arithmetic: Arithmetic
    embed: Embedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Linear
    rotary: RotaryTables
    hasher: EngramHasher | None
    counters: RowCounters
    skip_rows: bool = True

    @classmethod
    def load(cls, weights: Weights, config: DeepseekV41Config, arithmetic: Arithmetic) -> DeepseekV41Model:
        """Read the backbone's tensors from a proved checkpoint."""
        dtype = getattr(torch, arithmetic.compute_dtype)
        num_layers = config.num_hidden_layers
        return cls(
            config=config,
            spec=model_spec(config),
            arithmetic=arithmetic,
            embed=Embedding(weights.tensor("embed.weight"), dtype),
            layers=tuple(Layer.load(weights, i, config, arithmetic) for i in range(num_layers)),
            norm=RMSNorm(weights.tensor("norm.weight", torch.float32), config.rms_norm_eps),
            head=weights.linear("head"),
            rotary=rotary_tables(config),
            hasher=EngramHasher.build(config) if config.engram_layer_ids else None,
            counters=RowCounters([0] * num_layers, [0] * num_layers),
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
        rows = RowSet.whole(batch, self.rotary)
        needed = self._needed_rows(batch)
        streams = Streams.start(self.embed(batch.input_ids), self.config.hc_mult)
        table_rows = None if self.hasher is None else self.hasher(batch.ngram_ids)
        is_image = batch.input_ids == self.config.image_token_id
        is_image = is_image if bool(is_image.any()) else None
        tap = FeatureTap(self.config.dspark_target_layer_ids if want_features else ())
        selection = None
        for layer in self.layers:
            mine = None if layer.engram is None else table_rows[layer.table].index_select(0, rows.index)
            x, streams = layer.enter(streams, mine, _of_rows(is_image, rows))
            if gate is not None:
                gate.wait(layer.layer_id)
            layer.attention.store_entries(x, rows, caches)
            if layer.layer_id == self.spec.first_decoder_layer:
                selection = None  # it points at the encoder's entries; this layer makes its own
                if batch.replay is not ReplayMode.OFF:
                    rows = rows.bounded(batch.window_starts)
                if (places := needed.kv_places) is not None:
                    x, streams, rows = x.index_select(0, places), streams.take(places), rows.take(places)
                    tap.take(places)
            keys = layer.attention.store_window(x, rows, caches)
            tap.add(layer.layer_id, streams, rows)
            self.counters.kv_rows[layer.layer_id] += rows.num_rows
            if (places := needed.query_places[layer.layer_id]) is not None:
                x, streams, rows = x.index_select(0, places), streams.take(places), rows.take(places)
                selection = None if selection is None else selection.take(places)
                tap.take(places)
            self.counters.query_rows[layer.layer_id] += rows.num_rows
            if rows.num_rows == 0:
                break
            output, selection = layer.attention.forward(x, rows, keys, caches, selection)
            streams = layer.feed_forward(streams.add(output), _of_rows(is_image, rows))
        hidden_states = self.norm(streams.collapse())
        return ForwardOutput(hidden_states, *(tap.result(hidden_states, rows) if want_features else ()))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[n, hidden] after the last norm -> float32 [n, vocab]."""
        return self.head(hidden_states, self.arithmetic, torch.float32)

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


def _of_rows(mask: Tensor | None, rows: RowSet) -> Tensor | None:
    """The entries of a mask over the batch that belong to some rows."""
    return None if mask is None else mask.index_select(0, rows.index)
