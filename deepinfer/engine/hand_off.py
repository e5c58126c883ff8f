"""Hand-off: a PROMPT engine gives its sequences away behind their first token, a COMPLETION engine goes on.

    PROMPT       commit of the first token   the core ends the sequence, which keeps its blocks and slot
                 executor.run(read)          copies of both, behind all that writes to them
                 connector.send              then the core forgets it; without room over there it waits
    COMPLETION   connector.receive           core.add_computed: it waits for blocks and a slot
                 core.admit_computed         before a plan
                 executor.run(write)         behind the step in flight, in front of the plan

What waits on either side is bounded: by the pools of the one, by `max_num_seqs` on the other.

Each side tells the other which requests it has, so when one dies the other ends exactly those with an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.engine.assembly import OutputAssembler
from deepinfer.engine.executor import Executor, WatchedWork
from deepinfer.engine.intake import InvalidRequestError, Prompt, Request
from deepinfer.engine.results import RequestState, SampleState
from deepinfer.engine.structured import StructuredRequests
from deepinfer.kv_transfer.connector import KVConnector, PeerGoneError, TransferError, TransferTimeoutError
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.sequence_state import SequenceState, SequenceStateError
from deepinfer.outputs import ErrorKind, RequestError, RequestOutput
from deepinfer.runtime.sequence_bytes import SequenceBytes
from deepinfer.sampling_params import SamplingParams

_Copies = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows of blocks, a slot, scores of drafts

IDLE_WAIT_S = 0.02  # of a step that has nothing to do but to hand off


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
                nothing: Future[_Copies] = Future()
                no_bytes, no_scores = np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.float32)
                nothing.set_result((no_bytes, no_bytes.ravel(), no_scores))
                self._outbox[seq_id] = _Leaving(state, sample, nothing)
                continue
            self._outbox[seq_id] = _Leaving(state, sample, self._copy(state, sample))

    def after_interruption(self) -> None:
        """Nothing: what was to be sent keeps its blocks and its slot, as they are, until it is sent."""

    def when_idle(self) -> None:
        self._send(IDLE_WAIT_S)

    def _copy(self, state: RequestState, sample: SampleState) -> Future[_Copies]:
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
            extras |= _named("output", values)
        if request.params.prompt_logprobs is not None and leaving.sample.index == 0:
            top_ids, top_values = core.prompt_top_logprobs(seq_id)
            values = core.prompt_logprobs(seq_id), core.prompt_ranks(seq_id), top_ids, top_values
            extras |= _named("prompt", values)
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


class CompletionSide(HandOff):
    """Takes sequences over.

    Args:
        identity: `Identity.digest` of the engine.
        layout: of its caches.
        max_waiting: most sequences that wait for room here.
        structured: has their grammars built.
    """

    def __init__(
        self,
        *parts: Any,
        identity: bytes,
        layout: EntryLayout,
        max_waiting: int,
        structured: StructuredRequests,
    ) -> None:
        super().__init__(*parts)
        self._structured = structured
        self._identity = identity
        self._layout = layout
        self._max_waiting = max_waiting
        self._waiting: dict[int, SequenceState] = {}  # by sequence id
        self._writes = WatchedWork()
        self.is_peer_gone = False

    def note_ended(self, request_ids: Sequence[str]) -> None:
        self._connector.end(request_ids)

    def before_plan(self) -> None:
        self.receive(0.0)
        self._admit()

    def check(self) -> None:
        self._writes.check()

    def after_commit(self) -> None:
        """Nothing."""

    def after_interruption(self) -> None:
        """The core restarts whoever was to have these bytes."""
        self._writes.clear()

    def when_idle(self) -> None:
        """Nothing: the caller decides how long to wait for requests."""

    def receive(self, timeout_s: float) -> None:
        """Take what has been handed over, waiting for the first one."""
        while not self.is_peer_gone and self._num_waiting < self._max_waiting:
            try:
                state = self._connector.receive(timeout_s)
            except PeerGoneError:  # what it has sent is here, and goes on
                self.is_peer_gone = True
                for failure in {each.request_id: each for each in self._connector.take_failures()}.values():
                    self._assembler.drop([failure.request_id])  # completions of it that have come
                    self._fail(
                        failure.request_id, f"the prompt engine does not hand it over: {failure.reason}"
                    )
                return
            if state is None:
                return
            timeout_s = 0.0
            try:
                self._take(state)
            except (ValueError, TypeError, KeyError) as error:
                self._fail(state.request_id, f"this completion engine cannot go on with it: {error}")
                self._connector.end([state.request_id])

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + self._structured.num_waiting

    def _take(self, state: SequenceState) -> None:
        state.check(self._identity, self._layout)
        sampling, num_prompt = state.sampling, state.num_prompt
        has_ended = "finish_reason" in sampling
        if not has_ended and state.num_computed != len(state.token_ids) - 1:
            raise ValueError(f"{state.num_computed} of {len(state.token_ids)} tokens are computed")
        params = SamplingParams(**sampling["params"])
        request = Request(
            request_id=state.request_id,
            text=sampling["text"],
            token_ids=state.token_ids[:num_prompt].copy(),
            params=params,
            max_tokens=sampling["max_tokens"],
            seeds=tuple(sampling["seeds"]),
            is_ratio=sampling["is_ratio"],
            grammar=params.grammar,
            cache_salt=sampling["cache_salt"],
        )
        if request.grammar is None:
            self._resume(state, request)
        else:
            start = functools.partial(self._resume, state, request)
            self._structured.resume(request, sampling["index"], start)

    def _resume(self, state: SequenceState, request: Request) -> list[int]:
        """Queue a sequence; returns its id."""
        sampling, num_prompt = state.sampling, state.num_prompt
        end = {}
        if "finish_reason" in sampling:
            module = self._assembler.module
            end = {
                "finish_reason": module.FinishReason.__members__[sampling["finish_reason"]],
                "error_kind": module.ErrorKind.__members__[sampling.get("error_kind", "NONE")],
                "stop_token": sampling.get("stop_token", -1),
            }
        seq_id = self._assembler.resume(
            request,
            sampling["index"],
            **end,
            stream=sampling["stream"],
            arrival_time=sampling["arrival_time"],
            arrival=sampling["arrival"],
            tokens=state.token_ids,
            num_prompt=num_prompt,
            drafts=state.drafts,
            confidences=state.draft_confidences,
            logprobs=_arrays(state, "output"),
            prompt_logprobs=_arrays(state, "prompt"),
            first_scheduled=sampling["first_scheduled"],
            first_token=sampling["first_token"],
            num_preemptions=sampling["num_preemptions"],
            num_cached_tokens=sampling["num_cached_tokens"],
            num_drafted=sampling["num_drafted"],
        )
        if not end:
            self._waiting[seq_id] = state
        return [seq_id]

    def _admit(self) -> None:
        """Give room to whom there is room for."""
        if not self._waiting:
            return
        admitted = [
            (self._waiting.pop(seq_id), blocks, slot) for seq_id, blocks, slot in self._core.admit_computed()
        ]
        for state, blocks, slot in admitted:
            rows, scores = state.blocks[: len(blocks)], state.extras.get("draft_scores")
            self._writes.add(self._executor.run(self._pools.write, blocks, slot, rows, state.slot, scores))
            self.stats.num_sequences += 1
            self.stats.num_bytes += rows.nbytes + state.slot.nbytes
        self._writes.check()
        for seq_id in list(self._waiting):
            if not self._assembler.is_known(seq_id):  # aborted or dropped meanwhile
                del self._waiting[seq_id]


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
    copies: Future[_Copies]


_LOGPROB_ARRAYS = ("logprobs", "ranks", "top_ids", "top_logprobs")


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
        extras |= _named(side, (np.zeros(0, np.float32), np.zeros(0, np.int32), *tops))
    return extras


def _named(side: str, values: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    return {f"{side}_{name}": value for name, value in zip(_LOGPROB_ARRAYS, values, strict=True)}


def _arrays(state: SequenceState, side: str) -> tuple[np.ndarray, ...] | None:
    if f"{side}_logprobs" not in state.extras:
        return None
    return tuple(state.extras[f"{side}_{name}"] for name in _LOGPROB_ARRAYS)
