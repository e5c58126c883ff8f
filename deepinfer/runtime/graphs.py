"""Graphs: decode steps that are captured once and replayed with one launch.

    forward   rows, bound    backbone, and the drafter's context; its hidden states stay in a buffer
    sample    rows           head, tokens, verification: for steps whose rows ask for nothing special
    draft     sequences      the drafter's proposal for all sequences of such a step

A step takes the smallest sizes that hold it; the rest is padding that writes to slot 0 and block 0. What a
forward costs depends on its rows, and on the longest context through the width of its index scores, hence a
few bounds for that. All graphs read the same buffers and share one pool of memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.base import Drafter, ForwardOutput, Model
from deepinfer.platform.base import Capture
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.caches import Caches
from deepinfer.runtime.graph_sizes import fitting, sizes_worth_having
from deepinfer.runtime.pending_context import store
from deepinfer.runtime.step_buffers import StepBuffers
from deepinfer.sampling.confidence import ConfidenceScale
from deepinfer.sampling.draft import PlainDrafts
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.sampler import RowParameters, Sampler, SampleResult
from deepinfer.sampling.verify import Verified, verify_decode
from deepinfer.utils.logging import get_logger
from tilelang_ops.step_inputs import draft_rows

logger = get_logger(__name__)

ROW_PARAMETERS = tuple(field.name for field in dataclasses.fields(RowParameters))


@dataclass(frozen=True)
class GraphSizes:
    """What is captured, ascending each.

    Attributes:
        rows: query rows of a forward.
        bounds: tokens of the longest sequence.
        drafting: sequences of a proposal; empty to propose eagerly.
        is_chosen: the rows are what was asked for; else those that are worth it are found by measuring.
        is_lazy: a graph is captured when a step first needs it, instead of all of them at the start.
    """

    rows: Sequence[int]
    bounds: Sequence[int]
    drafting: Sequence[int]
    is_chosen: bool = False
    is_lazy: bool = False


class DecodeGraphs:
    """Captured decode steps of a model.

    Args:
        model, drafter, caches, sampler, confidence_scale, eos_token_id: the runner's.
        num_draft_tokens: drafts of a proposal.
        max_num_seqs: sequences of a step.
        rows_at_once: rows whose logits exist at the same time.
        capture: makes a graph.
        sizes: what to capture.

    Attributes:
        num_bytes: of the device's memory that capturing took, where the one who builds has measured it.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None,
        caches: Caches,
        sampler: Sampler,
        *,
        confidence_scale: ConfidenceScale,
        eos_token_id: int,
        num_draft_tokens: int,
        max_num_seqs: int,
        rows_at_once: int,
        capture: Capture,
        sizes: GraphSizes,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._caches = caches
        self._sampler = sampler
        self._confidence_scale = confidence_scale
        self._eos_token_id = eos_token_id
        self._num_draft_tokens = num_draft_tokens
        self._max_num_seqs = max_num_seqs
        self._rows_at_once = rows_at_once
        self._capture = capture
        self.sizes = sizes
        self.num_bytes = 0
        device = caches.slots.device
        self._block_size = caches.layout.block_size
        self._buffers = StepBuffers(
            sizes.rows[-1], max_num_seqs, model.spec.max_ngram, self._num_blocks(sizes.bounds[-1]), device
        )
        rows, seqs, width = sizes.rows[-1], max_num_seqs + 1, num_draft_tokens
        self._hidden: Tensor | None = None  # [max rows, hidden], made by the first forward
        # What the host copies comes first, and together.
        self._tokens, self._faults, num_emitted, self._drafts, self._confidences, *others = together(
            [
                (torch.int32, (rows,)),
                (torch.uint8, (rows,)),
                (torch.int32, (seqs,)),
                (torch.int32, (seqs, width)),
                (torch.float32, (seqs, width)),
                (torch.float32, (seqs, width)),
                (torch.int32, (seqs, width + 1)),
                (torch.int32, (seqs,)),
            ],
            device,
        )
        self._confidence_logits, emitted, final_rows = others
        self._verified = Verified(emitted, num_emitted.fill_(1), final_rows)
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._samples: dict[int, Callable[[], None]] = {}
        self._proposals: dict[int, Callable[[], None]] = {}
        self._current = (0, 0, 0)  # rows of the newest forward's graph, rows and sequences of the step

    @torch.inference_mode()
    def build(self, measure: Callable[[int], float] | None = None) -> None:
        """Capture everything, from the largest to the smallest.

        Args:
            measure: milliseconds of a step with so many rows and the shortest bound, by `forward`; None keeps
                all sizes.
        """
        bounds, rows = list(self.sizes.bounds), list(self.sizes.rows)
        if self.sizes.is_lazy:
            return
        self._capture_forwards(bounds[-1:], rows[-1:])  # the largest one of all makes the room
        self._capture_forwards(bounds[:1], rows)
        if measure is not None and not self.sizes.is_chosen:
            rows = sizes_worth_having({size: measure(size) for size in rows})
            self._forwards = {key: graph for key, graph in self._forwards.items() if key[0] in rows}
            self.sizes = dataclasses.replace(self.sizes, rows=rows)
        self._capture_forwards(bounds, rows)
        for size in reversed(rows):
            self._captured_sample(size)
        for size in reversed(self.sizes.drafting):
            self._captured_proposal(size)
        logger.info(
            "captured %d forwards (rows %s, context %s), %d samplings, %d proposals",
            len(self._forwards),
            rows,
            bounds,
            len(self._samples),
            len(self._proposals),
        )

    def can_forward(self, batch: Batch) -> bool:
        """Whether a forward of this batch can be replayed."""
        sizes = self.sizes
        return (
            not batch.is_prefill
            and batch.num_seqs <= self._max_num_seqs
            and batch.output_rows.shape[0] == batch.num_rows
            and batch.num_rows <= sizes.rows[-1]
            and self._bound(batch) is not None
        )

    def forward(self, batch: Batch) -> ForwardOutput:
        """Replay the backbone on a batch; the drafter has then taken in its context."""
        rows = fitting(self.sizes.rows, batch.num_rows)
        bound = self._bound(batch)
        assert rows is not None and bound is not None, f"{batch.num_rows=} {batch.max_seqlen_k=}"
        self._buffers.put_batch(batch, self._num_seqs(rows), self._num_blocks(bound))
        self._current = (rows, batch.num_rows, batch.num_seqs)
        self._capture_forwards([bound], [rows])
        graph, counters = self._forwards[rows, bound], self._caches.counters
        before = dict(vars(counters))
        graph.replay()
        for name, count in before.items():  # whatever a replay itself counts
            setattr(counters, name, count + graph.counted[name])
        return ForwardOutput(self._hidden[: batch.num_rows])

    def can_sample(self, inputs: SamplingInputs) -> bool:
        """Whether the rows behind the newest forward can be sampled by a graph."""
        return inputs.is_plain and inputs.num_rows == self._current[1]

    def sample(self, inputs: SamplingInputs) -> tuple[SampleResult, Verified]:
        """Replay head, sampling and verification behind the newest forward."""
        rows, num_rows, num_seqs = self._current
        self._buffers.put_sampling(inputs)
        self._captured_sample(rows)()
        chosen = SampleResult(self._tokens[:num_rows], self._faults[:num_rows], None, None, None, None)
        return chosen, self._verified.of(num_seqs)

    def can_propose(self, num_seqs: int) -> bool:
        """Whether a graph proposes drafts for so many sequences."""
        return fitting(self.sizes.drafting, num_seqs) is not None

    def propose(self, num_seqs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Replay the proposal behind the newest `sample`: drafts, confidences, their logits, [S, k] each."""
        size = fitting(self.sizes.drafting, num_seqs)
        assert size is not None, f"{num_seqs=}"
        self._captured_proposal(size)()
        return tuple(part[:num_seqs] for part in (self._drafts, self._confidences, self._confidence_logits))

    def _capture_forwards(self, bounds: Sequence[int], rows: Sequence[int]) -> None:
        for bound in reversed(bounds):
            for size in reversed(rows):
                if (size, bound) not in self._forwards:
                    self._forwards[size, bound] = self._capture_forward(size, bound)

    def _captured_sample(self, rows: int) -> Callable[[], None]:
        if rows not in self._samples:
            self._samples[rows] = self._capture(lambda: self._sample(rows), f"sampling {rows} rows")
        return self._samples[rows]

    def _captured_proposal(self, num_seqs: int) -> Callable[[], None]:
        if num_seqs not in self._proposals:
            self._proposals[num_seqs] = self._capture(
                lambda: self._propose(num_seqs), f"drafts of {num_seqs} sequences"
            )
        return self._proposals[num_seqs]

    def _capture_forward(self, rows: int, bound: int) -> _Forward:
        counters = self._caches.counters
        before = dict(vars(counters))
        replay = self._capture(
            lambda: self._forward(rows, bound), f"a forward of {rows} rows and {bound} tokens of context"
        )
        after = dict(vars(counters))  # of the run before the capture and the capture itself
        for name, count in before.items():
            setattr(counters, name, count)
        return _Forward(replay, {name: (after[name] - count) // 2 for name, count in before.items()})

    def _forward(self, rows: int, bound: int) -> None:
        batch = self._buffers.batch(rows, self._num_seqs(rows), bound, self._num_blocks(bound))
        output = self._model.forward(batch, self._caches, want_features=self._drafter is not None)
        if self._hidden is None:
            self._hidden = output.hidden_states.new_zeros(
                self._buffers.max_rows, output.hidden_states.shape[1]
            )
        self._hidden[:rows].copy_(output.hidden_states)
        if self._drafter is not None:
            context = self._drafter.context(output.features, output.feature_rows, batch)
            store(self._drafter, context, self._caches)

    def _sample(self, rows: int) -> None:
        num_seqs = self._num_seqs(rows)
        parameters = RowParameters(*(self._buffers.sampling(name, rows) for name in ROW_PARAMETERS))
        for start in range(0, rows, self._rows_at_once):
            stop = min(start + self._rows_at_once, rows)
            logits = self._model.compute_logits(self._hidden[start:stop])
            out = self._tokens[start:stop], self._faults[start:stop]
            self._sampler.choose(logits, parameters.slice(start, stop), out)
        verify_decode(
            self._tokens[:rows],
            self._buffers.sampling("draft_ids", rows),
            self._faults[:rows],
            self._buffers.sampling("row_offsets", num_seqs + 1),
            self._num_draft_tokens + 1,
            fused=True,
            out=self._verified.of(num_seqs),
        )

    def _propose(self, num_seqs: int) -> None:
        max_rows = self._buffers.max_rows
        batch = self._buffers.batch(max_rows, num_seqs, self.sizes.bounds[-1], 1)
        verified = self._verified.of(num_seqs)
        rows = draft_rows(
            verified.emitted,
            verified.num_emitted,
            verified.final_rows,
            batch.positions,
            batch.output_rows,
            batch.state_slots,
            tuple(self._buffers.sampling(name, max_rows) for name in ROW_PARAMETERS),
            self._num_draft_tokens,
        )
        proposal = self._drafter.propose(
            rows.anchors,
            rows.positions,
            rows.state_slots,
            self._caches,
            PlainDrafts(self._sampler, rows),
            self._num_draft_tokens,
        )
        self._confidence_scale.finish(
            proposal.tokens,
            proposal.confidence_logits,
            self._eos_token_id,
            tuple(part[:num_seqs] for part in (self._drafts, self._confidences, self._confidence_logits)),
        )

    def _num_seqs(self, rows: int) -> int:
        """Sequences of a graph, with the one that is nobody's."""
        return min(rows, self._max_num_seqs) + 1

    def _bound(self, batch: Batch) -> int | None:
        """The smallest bound that holds a batch's contexts, and its block tables."""
        width = batch.block_tables.shape[1]
        return fitting(self.sizes.bounds, max(batch.max_seqlen_k, (width - 1) * self._block_size + 1))

    def _num_blocks(self, bound: int) -> int:
        return -(-bound // self._block_size)


def together(parts: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> list[Tensor]:
    """Tensors of zeros in one piece of memory, in the given order."""
    sizes = [kind.itemsize * math.prod(shape) for kind, shape in parts]
    room = [-(-size // 64) * 64 for size in sizes]
    pieces = torch.zeros(sum(room), dtype=torch.uint8, device=device).split(room)
    return [
        piece[:size].view(kind).view(shape)
        for piece, size, (kind, shape) in zip(pieces, sizes, parts, strict=True)
    ]


@dataclass(frozen=True)
class _Forward:
    """A captured forward, and what each run of it adds to the caches' counters."""

    replay: Callable[[], None]
    counted: dict[str, int]
