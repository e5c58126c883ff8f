"""TableModel: a "model" and a drafter that look their logits up in random tables, and a loop that runs them.

Nothing in it rounds, so every device computes the same bits, and a step is small enough to be followed by
hand. A row's logits depend on its token, position and state slot; drafts also on context that went through
the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.executor import Executor
from deepinfer.models.base import DraftContext, ForwardOutput, ModelSpec, Proposal
from deepinfer.runtime.async_batch import Remap
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.caches import CacheCounters
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.sampling.confidence import ConfidenceScale
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.sampler import Sampler
from deepinfer.utils.upload import upload_one
from tests.sampling.rows import Row, make_inputs

VOCAB, TABLE, NUM_DRAFTS, EOS, RING, BLOCK_SIZE = 4160, 97, 3, 1, 32, 128
NUM_LIKELY = 64  # tokens; so drafts are accepted now and then
NUM_SLOTS = 12


def caches_on(device: torch.device) -> Any:
    """Pools of the two kinds, of which the drafter uses one word for each position of a ring."""
    slots = torch.zeros(NUM_SLOTS, 4 * RING, dtype=torch.uint8, device=device)
    return SimpleNamespace(
        slots=slots,
        blocks=torch.zeros(4, 8, dtype=torch.uint8, device=device),
        layout=SimpleNamespace(block_size=BLOCK_SIZE),
        counters=CacheCounters(),
        words=slots.view(torch.int32),
    )


class TableModel:
    """Args: device: where the tables lie. Attribute `trouble`: called with each forward's hidden states."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(5)
        table = torch.randn(TABLE, VOCAB, generator=generator) - 30
        common = 2 * torch.randn(NUM_LIKELY, generator=generator)
        table[:, :NUM_LIKELY] = common + torch.randn(TABLE, NUM_LIKELY, generator=generator)
        self.table = table.to(device)
        self.spec = ModelSpec(VOCAB, 1, 1, 0, NUM_DRAFTS, (), (), ())
        self.trouble: Callable[[Tensor], Any] = lambda hidden: None

    def forward(
        self, batch: Batch, caches: Any, want_features: bool = False, gate: Any = None
    ) -> ForwardOutput:
        slots = batch.state_slots.index_select(0, batch.row_seq)
        keys = (batch.input_ids * 31 + batch.positions * 7 + slots * 5) % TABLE
        caches.counters.query_rows += batch.num_rows
        self.trouble(keys)
        hidden = keys.index_select(0, batch.output_rows)[:, None].float()
        rows = torch.arange(batch.num_rows, device=keys.device)
        return ForwardOutput(hidden, keys[:, None].float(), rows) if want_features else ForwardOutput(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.table.index_select(0, hidden[:, 0].long())


class TableDrafter:
    """Its context is a word of the slot for each position."""

    block_size = NUM_DRAFTS
    context_size = 8

    def __init__(self, model: TableModel) -> None:
        self._table = model.table

    def context(self, features: Tensor, feature_rows: Any, batch: Batch) -> DraftContext:
        slots = batch.state_slots.index_select(0, batch.row_seq)
        return DraftContext(features, batch.positions, slots, batch.max_seqlen_k)

    def store_context(self, context: DraftContext, caches: Any) -> None:
        places = (context.state_slots.long(), context.positions.long() % RING)
        caches.words.index_put_(places, context.features[:, 0].int())

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        state_slots: Tensor,
        caches: Any,
        choose: Any,
        num_drafts: int,
    ) -> Proposal:
        before = caches.words[state_slots.long(), (positions.long() - 1) % RING]
        tokens, logits = [anchors], []
        for step in range(num_drafts):
            keys = (tokens[-1] * 11 + before + 3 * step) % TABLE
            rows = self._table.index_select(0, keys)
            logits.append(rows[:, 0].clone())
            tokens.append(choose(step, rows))
        return Proposal(torch.stack(tokens[1:], 1), torch.stack(logits, 1))


def make_runner(device: torch.device, *, is_queued: bool) -> tuple[ModelRunner, dict[str, Any]]:
    """A runner over the tables, and what its graphs are made of."""
    model = TableModel(device)
    parts = {
        "model": model,
        "drafter": TableDrafter(model),
        "caches": caches_on(device),
        "sampler": Sampler(VOCAB, banned_token_ids=(0, 5, 6), device=device, fused=is_queued),
        "confidence_scale": ConfidenceScale.of([1.0] * NUM_DRAFTS).to(device),
        "eos_token_id": EOS,
        "num_draft_tokens": NUM_DRAFTS,
        "max_num_seqs": NUM_SLOTS - 1,
    }
    runner = ModelRunner(**parts, ngram_vocab=None, is_queued=is_queued)
    return runner, parts


@dataclass
class Request:
    """A running sequence.

    Attributes:
        slot: its state slot.
        row: how its tokens are chosen.
        tokens: committed ones, prompt first.
        drafts: proposed behind them.
    """

    slot: int
    row: Row
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)


def requests(count: int) -> list[Request]:
    """Greedy, random and truncated ones."""
    styles = (
        Row(temperature=0.0),
        Row(temperature=1.0, seed=3),
        Row(temperature=0.8, top_p=0.9, seed=4),
        Row(temperature=1.1, top_k=7, min_p=0.02, seed=5),
    )
    return [Request(1 + n, styles[n % 4].with_(seed=n), [7 + n, 9 + n]) for n in range(count)]


def drive(
    executor: Any, device: torch.device, running: list[Request], num_steps: int, is_async: bool
) -> list[Any]:
    """Decode steps of all requests: the engine's loop. Returns what every step gave, as plain lists."""
    uploading = nullcontext if isinstance(executor, Executor) else executor.queue.launching
    given: list[Any] = []
    in_flight: Any = None

    def finish() -> None:
        result = in_flight.result()
        counts, first = result.num_emitted.tolist(), 0
        for place, request in enumerate(running):
            tokens = result.token_ids[first : first + counts[place]].tolist()
            first += len(rows_of[place])
            request.tokens += tokens
            request.drafts = result.drafts[place].tolist()
        given.append(
            (
                result.token_ids.tolist(),
                result.faults.tolist(),
                counts,
                result.drafts.tolist(),
                result.confidences.tolist(),
            )
        )
        assert result.device_ms >= 0

    rows_of: list[list[Row]] = []
    for _ in range(num_steps):
        is_known = in_flight is None
        drafts = [request.drafts if is_known else [0] * NUM_DRAFTS for request in running]
        most = [0] * len(running) if is_known else [len(rows) for rows in rows_of]  # that they may emit
        ends = [len(request.tokens) + count for request, count in zip(running, most, strict=True)]
        with uploading():
            batch = batch_of(running, drafts, ends, device)
            remap = None
            if not is_known:
                lens = np.array([len(request.tokens) for request in running], dtype=np.int32)
                remap = Remap(
                    upload_one(np.arange(len(running), dtype=np.int32), device),
                    upload_one(lens, device),
                    torch.zeros(len(running), 0, dtype=torch.int32, device=device),
                )
        executor.forward(batch, remap)
        if in_flight is not None:
            finish()
        rows_of = [
            [
                request.row.with_(index=len(request.tokens) + j, draft=draft)
                for j, draft in enumerate([*request.drafts, -1])
            ]
            for request in running
        ]
        with uploading():
            inputs = _inputs(rows_of, device)
        in_flight = executor.sample(inputs, len(running))
        if not is_async:
            finish()
            in_flight = None
    if in_flight is not None:
        finish()
    return given


def batch_of(running: list[Request], drafts: list[list[int]], ends: list[int], device: torch.device) -> Batch:
    """A decode batch: the newest token at position `end - 1`, then the drafts."""
    counts = [1 + len(each) for each in drafts]
    lens = [end + count - 1 for end, count in zip(ends, counts, strict=True)]
    num_seqs = len(running)
    width = -(-max(lens) // BLOCK_SIZE)
    arrays = {
        "input_ids": [t for r, each in zip(running, drafts, strict=True) for t in (r.tokens[-1], *each)],
        "positions": [end - 1 + j for end, count in zip(ends, counts, strict=True) for j in range(count)],
        "row_seq": [seq for seq, count in enumerate(counts) for _ in range(count)],
        "cu_seqlens_q": [0, *np.cumsum(counts).tolist()],
        "seqlens_k": lens,
        "state_slots": [request.slot for request in running],
        "total_lens": lens,
        "keep_all": [0] * num_seqs,
        "window_starts": [0] * num_seqs,
        "output_rows": range(sum(counts)),
    }
    host = {name: np.array(list(values), dtype=np.int32) for name, values in arrays.items()}
    host["ngram_ids"] = np.zeros((sum(counts), 0), dtype=np.int32)
    host["block_tables"] = np.ones((num_seqs, width), dtype=np.int32)
    return Batch(
        **{name: upload_one(array, device) for name, array in host.items()},
        max_seqlen_k=max(lens),
        is_prefill=False,
        planned=host,
    )


def _inputs(rows_of: list[list[Row]], device: torch.device) -> SamplingInputs:
    offsets = [0, *np.cumsum([len(rows) for rows in rows_of]).tolist()]
    inputs = make_inputs([row for rows in rows_of for row in rows], offsets)
    names = [name for name in SamplingInputs.__dataclass_fields__ if name not in ("host", "masks", "packed")]
    host = {name: getattr(inputs, name) for name in names}
    return SamplingInputs.from_host(host, {name: upload_one(t.numpy(), device) for name, t in host.items()})
