"""Indexer: which compressed entries a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.linear import Projection
from deepinfer.layers.norm import RMSNorm
from deepinfer.layers.rows import take_rows
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.device_rows import DeviceRows
from deepinfer.models.deepseek_v41.rows import Groups, RowSet
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.ops.quant import round_mxfp4
from deepinfer.runtime.caches import Caches, PagedView
from tilelang_ops.indexer import candidate_scores, index_scores
from tilelang_ops.kv_index import candidate_blocks, entry_slots, select_entries
from tilelang_ops.projection import Records, Rotation, encode_rows, rotate, round_rows

COLUMNS = 32  # scores of four candidate blocks, 16 bytes of maxima


@dataclass(frozen=True)
class Selection:
    """The entries that each query row attends to, handed from layer to layer.

    Attributes:
        entries: [n, index_topk] int32 entry numbers, ascending, -1 behind the last.
        slots: [n, index_topk] int32 their record numbers in the pools of the layer that owns them.
        candidates: [n, candidate_topk_blocks] int32 blocks among which later layers choose; None when there
            is no restriction or every block is a candidate.
    """

    entries: Tensor
    slots: Tensor
    candidates: Tensor | None

    def take(self, places: Tensor) -> Selection:
        """The rows at `places` ([m] int64)."""
        return Selection(
            take_rows(self.entries, places),
            take_rows(self.slots, places),
            None if self.candidates is None else take_rows(self.candidates, places),
        )


@dataclass(frozen=True)
class IndexKeys:
    """The index keys of a layer that owns compressed KV: projection, norm, rotation, MXFP4 store."""

    wk: Projection
    norm: RMSNorm
    arithmetic: Arithmetic

    @classmethod
    def load(
        cls, weights: Weights, prefix: str, config: DeepseekV41Config, arithmetic: Arithmetic
    ) -> IndexKeys:
        """Read the tensors under `prefix`, e.g. "layers.2.attn.indexer"."""
        norm = RMSNorm(weights.tensor(f"{prefix}.k_norm.weight", torch.float32), config.rms_norm_eps)
        return cls(weights.linear(f"{prefix}.wk"), norm, arithmetic)

    def store(self, latents: Tensor, groups: Groups, view: PagedView) -> None:
        """Write the keys of groups, from their normed latents [g, width] before rotation."""
        encode_rows(
            self.wk(latents, self.arithmetic),
            "mxfp4",
            norm=self.norm.step,
            rotation=Rotation(groups.cos, groups.sin),
            records=Records(view.codes, view.scales, groups.slots),
        )


@dataclass(frozen=True)
class Indexer:
    """Index queries of a layer, and the selection they make over the index keys of `source`.

    Attributes:
        source: layer that owns the keys.
        ratio: tokens per entry.
        topk: entries per query.
        block_size: entries of a candidate block.
        num_blocks: candidate blocks per query.
        builds_candidates: later layers choose inside this layer's candidate blocks.
        is_restricted: this layer chooses inside the candidate blocks it is handed.
        wq_b: [heads * width, query rank].
        weights_proj: [heads, hidden].
        arithmetic: how products round; queries are rounded to MXFP4 when caches are.
    """

    source: int
    ratio: int
    topk: int
    block_size: int
    num_blocks: int
    builds_candidates: bool
    is_restricted: bool
    wq_b: Projection
    weights_proj: Projection
    arithmetic: Arithmetic

    @classmethod
    def load(
        cls, weights: Weights, prefix: str, layer_id: int, config: DeepseekV41Config, arithmetic: Arithmetic
    ) -> Indexer:
        """Read the tensors under `prefix`, e.g. "layers.2.attn.indexer"."""
        source = config.index_k_source(layer_id)
        assert source is not None, f"{layer_id=} has no compressed entries"
        return cls(
            source=source,
            ratio=config.ratio(layer_id),
            topk=config.index_topk,
            block_size=config.candidate_block_size,
            num_blocks=config.candidate_topk_blocks,
            builds_candidates=config.builds_candidates(layer_id),
            is_restricted=config.is_restricted(layer_id),
            wq_b=weights.linear(f"{prefix}.wq_b"),
            weights_proj=weights.linear(f"{prefix}.weights_proj"),
            arithmetic=arithmetic,
        )

    def select(
        self,
        x: Tensor | Inputs,
        query_latent: Tensor | Inputs,
        rows: RowSet | DeviceRows,
        caches: Caches,
        previous: Selection | None,
    ) -> Selection:
        """Choose the entries of every row.

        Args:
            x: [n, hidden] normalised input of the layer.
            query_latent: [n, query rank] the normed query latent of the attention.
            rows: the rows of x.
            caches: index keys are read through the block tables.
            previous: the selection of an earlier layer, for its candidate blocks.
        """
        view = caches.paged(self.source)
        max_visible = rows.batch.max_seqlen_k // self.ratio
        allowed = previous.candidates if self.is_restricted and previous is not None else None
        builds = self.builds_candidates and max_visible > self.num_blocks * self.block_size
        if rows.num_rows == 0 or (max_visible <= self.topk and allowed is None and not builds):
            # Every row takes all that it sees, whatever the scores.
            entries, candidates = rows.visible_entries(self.ratio, self.topk), None
        else:
            queries, weights = self._queries(x, query_latent, rows)
            entries, candidates = self._choose(queries, weights, rows, caches, max_visible, allowed, builds)
            keys = max_visible if allowed is None else allowed.shape[1] * self.block_size
            key_bytes = view.section.code_bytes + view.section.scale_bytes
            caches.counters.index_keys_read += rows.num_rows * keys
            caches.counters.bytes_read += rows.num_rows * keys * key_bytes
        slots = entry_slots(entries, rows.row_seq, rows.batch.block_tables, view.section.entries)
        return Selection(entries, slots, candidates)

    def _queries(
        self, x: Tensor | Inputs, query_latent: Tensor | Inputs, rows: RowSet | DeviceRows
    ) -> tuple[Tensor, Tensor]:
        """Index queries [n, heads, width], rounded as the keys are, and weights [n, heads]."""
        heads = self.weights_proj.columns
        queries = self.wq_b(query_latent, self.arithmetic).unflatten(1, (heads, -1))
        rotation = rows.rotation(yarn=True)
        if isinstance(x, Inputs):
            # The factor of the weights is left out: it is the same for all scores of a row, and none is used
            # but to be compared.
            return round_rows(queries, "mxfp4", rotation=Rotation(*rotation)), self.weights_proj(
                x, self.arithmetic
            )
        rotate(queries, *rotation)
        if self.arithmetic.release_caches:
            queries = round_mxfp4(queries)
        scale = (heads * queries.shape[2]) ** -0.5
        return queries, self.weights_proj(x, self.arithmetic).float() * scale

    def _choose(
        self,
        queries: Tensor,
        weights: Tensor,
        rows: RowSet | DeviceRows,
        caches: Caches,
        max_visible: int,
        allowed: Tensor | None,
        builds: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Entries [n, topk], and candidate blocks for later layers: its own if it `builds`, or `allowed`."""
        view, visible = caches.paged(self.source), rows.num_visible(self.ratio)
        in_fp8 = self.arithmetic.fp8_products and self.arithmetic.release_caches  # both sides are MXFP4
        entries, blocks = [], []
        width = allowed.shape[1] * self.block_size if allowed is not None else _padded(max_visible)
        part_rows = max(1, caches.score_bytes // (4 * width))
        for start in range(0, rows.num_rows, part_rows):
            part = slice(start, start + part_rows)
            of_rows = (
                queries[part],
                weights[part],
                view.codes,
                view.scales,
                rows.batch.block_tables,
                rows.row_seq[part],
                visible[part],
            )
            if allowed is not None:
                scores = candidate_scores(*of_rows, allowed[part], self.block_size, in_fp8)
                entries.append(select_entries(scores, self.topk, allowed[part], self.block_size))
                continue
            scores = index_scores(*of_rows, width, in_fp8)
            if builds:
                blocks.append(candidate_blocks(scores, visible[part], self.block_size, self.num_blocks))
            entries.append(select_entries(scores, self.topk))
        return _joined(entries), _joined(blocks) if builds else allowed


def _joined(parts: list[Tensor]) -> Tensor:
    """Lists of consecutive rows as one."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(sum(part.shape[0] for part in parts), parts[0].shape[1])
    for rows, part in zip(whole.split([part.shape[0] for part in parts]), parts, strict=True):
        rows.copy_(part)  # whole copies, for which a GPU needs no kernel
    return whole


def _padded(width: int) -> int:
    """Columns of scores: rows of them, and of their blocks' maxima, start where kernels can load vectors."""
    return -(-width // COLUMNS) * COLUMNS
