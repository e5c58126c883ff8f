"""Attention of one layer: its sliding window, compressed entries where it has them, and the sink.

The history of a sequence is read from the cache pools alone. In a decode step the few new records go to the
window ring first and queries read the ring. A prefill chunk may be longer than the ring, so there the history
is copied from the ring to a line of records, the chunk's records behind it; queries read the line and the
ring receives the last records of the chunk. Both ways a query visits the same records in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.linear import Projection
from deepinfer.layers.norm import RMSNorm
from deepinfer.layers.rows import take_rows
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.config import DeepseekV41Config, LayerKind
from deepinfer.models.deepseek_v41.device_rows import DeviceRows
from deepinfer.models.deepseek_v41.indexer import Indexer, IndexKeys, Selection
from deepinfer.models.deepseek_v41.rows import RowSet
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.runtime.caches import Caches
from deepinfer.utils.aside import aside
from tilelang_ops.attention import sparse_attention
from tilelang_ops.kv_cache import copy_records
from tilelang_ops.projection import Records, Rotation, encode_rows, encode_units, rotate, round_rows

Angles = tuple[Tensor, Tensor]  # cosines and sines, float32 [n, rotary width / 2] each


@dataclass(frozen=True)
class WindowKeys:
    """Where the window KV of a layer's queries lies.

    Attributes:
        pool: [parts, records, record] the rings of the state slots, or one line of records.
        rows: the rows whose records were written.
        ring: records of a ring; 0 for a line.
        latent: [n, query rank + width] where they were made on the way: the rows' query latents before their
            norm in front.
        rank: query rank.
    """

    pool: Tensor
    rows: RowSet | DeviceRows
    ring: int
    latent: Tensor | None = None
    rank: int = 0

    def index(self, queries: RowSet | DeviceRows, window: int) -> Tensor:
        """[n, window] int32 record numbers of each query's window."""
        if self.ring:
            return queries.window_in_ring(window, self.ring)
        return queries.window_in_line(window, self.rows)

    def latent_of(self, queries: RowSet | DeviceRows) -> Tensor | None:
        """[m, query rank] latents of these rows or of a part of them, where there are any."""
        if self.latent is None:
            return None
        if queries is self.rows:
            return self.latent[:, : self.rank]
        assert isinstance(queries, DeviceRows) and queries.parent is self.rows and queries.places is not None
        return take_rows(self.latent, queries.places)[:, : self.rank]  # whole rows are taken without a copy


@dataclass(frozen=True)
class Attention:
    """One layer's attention.

    Attributes:
        layer_id: owner of the window ring.
        source: layer that owns the compressed entries; None in a window-only layer.
        window: tokens that a query sees, itself included.
        num_heads: query heads.
        yarn: the layer's rotations are the interpolated ones.
        arithmetic: how products round.
        is_packed: weights are in the packed form, whose products take `Inputs`.
        wq_a_kv: `wq_a` above `wkv`, in the packed form of the backbone, where one product makes both; these
            two are None then.
    """

    layer_id: int
    source: int | None
    window: int
    num_heads: int
    yarn: bool
    arithmetic: Arithmetic
    wq_a: Projection | None  # [query rank, hidden]
    q_norm: RMSNorm
    wq_b: Projection  # [heads * width, query rank]
    wkv: Projection | None  # [width, hidden]
    kv_norm: RMSNorm
    sink: Tensor  # [heads] float32
    wo_a: Projection  # [groups * output rank, heads * width / groups]
    wo_b: Projection  # [hidden, groups * output rank]
    num_groups: int
    compressor: Compressor | None
    index_keys: IndexKeys | None
    indexer: Indexer | None
    is_packed: bool = False
    wq_a_kv: Projection | None = None

    @classmethod
    def load(
        cls, weights: Weights, prefix: str, layer_id: int, config: DeepseekV41Config, arithmetic: Arithmetic
    ) -> Attention:
        """Read the tensors under `prefix`, e.g. "layers.2.attn"; `layer_id` counts drafter layers too."""

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.tensor(f"{prefix}.{name}.weight", torch.float32), config.rms_norm_eps)

        kind = config.layer_kind(layer_id)
        compressor = index_keys = indexer = None
        if kind is LayerKind.FULL:
            compressor = Compressor.load(weights, f"{prefix}.compressor", layer_id, config, arithmetic)
            index_keys = IndexKeys.load(weights, f"{prefix}.indexer", config, arithmetic)
        if kind in (LayerKind.FULL, LayerKind.REINDEX):
            indexer = Indexer.load(weights, f"{prefix}.indexer", layer_id, config, arithmetic)
        # The drafter makes the KV of its context without queries.
        is_joined = weights.is_packed and layer_id not in config.draft_layer_ids
        return cls(
            layer_id=layer_id,
            source=config.kv_source(layer_id),
            window=config.sliding_window,
            num_heads=config.num_attention_heads,
            yarn=config.uses_yarn(layer_id),
            arithmetic=arithmetic,
            wq_a=None if is_joined else weights.linear(f"{prefix}.wq_a"),
            q_norm=norm("q_norm"),
            wq_b=weights.linear(f"{prefix}.wq_b"),
            wkv=None if is_joined else weights.linear(f"{prefix}.wkv"),
            wq_a_kv=weights.linear(f"{prefix}.wq_a", f"{prefix}.wkv") if is_joined else None,
            kv_norm=norm("kv_norm"),
            sink=weights.tensor(f"{prefix}.attn_sink", torch.float32),
            wo_a=weights.linear(f"{prefix}.wo_a", num_groups=config.o_groups),
            wo_b=weights.linear(f"{prefix}.wo_b"),
            num_groups=config.o_groups,
            compressor=compressor,
            index_keys=index_keys,
            indexer=indexer,
            is_packed=weights.is_packed,
        )

    @property
    def owns_entries(self) -> bool:
        """The layer makes compressed entries, which this and later layers read."""
        return self.compressor is not None

    @property
    def takes_values(self) -> bool:
        """Some product takes the layer's input as it is: the compressor's, or that of the index weights."""
        return self.compressor is not None or self.indexer is not None

    def store_entries(self, x: Tensor | Inputs, rows: RowSet | DeviceRows, caches: Caches) -> None:
        """Write the compressed KV and index keys of the groups that end among the rows, if it owns any.

        Args:
            x: [n, hidden] normalised input of every row of the step.
            rows: the whole batch.
            caches: the pools.
        """
        if self.compressor is None or self.index_keys is None or rows.num_rows == 0:
            return
        view = caches.paged(self.layer_id)
        groups = rows.groups(self.compressor.ratio, view.section.entries)
        latents = self.compressor(x, rows, groups, caches)
        caches.counters.entry_rows += rows.num_rows
        if latents.shape[0] == 0:  # no group ends here; the compression ring keeps the open ones
            return
        encoded = encode_rows(
            latents,
            "fp4",
            norm=self.compressor.norm.step,
            rotation=Rotation(groups.cos, groups.sin),
            records=Records(view.main, None, groups.slots),
            keeps_normed=True,
        )
        assert encoded.normed is not None
        self.index_keys.store(encoded.normed, groups, view)

    def store_window(self, x: Tensor | Inputs, rows: RowSet | DeviceRows, caches: Caches) -> WindowKeys:
        """Write the window KV of the rows.

        Args:
            x: [n, hidden] normalised input of the layer.
            rows: the rows of x; in a decode step at most `max_backtracking + 1` of a sequence.
            caches: the pools.

        Returns:
            where queries among these rows find their windows.
        """
        kv, both = self._kv(x)
        rank = self.q_norm.weight.shape[0]
        rotation = rows.rotation(self.yarn)
        rings = caches.window(self.layer_id)
        ring = rings.shape[1]
        if not rows.batch.is_prefill:
            self.store_in_rings(kv, rotation, rows.ring_index(ring), caches)
            return WindowKeys(rings, rows, ring, both, rank)
        caches.counters.window_records_written += rows.num_rows
        num_records = rows.batch.num_seqs * (self.window - 1) + rows.num_rows
        line = rings.new_empty(1, num_records, rings.shape[2])
        sources, targets = rows.history_index(self.window, ring)
        copy_records(rings, sources, line, targets)
        places, _ = rows.line_index(self.window)
        self._store(kv, rotation, line, places)
        copy_records(line, places, rings, rows.ring_index(ring))
        return WindowKeys(line, rows, 0, both, rank)

    def store_in_rings(self, kv: Tensor, rotation: Angles, records: Tensor, caches: Caches) -> None:
        """Norm, rotate and quantise KV vectors and write them to the rings of the state slots.

        Args:
            kv: [n, width] of `wkv`.
            rotation: cosines and sines at the vectors' positions.
            records: [n] int64 record numbers, slot * ring + place in the ring; -1 writes nothing.
            caches: the pools.
        """
        caches.counters.window_records_written += kv.shape[0]
        self._store(kv, rotation, caches.window(self.layer_id), records)

    def _store(self, kv: Tensor, rotation: Angles, pool: Tensor, records: Tensor) -> None:
        encode_rows(
            kv,
            "fp8",
            norm=self.kv_norm.step,
            rotation=Rotation(*rotation),
            records=Records(pool, None, records),
        )

    def forward(
        self,
        x: Tensor | Inputs,
        rows: RowSet | DeviceRows,
        keys: WindowKeys,
        caches: Caches,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection | None]:
        """Attend with the given rows as queries.

        Args:
            x: [n, hidden] normalised input of the layer.
            rows: the rows of x, those of `keys` or a part of them.
            keys: what `store_window` returned; `store_entries` came before it where the layer owns entries.
            caches: the pools.
            selection: what the layer below returned, for the same rows; None below the first indexer.

        Returns:
            [n, hidden] of x's dtype, and the selection for the layer above: a new one where this layer has an
            indexer, else the given one.
        """
        query_latent = self._query_latent(x, keys.latent_of(rows))
        rotation = rows.rotation(self.yarn)
        queries = None
        if self.indexer is not None:
            queries = aside(query_latent.device, self._queries, query_latent, rotation)
            selection = self.indexer.select(x, query_latent, rows, caches, selection)
        main, slots = None, None
        if self.source is not None:
            assert selection is not None, f"layer {self.layer_id} needs the selection of a layer below"
            main, slots = caches.main(self.source), selection.slots
        index = keys.index(rows, self.window)
        self._count(keys.pool, index, main, slots, caches)
        q = self._queries(query_latent, rotation) if queries is None else queries.result()
        return self._attend(q, rotation, keys.pool, index, main, slots), selection

    def forward_in_rings(self, x: Tensor | Inputs, rotation: Angles, index: Tensor, caches: Caches) -> Tensor:
        """Attend over listed records of the rings and nothing else, in a window-only layer.

        Args:
            x: [n, hidden] normalised input of the layer.
            rotation: cosines and sines at the queries' positions.
            index: [n, w] int32 record numbers of each query's keys, -1 for none.
            caches: the pools.

        Returns:
            [n, hidden] of x's dtype.
        """
        assert self.source is None and self.indexer is None, f"{self.layer_id=} reads compressed entries"
        rings = caches.window(self.layer_id)
        self._count(rings, index, None, None, caches)
        queries = self._queries(self._query_latent(x), rotation)
        return self._attend(queries, rotation, rings, index, None, None)

    def _kv(self, x: Tensor | Inputs) -> tuple[Tensor, Tensor | None]:
        """KV vectors [n, width] before their norm; also behind query latents if one product makes both."""
        if self.wq_a_kv is None:
            assert self.wkv is not None
            return self.wkv(x, self.arithmetic), None
        rank = self.q_norm.weight.shape[0]
        both = self.wq_a_kv(x, self.arithmetic)
        return both[:, rank:], both

    def _query_latent(self, x: Tensor | Inputs, latent: Tensor | None = None) -> Tensor | Inputs:
        """[n, query rank] normed; `latent` where it is there before its norm."""
        if latent is None:
            assert self.wq_a is not None
            latent = self.wq_a(x, self.arithmetic)
        if self.is_packed:
            return self.q_norm.inputs(latent, self.arithmetic)
        return self.q_norm(latent)

    def _queries(self, latent: Tensor | Inputs, rotation: Angles) -> Tensor:
        """[n, heads, width] rotated queries, from their latents [n, query rank]."""
        queries = self.wq_b(latent, self.arithmetic).unflatten(1, (self.num_heads, -1))
        rotate(queries, *rotation)
        return queries

    def _attend(
        self,
        queries: Tensor,
        rotation: Angles,
        window: Tensor,
        window_index: Tensor,
        main: Tensor | None,
        main_index: Tensor | None,
    ) -> Tensor:
        """Attention of rotated queries [n, heads, width], and its output projection; [n, hidden]."""
        scale = queries.shape[2] ** -0.5
        out = sparse_attention(queries, window, window_index, main, main_index, self.sink, scale)
        latent = self.wo_a.by_group(self._turned_back(out, rotation), self.arithmetic)
        return self.wo_b(latent.flatten(1), self.arithmetic)

    def _turned_back(self, out: Tensor, rotation: Angles) -> Tensor | Inputs:
        """Attention's results [n, heads, width] for the output projection, by group."""
        back = Rotation(*rotation, inverse=True)
        if not (self.is_packed and self.arithmetic.quantize_activations):
            rotate(out, *rotation, inverse=True)
            return out.flatten(1).unflatten(1, (self.num_groups, -1))
        if self.arithmetic.fp8_products:
            return Inputs(None, codes=encode_units(out, rotation=back))
        return Inputs(None, round_rows(out, rotation=back).flatten(1))

    def _count(
        self, window: Tensor, index: Tensor, main: Tensor | None, slots: Tensor | None, caches: Caches
    ) -> None:
        counters = caches.counters
        counters.query_rows += index.shape[0]
        counters.window_records_read += index.numel()
        counters.bytes_read += index.numel() * window.shape[2] * window.element_size()
        if main is not None and slots is not None:
            counters.main_records_read += slots.numel()
            counters.bytes_read += slots.numel() * main.shape[2] * main.element_size()
