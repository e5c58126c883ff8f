"""Assembly: from the core's finished sequences to the results that callers own.

Only requests with stop strings, or whose caller streams, cost host work while they run; the others are looked
at once, when they end.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.checkpoint.detokenizer import Detokenizer
from deepinfer.engine.intake import Request
from deepinfer.engine.results import RequestState, ResultReader, SampleState
from deepinfer.outputs import FinishReason, RequestError, RequestOutput

if TYPE_CHECKING:
    from deepinfer.checkpoint.tokenizer import Tokenizer


class OutputAssembler:
    """Submits requests' sequences to the core and turns what comes back into `RequestOutput`s.

    Args:
        module: the `_core` module.
        core: its `EngineCore`.
        tokenizer: turns tokens into text.
        is_prompt_side: sequences may end to be handed off.
    """

    def __init__(
        self, module: ModuleType, core: Any, tokenizer: Tokenizer, is_prompt_side: bool = False
    ) -> None:
        self.module = module
        self._is_prompt_side = is_prompt_side
        self._core = core
        self._hand_off = module.FinishReason.HAND_OFF
        self._eos_token_id = tokenizer.eos_token_id
        self._reader = ResultReader(core, tokenizer)
        self._states: dict[str, RequestState] = {}
        self._owners: dict[int, tuple[RequestState, SampleState]] = {}
        self._aborted: deque[int] = deque()  # sequences whose end `collect` has not seen; any thread appends
        self._is_behind = False  # a step was interrupted: `collect` has to look at every sequence
        self._leaving: list[tuple[RequestState, SampleState]] = []  # to be handed off

    @property
    def num_requests(self) -> int:
        """Requests whose result has not been returned."""
        return len(self._states)

    def check_id(self, request_id: str) -> None:
        """Raise ValueError when a request of this id has not ended."""
        if request_id in self._states:
            raise ValueError(f"request id {request_id!r} is still running: choose another")

    def add(
        self,
        request: Request,
        *,
        stream: bool,
        arrival_time: float | None = None,
        arrival: float | None = None,
    ) -> list[int]:
        """Queue a request's sequences; returns their ids.

        Args:
            arrival_time: of the request, Unix seconds; now when None.
            arrival: the same, monotonic seconds.

        Raises:
            ValueError: the id is in use, or the core says that it can never fit; nothing was queued.
        """
        self.check_id(request.request_id)
        state = RequestState(request, stream, time.time() if arrival_time is None else arrival_time)
        params = [self._sequence_params(request, index, stream) for index in range(request.params.n)]
        for each in params:
            each.arrival_time = arrival
        seq_ids: list[int] = []
        try:
            # One call, so that no interrupt falls between a sequence's start and the keeping of its id.
            seq_ids.extend(map(self._core.add, params, itertools.repeat(request.token_ids)))
            for index, seq_id in enumerate(seq_ids):
                state.samples.append(SampleState(index, seq_id, self._live_detokenizer(state)))
            self._states[request.request_id] = state
            self._owners.update((sample.seq_id, (state, sample)) for sample in state.samples)
        except BaseException:
            self._states.pop(request.request_id, None)
            self._forget(seq_ids)
            raise
        return seq_ids

    def resume(
        self,
        request: Request,
        index: int,
        *,
        stream: bool,
        arrival_time: float,
        arrival: float,
        **computed: Any,
    ) -> int:
        """Queue a completion that another engine has begun, or read one that has ended there; returns its id.

        Args:
            index: of the completion; a request's completions come in any order.
            arrival_time: of the request, Unix seconds.
            arrival: the same, monotonic seconds.
            computed: further arguments of `EngineCore.add_computed`.

        Raises:
            ValueError: as `add`, or its parts contradict each other.
        """
        state = self._states.get(request.request_id) or RequestState(request, stream, arrival_time)
        if len(state.samples) == request.params.n or any(index == each.index for each in state.samples):
            self.check_id(request.request_id)
        params = self._sequence_params(request, index, stream)
        params.arrival_time = arrival
        seq_id = self._core.add_computed(params, **computed)
        sample = SampleState(index, seq_id, self._live_detokenizer(state))
        if sample.detokenizer is not None:  # what ended it over there ends it here
            self._append_text(sample, sample.detokenizer, self._core.output_token_ids(seq_id).tolist())
        state.samples.append(sample)
        state.samples.sort(key=lambda each: each.index)
        self._states[request.request_id] = state
        self._owners[seq_id] = state, sample
        if state.is_aborted:
            self._abort(seq_id)
        if self._core.status(seq_id) == self.module.SequenceStatus.FINISHED:
            self._aborted.append(seq_id)
        return seq_id

    def take_leaving(self) -> list[tuple[RequestState, SampleState]]:
        """Sequences that ended to be handed off, each until `end_leaving`."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def end_leaving(self, state: RequestState, sample: SampleState) -> RequestOutput | None:
        """A completion was handed off; with the last one of its request the result."""
        self._reader.end(state, sample)
        sample.output.finish_reason, sample.output.error = FinishReason.HANDED_OFF.value, None
        self._owners.pop(sample.seq_id, None)
        if not state.is_complete:
            return None
        self._states.pop(state.request.request_id, None)
        return self._reader.result(state)

    def fail_leaving(self, state: RequestState, error: RequestError) -> RequestOutput:
        """The result of a request whose completions cannot be handed off."""
        for sample in state.samples:
            if sample.output is None:
                self._abort(sample.seq_id)
                self._reader.end(state, sample)
                self._owners.pop(sample.seq_id, None)
            sample.output.finish_reason, sample.output.error = FinishReason.ERROR.value, error
        self._states.pop(state.request.request_id, None)
        return self._reader.result(state)

    def has_request(self, request_id: str) -> bool:
        """Whether a result of this request is due."""
        return request_id in self._states

    def is_known(self, seq_id: int) -> bool:
        """Whether a result of this sequence is due."""
        return seq_id in self._owners

    def abort(self, request_id: str) -> bool:
        """End a request; its result, with what it has so far, comes from the next `collect`.

        Any thread may call this.

        Returns:
            False when nothing of such a request runs.
        """
        state = self._states.get(request_id)
        was_running = False
        if state is not None:
            state.is_aborted = True
            was_running = len(state.samples) < state.request.params.n
        for sample in state.samples if state is not None else ():
            if sample.output is None and self._abort(sample.seq_id):
                self._aborted.append(sample.seq_id)
                was_running = True
        return was_running

    def fail(self, seq_id: int) -> None:
        """End a completion because its grammar cannot be had."""
        if self._core.fail(seq_id, self.module.ErrorKind.GRAMMAR):
            self._aborted.append(seq_id)

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """End requests without a result; unknown ids are ignored.

        Returns:
            The others, once for each completion; not where some completions have been handed off.
        """
        dropped = []
        for request_id in list(request_ids):
            state = self._states.get(request_id)
            if state is not None:
                self._forget([sample.seq_id for sample in state.samples])
                self._states.pop(request_id, None)
                is_begun = self._is_prompt_side and any(sample.output for sample in state.samples)
                dropped += [] if is_begun else [request_id] * len(state.samples)
        return dropped

    def drop_all(self) -> None:
        """End every request without a result."""
        self.drop(self._states)

    def note_interruption(self) -> None:
        """A step ended early: the next `collect` catches up on what it left unread."""
        self._is_behind = True

    def collect(self, ended: np.ndarray, commit: Any = None) -> list[RequestOutput]:
        """Results of a step.

        Args:
            ended: [n] sequences that the scheduler itself ended.
            commit: the step's `_core.CommitResult`, None when no step ran.

        Returns:
            Requests that ended, in no particular order, and streaming requests with new tokens.
        """
        finished = [self._aborted.popleft() for _ in range(len(self._aborted))]
        finished += ended.tolist()
        touched: dict[str, RequestState] = {}
        if self._is_behind:
            finished += self._catch_up()
        elif commit is not None and commit.text_ids.size:
            finished += self._read_text(commit, touched)
        if commit is not None:
            finished += commit.finished_ids.tolist()
        results = []
        for seq_id in finished:
            owner = self._owners.pop(seq_id, None)
            if owner is None:  # dropped, or named twice
                continue
            state, sample = owner
            if sample.output is None and self._leaves(state):
                self._owners[seq_id] = owner
                continue
            if sample.output is None and not self._is_prompt_side:
                self._reader.end(state, sample)
            elif sample.output is None:  # all of a prompt engine's request have ended
                for each in state.samples:
                    self._reader.end(state, each)
                    self._owners.pop(each.seq_id, None)
            if state.is_complete:
                touched.pop(state.request.request_id, None)
                results.append(self._reader.result(state))
                del self._states[state.request.request_id]
        results += [self._reader.result(state) for state in touched.values()]
        return results

    def _leaves(self, state: RequestState) -> bool:
        """Whether an ended sequence stays until it is handed off, or until it is known whether it is.

        If one completion of a request goes on elsewhere, those that have ended here go there as well.
        """
        if not self._is_prompt_side:
            return False
        ended = {
            sample.seq_id: sample
            for sample in state.samples
            if sample.output is None
            and self._core.status(sample.seq_id) == self.module.SequenceStatus.FINISHED
        }
        if any(self._core.finish_reason(each) == self._hand_off for each in ended):
            state.is_leaving = True
        if state.is_leaving:
            self._leaving += [(state, sample) for sample in ended.values()]  # some of them once more
        return state.is_leaving or len(ended) < len(state.samples)

    def _read_text(self, commit: Any, touched: dict[str, RequestState]) -> list[int]:
        """Feed new tokens to the detokenizers; returns the sequences that a stop string ended."""
        stopped = []
        offsets = commit.text_offsets
        for place, seq_id in enumerate(commit.text_ids.tolist()):
            owner = self._owners.get(seq_id)
            if owner is None:
                continue
            state, sample = owner
            if state.stream:
                touched[state.request.request_id] = state
            if sample.detokenizer is None:
                continue
            tokens = commit.text_tokens[offsets[place] : offsets[place + 1]].tolist()
            if self._append_text(sample, sample.detokenizer, tokens):
                stopped.append(seq_id)
        return stopped

    def _append_text(self, sample: SampleState, text: Detokenizer, tokens: list[int]) -> bool:
        """Feed a sample's tokens to its detokenizer; True when a stop string ended the sequence."""
        hit = text.append(tokens, ends_with_stop_token=self._core.stop_token(sample.seq_id) >= 0)
        if hit is None:
            return False
        sample.stop_string = hit.stop
        self._core.stop(sample.seq_id, hit.num_tokens)
        return True

    def _catch_up(self) -> list[int]:
        """Make up for interrupted steps, which may have left any statement undone.

        Texts are read again from their first token.

        Returns:
            Sequences that have ended.
        """
        ended = []
        for state in self._states.values():
            self._forget([sample.seq_id for sample in state.samples if sample.output is not None])
            unread = [sample for sample in state.samples if sample.output is None]
            for sample in unread:
                self._owners[sample.seq_id] = (state, sample)
                sample.detokenizer = self._live_detokenizer(state)
                if sample.detokenizer is not None:
                    tokens = self._core.output_token_ids(sample.seq_id).tolist()
                    self._append_text(sample, sample.detokenizer, tokens)
                if self._core.status(sample.seq_id) == self.module.SequenceStatus.FINISHED:
                    ended.append(sample.seq_id)
            if state.is_complete:  # only the result is missing
                sample = state.samples[0]
                self._owners[sample.seq_id] = (state, sample)
                ended.append(sample.seq_id)
        self._is_behind = False
        return ended

    def _live_detokenizer(self, state: RequestState) -> Detokenizer | None:
        """For a completion whose text is read while it grows; None for the others."""
        params = state.request.params
        reads_text = params.detokenize and (state.stream or bool(params.stop))
        return self._reader.detokenizer(params) if reads_text else None

    def _sequence_params(self, request: Request, index: int, stream: bool) -> Any:
        """What the core knows of one completion."""
        params = request.params
        bias = params.logit_bias
        return self.module.SequenceParams(
            max_tokens=request.max_tokens,
            min_tokens=params.min_tokens,
            first_n_token_no_eos=params.first_n_token_no_eos,
            ignore_eos=params.ignore_eos,
            eos_token_id=self._eos_token_id if params.eos_id is None else params.eos_id,
            stop_token_ids=list(params.stop_token_ids),
            seed=request.seeds[index],
            is_ratio=request.is_ratio,
            inv_temperature=0.0
            if params.is_greedy
            else float(np.float32(1.0) / np.float32(params.temperature)),
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias_tokens=[token for token, _ in bias],
            bias_values=[value for _, value in bias],
            allowed_token_ids=list(params.allowed_token_ids or ()),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None or index else params.prompt_logprobs,
            golden_token_ids=list(params.golden_token_ids),
            needs_text=stream or bool(params.stop),
            content_keys=_content_keys(request),
        )

    def _abort(self, seq_id: int) -> bool:
        """Whether this call ended the sequence; one that is gone has ended before."""
        try:
            return self._core.abort(seq_id)
        except KeyError:
            return False

    def _forget(self, seq_ids: Iterable[int]) -> None:
        """Take sequences out of the core, in whatever state an interrupt left them."""
        for seq_id in seq_ids:
            self._abort(seq_id)
            with contextlib.suppress(KeyError):
                self._core.release(seq_id)
            self._owners.pop(seq_id, None)


def _content_keys(request: Request) -> list[tuple[int, int, bytes]]:
    """What the prompt's tokens stand for beyond their ids: (first token, number of tokens, key)."""
    if request.cache_salt is None:
        return []
    return [(0, 1, b"cache_salt:" + request.cache_salt.encode())]  # all else is behind the first token
