"""What became of drafts: runs requests at full verify length and records each block with its outcome.

Calibration needs the drafter's raw confidence logits beside the number of drafts that stood, and outcomes
that no confidence has selected. So the steps run one after the other, every draft at hand is verified, and a
block has as many known outcomes as drafts were verified up to a drafted end of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.engine.assembly import OutputAssembler
from deepinfer.engine.intake import Request
from deepinfer.engine.parts import EngineParts
from deepinfer.platform.base import DeviceQueue
from deepinfer.runtime.step_output import StepResult
from deepinfer.sampling.calibration import Blocks


@dataclass(frozen=True)
class RecordedBlocks:
    """N blocks and where they come from.

    Attributes:
        sources: [N] int64 sequence ids from a `BlockRecorder`, places of the requests from `record_blocks`.
    """

    blocks: Blocks
    sources: np.ndarray


class BlockRecorder:
    """Joins the blocks that one step proposes to what the next step of the same sequence finds.

    Args:
        eos_token_id: a draft that ends its sequence. What lies behind it has an outcome only if something was
            refused, so it counts in no case: the outcome would select.
    """

    def __init__(self, eos_token_id: int) -> None:
        self._eos_token_id = eos_token_id
        # sequence -> [k] logits and drafts of the block that it verifies next
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._seq_ids: list[int] = []
        self._logits: list[np.ndarray] = []
        self._accepted: list[int] = []
        self._observed: list[int] = []

    @property
    def num_blocks(self) -> int:
        return len(self._logits)

    def add_step(self, plan: Any, result: StepResult, commit: Any) -> None:
        """Take in a committed step.

        Args:
            plan: the `_core.StepPlan`.
            result: what the runner decided, with `confidence_logits`.
            commit: the `_core.CommitResult`.
        """
        assert result.confidence_logits is not None, "the runner has to keep the confidence logits"
        seq_ids = plan.seq_ids.tolist()
        if not plan.is_prefill:
            num_verified = (plan.seqlens_q - 1).tolist()
            for place, seq_id in enumerate(seq_ids):
                block = self._open.pop(seq_id, None)
                if block is None:
                    continue
                logits, drafts = block
                emitted, kept = int(result.num_emitted[place]), int(commit.num_new_tokens[place])
                # Fewer tokens kept than emitted: an accepted draft ended the sequence.
                known = num_verified[place] if kept == emitted else min(num_verified[place], kept)
                ends = np.flatnonzero(drafts[:known] == self._eos_token_id)
                known = int(ends[0]) + 1 if ends.size else known
                if known > 0:
                    self._seq_ids.append(seq_id)
                    self._logits.append(logits)
                    self._observed.append(known)
                    self._accepted.append(min(emitted - 1, known))
        for place in np.flatnonzero(plan.num_sampled_rows).tolist():
            self._open[seq_ids[place]] = result.confidence_logits[place], result.drafts[place]
        for seq_id in commit.finished_ids.tolist():
            self._open.pop(seq_id, None)

    def recorded(self, num_positions: int) -> RecordedBlocks:
        """All blocks that were verified so far."""
        logits = np.array(self._logits, dtype=np.float64).reshape(-1, num_positions)
        blocks = Blocks(logits, np.array(self._accepted, np.int64), np.array(self._observed, np.int64))
        return RecordedBlocks(blocks, np.array(self._seq_ids, np.int64))


def record_blocks(
    parts: EngineParts, requests: Iterable[Request], progress: Callable[[int], None] | None = None
) -> RecordedBlocks:
    """Run requests to their end.

    Args:
        parts: an engine's parts with synchronous steps, fixed verify lengths and a drafter.
        requests: checked requests of one completion each.
        progress: called after each step with the number of blocks so far.

    Returns:
        The blocks, and for each the place of its request among `requests`.
    """
    core, runner, builder = parts.core, parts.runner, parts.builder
    num_positions = parts.scheduler_config.num_draft_tokens
    assert num_positions > 0 and not parts.use_async, f"{num_positions=} {parts.use_async=}"
    assembler = OutputAssembler(parts.core_module, core, parts.tokenizer)
    place_of: dict[int, int] = {}
    for place, request in enumerate(requests):
        place_of.update((seq_id, place) for seq_id in assembler.add(request, stream=False))
    recorder = BlockRecorder(parts.tokenizer.eos_token_id)
    runner.keeps_confidence_logits = True
    while assembler.num_requests:
        plan = core.schedule()
        ended = core.take_ended()[0]
        if plan is None:
            assembler.collect(ended)
            continue
        inputs = builder.batch(plan), builder.sampling(plan)
        with _awaited(parts.queue):
            runner.prepare(*inputs[0])
            runner.forward()
            result = runner.sample(inputs[1]).fetch()
        commit = core.commit(plan, **result.as_arrays())
        recorder.add_step(plan, result, commit)
        assembler.collect(ended, commit)
        if progress is not None:
            progress(recorder.num_blocks)
    recorded = recorder.recorded(num_positions)
    places = [place_of[seq_id] for seq_id in recorded.sources.tolist()]
    return RecordedBlocks(recorded.blocks, np.array(places, np.int64))


@contextmanager
def _awaited(queue: DeviceQueue | None) -> Iterator[None]:
    """Inside, work goes to a device's queue, and waiting for it is meant."""
    if queue is None:
        yield
        return
    with queue.launching(), queue.waiting():
        yield
