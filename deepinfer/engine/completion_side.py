"""The COMPLETION side of a hand-off: sequences come in, wait for room and decode on (hand_off.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from deepinfer.engine.executor import WatchedWork
from deepinfer.engine.hand_off import HandOff, unpack_logprobs
from deepinfer.engine.intake import Request
from deepinfer.engine.structured import StructuredRequests
from deepinfer.kv_transfer.connector import PeerGoneError
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.sequence_state import SequenceState
from deepinfer.sampling_params import SamplingParams


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
            logprobs=unpack_logprobs(state, "output"),
            prompt_logprobs=unpack_logprobs(state, "prompt"),
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
