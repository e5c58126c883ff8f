"""The PROMPT side of a hand-off: sequences leave behind their first token (hand_off.py).

Copies of what a sequence holds are queued when it ends; it is sent when they are there and the other side has
room, in the order of their ends, and keeps its blocks and its slot until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.engine.hand_off import HandOff, pack_logprobs
from deepinfer.engine.results import RequestState, SampleState
from deepinfer.kv_transfer.connector import TransferError, TransferTimeoutError
from deepinfer.kv_transfer.sequence_state import SequenceState, SequenceStateError
from deepinfer.outputs import ErrorKind, RequestError
from deepinfer.runtime.sequence_bytes import SequenceCopies
from deepinfer.sampling_params import SamplingParams

IDLE_WAIT_S = 0.02  # of a step that has nothing to do but to hand off


class PromptSide(HandOff):
    """Gives sequences away.

    Args:
        identity: `Identity.digest` of the engine.
    """

    def __init__(self, *parts: Any, identity: bytes) -> None:
        super().__init__(*parts)
        self._identity = identity
        self._outbox: dict[int, _Leaving] = {}  # by sequence id
        self._begun: dict[str, _Begun] = {}  # requests of which some completions are sent, others not

    def announce(self, request_id: str, num_completions: int) -> None:
        """A request has been queued."""
        self._connector.announce([request_id] * num_completions)

    def note_ended(self, request_ids: Sequence[str]) -> None:
        self._connector.withdraw(request_ids)

    def before_plan(self) -> None:
        self._send(0.0)
        for failure in {failure.request_id: failure for failure in self._connector.take_failures()}.values():
            begun = self._begun.pop(failure.request_id, None)
            if begun is not None:  # completions of it are still here
                self._assembler.drop([failure.request_id])
                missing = begun.state.request.params.n - len(begun.sent)
                self._connector.withdraw([failure.request_id] * missing)
            self._fail(failure.request_id, f"the completion engine does not go on with it: {failure.reason}")
        for request_id in self._dropped():
            self._send_missing(self._begun[request_id])

    def check(self) -> None:
        """Nothing: it writes to no caches."""

    def after_commit(self) -> None:
        """Queue copies of what is to be sent, before anything else is launched."""
        for state, sample in self._assembler.take_leaving():
            seq_id, core = sample.seq_id, self._core
            if seq_id in self._outbox:
                continue
            if core.finish_reason(seq_id).name != "HAND_OFF":
                # It has ended here, another one of its request not.
                nothing: Future[SequenceCopies] = Future()
                no_bytes, no_scores = np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.float32)
                nothing.set_result((no_bytes, no_bytes.ravel(), no_scores))
                self._outbox[seq_id] = _Leaving(state, sample, nothing)
                continue
            self._outbox[seq_id] = _Leaving(state, sample, self._copy(state, sample))

    def after_interruption(self) -> None:
        """Nothing: what was to be sent keeps its blocks and its slot, as they are, until it is sent."""

    def when_idle(self) -> None:
        self._send(IDLE_WAIT_S)

    def _copy(self, state: RequestState, sample: SampleState) -> Future[SequenceCopies]:
        """Queue copies of what an ended sequence holds."""
        core, seq_id = self._core, sample.seq_id
        is_scored = state.request.is_ratio and not state.request.params.is_greedy
        num_scores = len(core.drafts(seq_id)) if is_scored else 0
        return self._executor.run(
            self._pools.read, core.block_table(seq_id), core.state_slot(seq_id), num_scores
        )

    def _send(self, timeout_s: float) -> None:
        for seq_id, leaving in list(self._outbox.items()):
            if not self._assembler.is_known(seq_id):  # dropped
                del self._outbox[seq_id]
                continue
            if timeout_s == 0.0 and not leaving.copies.done():
                return
            if (failed := leaving.copies.exception()) is not None:  # the caches still hold it
                copies = self._copy(leaving.state, leaving.sample)
                self._outbox[seq_id] = dataclasses.replace(leaving, copies=copies)
                raise failed
            request = leaving.state.request
            begun = self._begun.get(request.request_id) or _Begun(leaving.state)
            try:
                record = self._record(leaving)
                self._connector.send(record, timeout_s)
                self.stats.num_sequences += record.slot.nbytes > 0
                self.stats.num_bytes += record.blocks.nbytes + record.slot.nbytes
            except TransferTimeoutError:
                return
            except (TransferError, SequenceStateError) as failure:
                self.stats.num_failed += 1
                message = f"request {request.request_id}: the completion engine cannot take it: {failure}"
                self._connector.withdraw([request.request_id] * (request.params.n - len(begun.sent)))
                error = RequestError(ErrorKind.TRANSFER.value, message)
                self._results.append(self._assembler.fail_leaving(leaving.state, error))
                self._begun.pop(request.request_id, None)
                del self._outbox[seq_id]
                continue
            begun.sent.add(leaving.sample.index)
            del self._outbox[seq_id]
            result = self._assembler.end_leaving(leaving.state, leaving.sample)
            if result is None:
                self._begun[request.request_id] = begun
            else:
                self._begun.pop(request.request_id, None)
                self._results.append(result)

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._dropped())

    def _dropped(self) -> list[str]:
        """Requests that were dropped here while the other side waits for more completions of them."""
        return [name for name in self._begun if not self._assembler.has_request(name)]

    def _send_missing(self, begun: _Begun) -> None:
        """A request was dropped when the other side had some of its completions: the others end there.

        What has no room over there is for the next step.
        """
        state = begun.state
        for index in set(range(state.request.params.n)) - begun.sent:
            record = SequenceState(
                identity=self._identity,
                request_id=state.request.request_id,
                num_prompt=len(state.request.token_ids),
                num_computed=0,
                token_ids=state.request.token_ids,
                drafts=np.zeros(0, np.int32),
                draft_confidences=np.zeros(0, np.float32),
                sampling=_sampling(state, index, None) | {"finish_reason": "ABORT"},
                blocks=np.zeros((0, 0), np.uint8),
                slot=np.zeros(0, np.uint8),
                extras=_no_logprobs(state.request.params, index),
            )
            with contextlib.suppress(TransferError):
                try:
                    self._connector.send(record, 0.0)
                except TransferTimeoutError:
                    return
            begun.sent.add(index)
        del self._begun[state.request.request_id]

    def _record(self, leaving: _Leaving) -> SequenceState:
        core, seq_id, request = self._core, leaving.sample.seq_id, leaving.state.request
        blocks, slot, scores = leaving.copies.result()
        sampling = _sampling(leaving.state, leaving.sample.index, core.metrics(seq_id))
        if slot.size == 0:
            sampling |= {
                "finish_reason": core.finish_reason(seq_id).name,
                "error_kind": core.error_kind(seq_id).name,
                "stop_token": core.stop_token(seq_id),
            }
        extras = {}
        if request.params.logprobs is not None:
            top_ids, top_values = core.top_logprobs(seq_id)
            values = core.logprobs(seq_id), core.ranks(seq_id), top_ids, top_values
            extras |= pack_logprobs("output", values)
        if request.params.prompt_logprobs is not None and leaving.sample.index == 0:
            top_ids, top_values = core.prompt_top_logprobs(seq_id)
            values = core.prompt_logprobs(seq_id), core.prompt_ranks(seq_id), top_ids, top_values
            extras |= pack_logprobs("prompt", values)
        if len(scores):
            extras["draft_scores"] = scores
        return SequenceState(
            identity=self._identity,
            request_id=request.request_id,
            num_prompt=core.num_prompt_tokens(seq_id),
            num_computed=core.num_computed_tokens(seq_id),
            token_ids=np.concatenate([core.prompt_token_ids(seq_id), core.output_token_ids(seq_id)]),
            drafts=core.drafts(seq_id),
            draft_confidences=core.confidences(seq_id),
            sampling=sampling,
            blocks=blocks,
            slot=slot,
            extras=extras,
        )


@dataclass
class _Begun:
    """A request of which some completions have been sent."""

    state: RequestState
    sent: set[int] = field(default_factory=set)  # their indices


@dataclass(frozen=True)
class _Leaving:
    """A sequence that waits to be sent."""

    state: RequestState
    sample: SampleState
    copies: Future[SequenceCopies]


def _plain_params(params: SamplingParams) -> dict[str, Any]:
    """The options that differ from their defaults, as values of JSON."""
    options = params.changed_fields()
    if (structured := options.get("structured_outputs")) is not None:
        given = {field.name: getattr(structured, field.name) for field in dataclasses.fields(structured)}
        options["structured_outputs"] = {name: value for name, value in given.items() if value is not None}
    return options


def _sampling(state: RequestState, index: int, metrics: Any) -> dict[str, Any]:
    """What fixes how the tokens of a completion are chosen, and its times so far; None: it has none."""
    request = state.request
    names = ("first_scheduled", "first_token", "num_preemptions", "num_cached_tokens", "num_drafted")
    return {
        "text": request.text,
        "params": _plain_params(request.params),
        "max_tokens": request.max_tokens,
        "index": index,
        "seeds": list(request.seeds),
        "is_ratio": request.is_ratio,
        "cache_salt": request.cache_salt,
        "stream": state.stream,
        "arrival_time": state.arrival_time,
        "arrival": -1.0 if metrics is None else metrics.arrival,
    } | {name: 0 if metrics is None else getattr(metrics, name) for name in names}


def _no_logprobs(params: SamplingParams, index: int) -> dict[str, np.ndarray]:
    """The arrays of a completion without a token."""
    extras: dict[str, np.ndarray] = {}
    for side, width in (("output", params.logprobs), ("prompt", params.prompt_logprobs)):
        if width is None or (side == "prompt" and index > 0):
            continue
        tops = np.zeros((0, width), np.int32), np.zeros((0, width), np.float32)
        extras |= pack_logprobs(side, (np.zeros(0, np.float32), np.zeros(0, np.int32), *tops))
    return extras
