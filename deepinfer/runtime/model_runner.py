"""ModelRunner: one step on one device, forward -> logits -> sample -> verify -> draft, in that order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.base import DraftContext, Drafter, ForwardOutput, LayerGate, Model, Proposal
from deepinfer.runtime.async_batch import DeviceStep, NgramVocab, Remap, correct_batch, deal
from deepinfer.runtime.batch import Batch, CacheCopies
from deepinfer.runtime.caches import Caches
from deepinfer.runtime.graphs import DecodeGraphs
from deepinfer.runtime.pending_context import DirectContext, PendingContext
from deepinfer.runtime.step_output import StepOutput, StepResult
from deepinfer.sampling.confidence import ConfidenceScale
from deepinfer.sampling.draft import DraftChooser, PlainDrafts
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.ratio import DraftScores, RatioVerifier
from deepinfer.sampling.sampler import RowParameters, Sampler, SampleResult
from deepinfer.sampling.verify import Verified, verify_decode, verify_prefill
from deepinfer.structured_output.step import StepGrammars
from deepinfer.utils.timer import SectionTimers, Timers
from deepinfer.utils.upload import upload
from tilelang_ops.step_inputs import draft_rows

__all__ = ["ModelRunner", "StepOutput", "StepResult"]

# Bytes of float32 logits that a step holds at once; rows beyond are sampled in slices.
LOGITS_BYTES = 256 << 20
DEVICE_LOGITS_BYTES = 1 << 30  # on a GPU, where each slice reads the whole head again


class ModelRunner:
    """Runs steps on a loaded model: `prepare`, `forward`, `sample`; the device keeps what lies between.

    Args:
        model: the backbone.
        drafter: proposes drafts after every step; None for no speculation.
        caches: both pools.
        sampler: chooses tokens.
        num_draft_tokens: drafts proposed per sequence, 0 without a drafter.
        max_num_seqs: sequences that run at once.
        confidence_scale: [num_draft_tokens] turns the drafter's logits into confidences.
        eos_token_id: the checkpoint's end of sequence.
        ngram_vocab: None when the model hashes no n-grams.
        is_queued: the device works through a queue: nothing that a step launches may wait for it, so no shape
            depends on what it computes. The tokens are the same either way.

    Attributes:
        draft_scores: what the drafts at hand were drawn from, by state slot.
        keeps_confidence_logits: whether results hold the drafter's raw logits too, for calibration.
        graphs: replays decode steps; None runs all of them eagerly.
        timers: the device's time by section.
        num_graph_steps, num_eager_steps: steps whose forward was replayed, and others.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None,
        caches: Caches,
        sampler: Sampler,
        *,
        num_draft_tokens: int,
        max_num_seqs: int,
        confidence_scale: ConfidenceScale,
        eos_token_id: int,
        ngram_vocab: NgramVocab | None,
        is_queued: bool = False,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._pending: PendingContext | DirectContext | None = None
        if drafter is not None:
            self._pending = DirectContext(drafter, caches) if is_queued else PendingContext(drafter, caches)
        self._caches = caches
        self._sampler = sampler
        self._num_draft_tokens = num_draft_tokens
        self._confidence_scale = confidence_scale
        self._eos_token_id = eos_token_id
        self._ngram_vocab = ngram_vocab
        self._is_queued = is_queued
        self.draft_scores = DraftScores(
            caches.slots.shape[0],
            num_draft_tokens,
            model.spec.vocab_size,
            caches.slots.device,
            num_rows=max_num_seqs,
        )
        self._batch: Batch | None = None
        self._copies: CacheCopies | None = None
        self._output: ForwardOutput | None = None
        self._is_replayed = False  # the forward that ran last
        self._last: DeviceStep | None = None  # what the previous step left
        self._watcher: Callable[[Tensor], None] | None = None
        self.keeps_confidence_logits = False
        self.graphs: DecodeGraphs | None = None
        self.timers: SectionTimers = Timers()
        self.num_graph_steps = self.num_eager_steps = 0

    @torch.inference_mode()
    def prepare(self, batch: Batch, remap: Remap | None, copies: CacheCopies | None = None) -> Tensor | None:
        """Take a step's inputs, and put in what only the device knows.

        Args:
            batch: the inputs as the host knows them.
            remap: what to correct from the step before; None when the host knew everything.
            copies: what the step copies in the caches; None for nothing.

        Returns:
            [S] int32 query rows of each sequence where they were dealt anew, else None.
        """
        seqlens_q = None
        with self.timers.timed("forward"):
            if remap is not None and self._last is not None:
                if remap.limits is not None:
                    batch, seqlens_q = deal(batch, remap, self._last)
                batch = correct_batch(batch, remap, self._last, self._ngram_vocab, in_place=self._is_queued)
            self._batch, self._copies = batch, copies
        return seqlens_q

    @torch.inference_mode()
    def forward(self, gate: LayerGate | None = None) -> None:
        """Launch the backbone on the prepared step, which reads what comes through the gate."""
        batch = self._batch
        assert batch is not None, "forward without prepare"
        self._is_replayed = gate is None and self.graphs is not None and self.graphs.can_forward(batch)
        self.num_graph_steps += self._is_replayed
        self.num_eager_steps += not self._is_replayed
        with self.timers.timed("forward"):
            if self._pending is not None:
                self._hand_over_slots(batch, self._pending)
            if gate is not None:  # it writes to slots that were others'
                self.settle()
            if self._copies is not None:
                self._caches.copy_slots(self._copies.slots)
            if self._is_replayed:
                self._output = self.graphs.forward(batch)
            else:
                self._output = self._model.forward(
                    batch, self._caches, want_features=self._drafter is not None, gate=gate
                )
            if gate is not None:
                gate.finish()

    @torch.inference_mode()
    def sample(
        self,
        inputs: SamplingInputs,
        num_drafting: int | None = None,
        grammars: StepGrammars | None = None,
    ) -> StepOutput:
        """Choose the tokens of the step whose `forward` ran last, verify its drafts and propose new ones.

        Args:
            inputs: parameters of the output rows.
            num_drafting: sequences that drafts are proposed for, the last ones; None for all. The drafter's
                caches are kept up for the others as well, if later.
            grammars: of the sequences with structured output; None when there is none.
        """
        batch, output = self._batch, self._output
        assert batch is not None and output is not None, "sample without forward"
        first_drafting = 0 if num_drafting is None else batch.num_seqs - num_drafting
        is_replayed = self._is_replayed and grammars is None and self.graphs.can_sample(inputs)
        is_replayed = is_replayed and self._watcher is None
        if inputs.host["is_ratio"].any():
            self.draft_scores.assign(_on_host(batch, "state_slots").tolist())
        with self.timers.timed("sample"):
            ends = None
            if is_replayed:
                chosen, verified = self.graphs.sample(inputs)
            else:
                if grammars is not None:
                    inputs = grammars.mask(inputs)
                chosen = self._choose(output.hidden_states, inputs, self._ratio_verifier(batch, inputs))
                if grammars is not None:
                    faults, ends = grammars.judge(chosen.token_ids, chosen.faults)
                    chosen = dataclasses.replace(chosen, faults=faults)
                verified = self._verify(batch, chosen, inputs)
                if grammars is not None:
                    grammars.advance(verified.emitted, verified.num_emitted)
        drafted = _Drafted(None, None, None)
        if self._drafter is not None and not self._is_replayed:  # a replayed forward has taken it in
            with self.timers.timed("draft"):
                context = self._drafter.context(output.features, output.feature_rows, batch)
                if first_drafting == 0 or self._is_queued:
                    self._pending.take_in(context)
                else:
                    self._put_off(batch, context, first_drafting, self._pending)
        if self._copies is not None:  # all rows of the step are stored, and no draft is in the way
            self._caches.copy_slots(self._copies.states)
            self._caches.copy_blocks(self._copies.blocks)
        if self._drafter is not None and first_drafting < batch.num_seqs:
            with self.timers.timed("draft"):
                if is_replayed and first_drafting == 0 and self.graphs.can_propose(batch.num_seqs):
                    drafted = _Drafted(*self.graphs.propose(batch.num_seqs))
                else:
                    drafted = self._propose(batch, inputs, verified, grammars, first_drafting)
        self._batch = self._output = self._copies = None
        self._last = DeviceStep(verified.emitted, verified.num_emitted, drafted.tokens, drafted.confidences)
        return StepOutput(
            token_ids=chosen.token_ids,
            faults=chosen.faults,
            logprobs=chosen.logprobs,
            ranks=chosen.ranks,
            top_ids=chosen.top_ids,
            top_logprobs=chosen.top_logprobs,
            num_emitted=None if batch.is_prefill else verified.num_emitted,
            drafts=drafted.tokens,
            confidences=drafted.confidences,
            confidence_logits=drafted.logits if self.keeps_confidence_logits else None,
            ends=ends,
        )

    def watch_logits(self, watcher: Callable[[Tensor], None]) -> None:
        """Show `watcher` the float32 logits [R, vocab] of all later steps, as the model gives them."""
        self._watcher = watcher

    @torch.inference_mode()
    def settle(self) -> None:
        """Finish what the steps so far have left to do in the caches, before anybody else uses them."""
        if self._pending is not None:
            self._pending.settle()

    def reset(self) -> None:
        """Forget the steps so far and their times, as if none had run."""
        if self._pending is not None:
            self._pending.clear()
        self._batch = self._output = self._copies = self._last = None
        self.num_graph_steps = self.num_eager_steps = 0
        self.timers.clear()
        self._caches.counters.reset()

    def _hand_over_slots(self, batch: Batch, pending: PendingContext | DirectContext) -> None:
        """Before a forward: no context may wait for a slot that its sequence holds no more."""
        if pending.is_empty:
            return
        if self._copies is not None:  # whole slots: nothing of what was in the targets stays
            pending.settle(self._copies.slots[:, 0])
            pending.drop(torch.cat([self._copies.slots[:, 1], self._copies.states[:, 1]]))
        if batch.is_prefill:
            is_new = batch.seqlens_k == batch.cu_seqlens_q.diff()
            pending.drop(batch.state_slots[is_new])
            # This may be of a chunk before. What is of somebody who had the slot before does no harm: it is
            # older than all that the sequence writes.
            pending.settle(batch.state_slots[~is_new])

    def _put_off(
        self,
        batch: Batch,
        context: DraftContext,
        first_drafting: int,
        pending: PendingContext | DirectContext,
    ) -> None:
        """Let the context of a step wait.

        Not that of sequences that drafts are proposed for, or that tested drafts, whose positions are written
        again, and not that of slots that are copied behind the step.
        """
        soon = [batch.state_slots[first_drafting:]]
        if not batch.is_prefill and batch.num_rows > batch.num_seqs:
            tested = batch.state_slots[batch.cu_seqlens_q.diff() > 1]
            pending.settle(tested)  # apart: of rows that do not stand nothing is to be concluded
            soon.append(tested)
        pending.put_off(context)
        if self._copies is not None:
            soon.append(self._copies.states[:, 0])
        pending.settle(torch.cat(soon))

    def _ratio_verifier(self, batch: Batch, inputs: SamplingInputs) -> RatioVerifier | None:
        """How rows of ratio requests draw; None where no row tests such a request's draft."""
        if batch.is_prefill or not self.draft_scores.is_allocated or not inputs.host["is_ratio"].any():
            return None
        seqs = batch.row_seq[batch.output_rows.long()].long()
        rows = torch.arange(seqs.shape[0], device=seqs.device)
        places = rows - inputs.row_offsets[seqs]
        return RatioVerifier(self.draft_scores, inputs, batch.state_slots[seqs], places)

    def _choose(self, hidden: Tensor, inputs: SamplingInputs, ratio: RatioVerifier | None) -> SampleResult:
        """The token of every row, the plain sampler's but for ratio requests; few logits exist at once."""
        num_rows = hidden.shape[0]
        rows = rows_at_once(self._model.spec.vocab_size, hidden.device.type)
        if self._is_queued and inputs.is_plain and self._watcher is None:
            return self._choose_plainly(hidden, RowParameters.of(inputs), rows)
        if num_rows <= rows:
            return self._sampler.sample(self._logits(hidden), inputs, ratio)
        parts = []
        for start in range(0, num_rows, rows):
            stop = min(start + rows, num_rows)
            logits = self._logits(hidden[start:stop])
            part = None if ratio is None else ratio.slice(start, stop)
            parts.append(self._sampler.sample(logits, inputs.slice(start, stop), part))
        return _concatenate(parts)

    def _choose_plainly(self, hidden: Tensor, parameters: RowParameters, rows: int) -> SampleResult:
        """The same for rows without further wishes."""
        tokens = torch.empty(hidden.shape[0], dtype=torch.int32, device=hidden.device)
        faults = torch.empty_like(tokens, dtype=torch.uint8)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, min(start + rows, hidden.shape[0]))
            logits = self._model.compute_logits(hidden[part])
            out = tokens[part], faults[part]
            self._sampler.choose(logits, parameters.slice(part.start, part.stop), out)
        return SampleResult(tokens, faults, None, None, None, None)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)
        if self._watcher is not None:
            self._watcher(logits)
        return logits

    def _verify(self, batch: Batch, chosen: SampleResult, inputs: SamplingInputs) -> Verified:
        """Which rows of each sequence stand."""
        width = self._num_draft_tokens + 1
        offsets = inputs.row_offsets
        if batch.is_prefill:
            return verify_prefill(chosen.token_ids, batch.total_lens, batch.seqlens_k, offsets, width)
        return verify_decode(
            chosen.token_ids, inputs.draft_ids, chosen.faults, offsets, width, fused=self._is_queued
        )

    def _propose(
        self,
        batch: Batch,
        inputs: SamplingInputs,
        verified: Verified,
        grammars: StepGrammars | None,
        first_drafting: int,
    ) -> _Drafted:
        """The next step's drafts of the sequences from `first_drafting` on."""
        num_seqs, width = batch.num_seqs, self._num_draft_tokens
        device = batch.input_ids.device
        drafted = _Drafted(
            batch.input_ids.new_empty(num_seqs, width), *torch.empty(2, num_seqs, width, device=device)
        )
        offsets = inputs.host["row_offsets"]
        host_seqs = np.arange(first_drafting, num_seqs)
        seqs = places = None
        if batch.is_prefill:
            # A prefill's sequences with an output row may still be scoring their prompt only.
            samples = _on_host(batch, "total_lens") == _on_host(batch, "seqlens_k")
            host_seqs = host_seqs[(samples & (np.diff(offsets) > 0))[first_drafting:]]
            host_places = np.full(num_seqs, -1, dtype=np.int32)
            host_places[host_seqs] = np.arange(host_seqs.shape[0])
            seqs, places = upload([host_seqs.astype(np.int32), host_places], device)
        if host_seqs.shape[0] == 0:
            # Nobody's, to launch on something: no place names them.
            tokens, logits = batch.input_ids.new_empty(1, width), torch.empty(1, width, device=device)
        else:
            proposal = self._proposal(batch, inputs, verified, grammars, host_seqs, seqs)
            tokens, logits = proposal.tokens, proposal.confidence_logits
        self._confidence_scale.finish(
            tokens,
            logits,
            self._eos_token_id,
            (drafted.tokens, drafted.confidences, drafted.logits),
            places,
            first_drafting,
        )
        return drafted

    def _proposal(
        self,
        batch: Batch,
        inputs: SamplingInputs,
        verified: Verified,
        grammars: StepGrammars | None,
        host_seqs: np.ndarray,
        seqs: Tensor | None,
    ) -> Proposal:
        """Drafts of some sequences, [n] on the host and on the device; None there for the last ones."""
        rows = draft_rows(
            verified.emitted,
            verified.num_emitted,
            verified.final_rows,
            batch.positions,
            batch.output_rows,
            batch.state_slots,
            tuple(vars(RowParameters.of(inputs)).values()),
            self._num_draft_tokens,
            seqs,
            int(host_seqs[0]),
        )
        if self._is_queued and inputs.is_plain:
            chooser: PlainDrafts | DraftChooser = PlainDrafts(self._sampler, rows)
        else:
            offsets = inputs.host["row_offsets"]
            first_rows = offsets[1:] - 1 if batch.is_prefill else offsets[:-1]
            chooser = DraftChooser(
                self._sampler,
                inputs,
                first_rows[host_seqs],
                rows.token_index[0] - 1,
                rows.state_slots,
                self.draft_scores if inputs.host["is_ratio"].any() else None,
                None if grammars is None else grammars.drafting(host_seqs, inputs.device),
            )
        return self._drafter.propose(
            rows.anchors, rows.positions, rows.state_slots, self._caches, chooser, self._num_draft_tokens
        )


def logits_bytes(device_type: str) -> int:
    """Bytes of float32 logits that a step holds at once on a device."""
    return LOGITS_BYTES if device_type == "cpu" else DEVICE_LOGITS_BYTES


def rows_at_once(vocab_size: int, device_type: str) -> int:
    """Rows whose logits exist at the same time."""
    return max(1, logits_bytes(device_type) // (4 * vocab_size))


@dataclass(frozen=True)
class _Drafted:
    """A proposal for each sequence, [S, k] each; 0 where it has sampled nothing, tokens of -1 where no drafts
    are proposed for it. None without any proposal."""

    tokens: Tensor | None
    confidences: Tensor | None
    logits: Tensor | None  # raw ones of the confidences


def _concatenate(parts: list[SampleResult]) -> SampleResult:
    """One result of consecutive slices of rows; slices that nobody asked for values of hold zeros."""
    whole: dict[str, Tensor | None] = {}
    for name in (field.name for field in dataclasses.fields(SampleResult)):
        values = [getattr(part, name) for part in parts]
        given = [value for value in values if value is not None]
        if not given:
            whole[name] = None
            continue
        columns = max(value.shape[1] for value in given) if given[0].dim() == 2 else None
        rows = []
        for part, value in zip(parts, values, strict=True):
            shape = (part.token_ids.shape[0],) if columns is None else (part.token_ids.shape[0], columns)
            full = given[0].new_zeros(shape)
            if value is not None:
                full[..., : value.shape[-1]] = value
            rows.append(full)
        whole[name] = torch.cat(rows)
    return SampleResult(**whole)


def _on_host(batch: Batch, name: str) -> np.ndarray:
    """An array of the batch as the host planned it."""
    return batch.planned[name] if batch.planned is not None else getattr(batch, name).cpu().numpy()
