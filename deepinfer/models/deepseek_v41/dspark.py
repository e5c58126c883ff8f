"""The DSpark drafter of DeepSeek-V4.1: proposes a block of tokens in one pass, behind the backbone.

Its stages are window-only layers. What they know of a sequence is their own window KV, made from features of
the backbone (`store_context`). A block is the anchor, the token chosen last, and noise tokens behind it:

    position          a - window ... a - 1      a        a + 1 ... a + block - 1
    record            context                   anchor   noise
    row a + i         sees every record above, those behind it included, and drafts the token of a + i + 1

The stages run once for the whole block (`run_block`). A first-order Markov head then corrects the logits of
one draft after the other by the token before it, which is the only sequential part (`propose`). Choosing a
token, verification and how many drafts are worth verifying belong to others.

The records of a block lie where verification, or the next block, writes before anyone reads them as context.
A ring thus holds `window + block_size` records at least: the engine gives it `max_backtracking =
max(num_drafts, block_size) + 1`, the whole block being computed however few of its drafts are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.embedding import Embedding
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.linear import DenseLinear, Projection
from deepinfer.layers.norm import RMSNorm
from deepinfer.layers.rotary import RotaryTable
from deepinfer.layers.rows import take_rows
from deepinfer.models.base import DraftContext, Proposal
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.device_rows import DeviceRows
from deepinfer.models.deepseek_v41.hyper_connection import Streams
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.caches import Caches
from deepinfer.utils.upload import upload
from tilelang_ops.kv_index import ring_index
from tilelang_ops.sampling import confidence_head, markov_step
from tilelang_ops.step_inputs import draft_inputs


@dataclass(frozen=True)
class Drafter:
    """The drafter with its weights, on one device. Embedding, head and rotary table are the backbone's.

    Attributes:
        block_size: drafts of a block.
        window: context positions that a block sees.
        num_streams: residual streams of a row.
        noise_token_id: fills the block behind the anchor.
        main_proj: [hidden, targets * hidden] and
        main_norm: make the stages' input from features.
        stages: window-only layers; each owns a window ring.
        norm: before the head.
        markov_embed: [vocab, rank] a row for the token before a draft, and
        markov_head: [vocab, rank] what that row adds to the draft's logits.
        confidence: [1, hidden + rank], of the state before `norm` and the Markov row.
        is_packed: weights are in the packed form, whose products take `Inputs`.
    """

    arithmetic: Arithmetic
    block_size: int
    window: int
    num_streams: int
    noise_token_id: int
    embed: Embedding
    main_proj: Projection
    main_norm: RMSNorm
    stages: tuple[Layer, ...]
    norm: RMSNorm
    head: Projection
    markov_embed: Embedding
    markov_head: Projection
    confidence: Projection
    rotary: RotaryTable
    is_packed: bool = False

    @property
    def context_size(self) -> int:
        """Positions in front of an anchor that a block sees."""
        return self.window

    @classmethod
    def load(
        cls, weights: Weights, config: DeepseekV41Config, arithmetic: Arithmetic, model: DeepseekV41Model
    ) -> Drafter:
        """Read the drafter's tensors from a proved checkpoint that has a drafter."""

        def norm(prefix: str) -> RMSNorm:
            return RMSNorm(weights.tensor(f"{prefix}.weight", torch.float32), config.rms_norm_eps)

        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        markov = weights.tensor(f"{last}.markov_head.embed.weight")
        drafter = cls(
            arithmetic=arithmetic,
            block_size=config.dspark_block_size,
            window=config.sliding_window,
            num_streams=config.hc_mult,
            noise_token_id=config.dspark_noise_token_id,
            embed=model.embed,
            main_proj=weights.linear("mtp.0.main_proj"),
            main_norm=norm("mtp.0.main_norm"),
            stages=tuple(Layer.load(weights, i, config, arithmetic) for i in config.draft_layer_ids),
            norm=norm(f"{last}.norm"),
            head=model.head,
            markov_embed=Embedding(markov, model.embed.dtype),
            markov_head=weights.linear(f"{last}.markov_head.head"),
            confidence=weights.linear(f"{last}.confidence_head.proj"),
            rotary=model.rotary.plain,
            is_packed=weights.is_packed,
        )
        if drafter.is_packed:
            _ = drafter._confidence_vectors  # no step has to make them
        return drafter

    def context(self, features: Tensor, feature_rows: Tensor | DeviceRows, batch: Batch) -> DraftContext:
        """The rows of a step that blocks will see.

        In a decode step these are all rows, before it is known which drafts survive. Of a prefill only rows
        in the window of a sequence's first block are taken.

        Args:
            features: [F, targets * hidden] and
            feature_rows: [F] int64, what the forward of `batch` handed out.
            batch: the step's inputs.
        """
        if isinstance(feature_rows, DeviceRows):
            return self._device_context(features, feature_rows, batch)
        positions = batch.positions.index_select(0, feature_rows)
        seqs = batch.row_seq.index_select(0, feature_rows)
        if batch.is_prefill and feature_rows.shape[0] > 0:  # of no rows a GPU need not be asked
            starts = (batch.total_lens - self.window).index_select(0, seqs)
            places = (positions >= starts).nonzero().squeeze(1)
            features, positions, seqs = (t.index_select(0, places) for t in (features, positions, seqs))
        return DraftContext(features, positions, batch.state_slots.index_select(0, seqs), batch.max_seqlen_k)

    def _device_context(self, features: Tensor, rows: DeviceRows, batch: Batch) -> DraftContext:
        """As `context`, from what the host knows of a prefill's rows; those of padding belong to slot 0."""
        positions = rows.positions
        if rows.num_rows == 0:
            return DraftContext(features, positions, positions, batch.max_seqlen_k)
        slots = rows.slots
        if batch.is_prefill:
            host = batch.on_host("positions", "row_seq", "total_lens")
            index = np.arange(batch.num_rows) if rows.host_index is None else rows.host_index
            starts = host.total_lens.numpy()[host.row_seq.numpy()[index]] - self.window
            kept = np.flatnonzero(host.positions.numpy()[index] >= starts)
            if kept.size < index.size:
                places = upload([kept.astype(np.int64)], features.device)[0]
                features, positions, slots = (take_rows(t, places) for t in (features, positions, slots))
        return DraftContext(features, positions, slots, batch.max_seqlen_k)

    def store_context(self, context: DraftContext, caches: Caches) -> None:
        """Write the stages' window KV of rows that have features.

        Every forward's rows have to be written before the next `propose`, those of one position in the order
        of the forwards.

        Args:
            context: of one forward or several.
            caches: the pools; sequences are found by their state slots.
        """
        # Anchors of the newest step stand behind its rows, so this is the bound for `propose` as well.
        self.rotary.reserve(context.max_length + self.block_size)
        if context.positions.shape[0] == 0:
            return
        x: Tensor | Inputs = self.main_proj(context.features, self.arithmetic)
        if self.is_packed:
            x = self.main_norm.inputs(x, self.arithmetic)
        else:
            x = self.main_norm(x)
        rotation = self.rotary.rows(context.positions, self.rotary.num_positions)
        records = ring_index(context.state_slots, context.positions, self._ring(caches))
        for stage in self.stages:
            attention = stage.attention
            kv = attention.wkv(x, self.arithmetic)
            attention.store_in_rings(kv, rotation, records, caches)

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        state_slots: Tensor,
        caches: Caches,
        choose: Callable[[int, Tensor], Tensor],
        num_drafts: int,
    ) -> Proposal:
        """Draft tokens for n sequences; a sequence's drafts depend on that sequence alone, bit for bit.

        Args:
            anchors: [n] int32 token that was chosen last, which the backbone has not seen.
            positions: [n] int32 of the anchors. Earlier positions in the window went through `store_context`,
                which made the rotary table long enough.
            state_slots: [n] int32, distinct.
            caches: the pools.
            choose: (step, logits float32 [n, vocab], its to change) -> [n] int32 tokens; called for the
                steps 0, 1, ..., num_drafts - 1.
            num_drafts: 1 ... block_size. The block always runs whole, as it was trained.

        Returns:
            tokens and confidence logits, [n, num_drafts] each.
        """
        assert 1 <= num_drafts <= self.block_size, f"{num_drafts=} {self.block_size=}"
        if anchors.shape[0] == 0:
            return Proposal(anchors.new_empty(0, num_drafts), torch.empty(0, num_drafts))
        hidden = self.run_block(anchors, positions, state_slots, caches)[:num_drafts]
        logits = self.base_logits(hidden)
        tokens = anchors.new_empty(1 + num_drafts, anchors.shape[0])
        tokens[0].copy_(anchors)
        for step in range(num_drafts):
            tokens[step + 1].copy_(choose(step, self._corrected(logits[step], tokens[step])))
        confidences = self._confidences(hidden, self.markov_embed(tokens[:-1]))
        return Proposal(tokens[1:].t(), confidences)

    def run_block(self, anchors: Tensor, positions: Tensor, state_slots: Tensor, caches: Caches) -> Tensor:
        """States of the block's rows behind the last stage, before the norm: [block_size, n, hidden].

        Rows at the same place of their blocks lie together, as the Markov head takes them. Arguments are
        those of `propose`. Writes the block's records to the rings.
        """
        inputs = draft_inputs(
            anchors,
            positions,
            state_slots,
            block_size=self.block_size,
            window=self.window,
            ring=self._ring(caches),
            noise_token_id=self.noise_token_id,
        )
        rotation = self.rotary.rows(inputs.positions, self.rotary.num_positions)
        streams = Streams.start(self.embed, inputs.input_ids, self.num_streams)
        for stage in self.stages:
            attention = stage.attention
            x, streams = stage.enter(streams, None)
            kv = attention.wkv(x, self.arithmetic)
            attention.store_in_rings(kv, rotation, inputs.ring_index, caches)
            output = attention.forward_in_rings(x, rotation, inputs.window_index, caches)
            streams = stage.feed_forward(streams.add(output))
        return streams.collapse().unflatten(0, (self.block_size, -1))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] from `run_block` -> float32 [..., vocab], without the Markov head's part."""
        rows = self.norm(hidden).flatten(0, -2)
        return self.head(rows, self.arithmetic, torch.float32).view(*hidden.shape[:-1], -1)

    def _confidences(self, hidden: Tensor, markov_rows: Tensor) -> Tensor:
        """[n, k] float32 confidence logits, from states [k, n, hidden] and Markov rows [k, n, rank]."""
        k = hidden.shape[0]
        if isinstance(self.confidence, DenseLinear):
            weight, *no_scale = self._confidence_vectors
            return confidence_head(hidden, markov_rows, weight, *(part[:k] for part in no_scale))[0]
        states = torch.cat([hidden, markov_rows], -1).flatten(0, 1)
        return self.confidence(states, self.arithmetic, torch.float32).view(k, -1).t().contiguous()

    @cached_property
    def _confidence_vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The confidence head's weight [hidden + rank], and scales of a block that change no logit."""
        assert isinstance(self.confidence, DenseLinear), "only the packed form keeps the weight in terms"
        terms = self.confidence.weight
        ones = torch.ones(self.block_size, device=terms.device)
        return terms[0] if len(terms) == 1 else terms.float().sum(0), ones, torch.zeros_like(ones)

    def _corrected(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[n, vocab] float32 logits of a draft, with the Markov head's part for the tokens before it.

        Args:
            logits: [n, vocab] float32 without it.
            tokens: [n] int32.
        """
        head, embed = self.markov_head, self.markov_embed
        if isinstance(head, DenseLinear) and head.num_parts == 1 and embed.weight.dtype == torch.bfloat16:
            vocab, rank = head.weight.shape
            if vocab % 4 == 0 and rank % 64 == 0:
                _, corrected = markov_step(logits, tokens, embed.weight, head.weight, None, True)
                return corrected
        return head(embed(tokens), self.arithmetic, torch.float32).add_(logits)

    def _ring(self, caches: Caches) -> int:
        """Records of a ring."""
        ring = caches.window(self.stages[0].layer_id).shape[1]
        needed = self.window + self.block_size
        assert ring >= needed, f"{ring=}: context and block take {needed} records; raise max_backtracking"
        return ring
