"""Hand-off: a PROMPT engine gives its sequences away behind their first token, a COMPLETION engine goes on.

    PROMPT       commit of the first token   the core ends the sequence, which keeps its blocks and slot
                 executor.run(read)          copies of both, behind all that writes to them
                 connector.send              then the core forgets it; without room over there it waits
    COMPLETION   connector.receive           core.add_computed: it waits for blocks and a slot
                 core.admit_computed         before a plan
                 executor.run(write)         behind the step in flight, in front of the plan

What waits on either side is bounded: by the pools of the one, by `max_num_seqs` on the other.

Each side tells the other which requests it has, so when one dies the other ends exactly those with an error.

The two sides are prompt_side.py and completion_side.py; here is what they have in common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.engine.assembly import OutputAssembler
from deepinfer.engine.executor import Executor
from deepinfer.engine.intake import InvalidRequestError, Prompt
from deepinfer.kv_transfer.connector import KVConnector
from deepinfer.kv_transfer.sequence_state import SequenceState
from deepinfer.outputs import ErrorKind, RequestOutput
from deepinfer.runtime.sequence_bytes import SequenceBytes


@dataclass
class HandOffStats:
    """Totals since the start.

    Attributes:
        num_sequences: sequences that were handed off, or taken over.
        num_bytes: of their blocks and slots.
        num_failed: requests that were refused, or were the other side's when it went away.
    """

    num_sequences: int = 0
    num_bytes: int = 0
    num_failed: int = 0


class HandOff(ABC):
    """One engine's end of a hand-off."""

    def __init__(
        self,
        core: Any,
        executor: Executor,
        pools: SequenceBytes,
        assembler: OutputAssembler,
        connector: KVConnector,
    ) -> None:
        self.stats = HandOffStats()
        self._core = core
        self._executor = executor
        self._pools = pools
        self._assembler = assembler
        self._connector = connector
        self._results: list[RequestOutput] = []

    @abstractmethod
    def before_plan(self) -> None:
        """What has to happen before a step is planned."""

    @abstractmethod
    def check(self) -> None:
        """Raise what a copy into the caches has raised. Call before the commit of a step."""

    @abstractmethod
    def after_commit(self) -> None:
        """What has to happen before anything else is launched."""

    @abstractmethod
    def after_interruption(self) -> None:
        """A step ended early, and the core has discarded what was in flight."""

    @abstractmethod
    def when_idle(self) -> None:
        """A step had nothing to launch and nothing to commit."""

    @abstractmethod
    def note_ended(self, request_ids: Sequence[str]) -> None:
        """Requests have ended on this side."""

    def note_results(self, outputs: Iterable[RequestOutput]) -> None:
        """`note_ended` for those that are final."""
        if ended := [output.request_id for output in outputs if output.finished for _ in output.outputs]:
            self.note_ended(ended)

    @property
    def has_work(self) -> bool:
        """Whether a step is needed though no request is left."""
        return bool(self._results)

    def take_results(self) -> list[RequestOutput]:
        """Results of requests that the hand-off itself has ended."""
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Tell the other side."""
        self._connector.close()

    def _fail(self, request_id: str, reason: str) -> None:
        self.stats.num_failed += 1
        error = InvalidRequestError(ErrorKind.TRANSFER.value, f"request {request_id}: {reason}")
        self._results.append(error.as_output(request_id, Prompt(None, None)))


# Log-probabilities among the further arrays of a `SequenceState`: "output_ranks", "prompt_top_ids", ...
_LOGPROB_ARRAYS = ("logprobs", "ranks", "top_ids", "top_logprobs")


def pack_logprobs(side: str, values: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Values, ranks, top ids and top values of "output" or "prompt" tokens, by name."""
    return {f"{side}_{name}": value for name, value in zip(_LOGPROB_ARRAYS, values, strict=True)}


def unpack_logprobs(state: SequenceState, side: str) -> tuple[np.ndarray, ...] | None:
    """What `pack_logprobs` was given; None when there are none."""
    if f"{side}_logprobs" not in state.extras:
        return None
    return tuple(state.extras[f"{side}_{name}"] for name in _LOGPROB_ARRAYS)
