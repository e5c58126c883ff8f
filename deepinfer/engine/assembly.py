"""Assembly: from the core's finished sequences to the results that callers own.

Only requests with stop strings, or whose caller streams, cost host work while they run; the others are looked
at once, when they end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.engine.intake import Request
from deepinfer.engine.results import RequestState, ResultReader, SampleState
from deepinfer.outputs import RequestOutput

if TYPE_CHECKING:
    from deepinfer.checkpoint.tokenizer import Tokenizer


class OutputAssembler:
    """Submits requests' sequences to the core and turns what comes back into `RequestOutput`s.

    Args:
        module: the `_core` module.
        core: its `EngineCore`.
        tokenizer: turns tokens into text.
    """

    def __init__(self, module: ModuleType, core: Any, tokenizer: Tokenizer) -> None:
        self._module = module
        self._core = core
        self._eos_token_id = tokenizer.eos_token_id
        self._reader = ResultReader(core, tokenizer)
        self._states: dict[str, RequestState] = {}
        self._owners: dict[int, tuple[RequestState, SampleState]] = {}
        self._aborted: list[int] = []  # sequences whose end `collect` has not seen

    @property
    def num_requests(self) -> int:
        """Requests whose result has not been returned."""
        return len(self._states)

    def add(self, request: Request, *, stream: bool) -> None:
        """Queue a request's sequences.

        Raises:
            ValueError: the id is in use, or the core says that it can never fit; nothing was queued.
        """
        if request.request_id in self._states:
            raise ValueError(f"request id {request.request_id!r} is still running: choose another")
        state = RequestState(request, stream, time.time())
        params = request.params
        reads_text = params.detokenize and (stream or bool(params.stop))
        try:
            for index in range(params.n):
                seq_id = self._core.add(self._sequence_params(request, index, stream), request.token_ids)
                text = self._reader.detokenizer(params) if reads_text else None
                state.samples.append(SampleState(index, seq_id, text))
        except ValueError:
            self._forget(state)
            raise
        self._states[request.request_id] = state
        for sample in state.samples:
            self._owners[sample.seq_id] = (state, sample)

    def abort(self, request_id: str) -> bool:
        """End a request; its result, with what it has so far, comes from the next `collect`.

        Returns:
            False when no such request runs.
        """
        state = self._states.get(request_id)
        if state is None:
            return False
        for sample in state.samples:
            if sample.output is None and self._core.abort(sample.seq_id):
                self._aborted.append(sample.seq_id)
        return True

    def drop(self, request_ids: Iterable[str]) -> None:
        """End requests without a result; unknown ids are ignored."""
        for request_id in list(request_ids):
            state = self._states.pop(request_id, None)
            if state is not None:
                self._forget(state)

    def drop_all(self) -> None:
        """End every request without a result."""
        self.drop(self._states)

    def collect(self, ended: np.ndarray, commit: Any = None) -> list[RequestOutput]:
        """Results of a step.

        Args:
            ended: [n] sequences that the scheduler itself ended.
            commit: the step's `_core.CommitResult`, None when no step ran.

        Returns:
            Requests that ended, in no particular order, and streaming requests with new tokens.
        """
        aborted, self._aborted = self._aborted, []
        finished = [*aborted, *ended.tolist()]
        touched: dict[str, RequestState] = {}
        if commit is not None:
            finished += commit.finished_ids.tolist()
            if commit.text_ids.size:
                finished += self._read_text(commit, set(finished), touched)
        results = []
        for seq_id in finished:
            owner = self._owners.pop(seq_id, None)
            if owner is None:  # dropped, or named twice
                continue
            state, sample = owner
            self._reader.end(state, sample)
            if all(each.output is not None for each in state.samples):
                del self._states[state.request.request_id]
                touched.pop(state.request.request_id, None)
                results.append(self._reader.result(state))
        results += [self._reader.result(state) for state in touched.values()]
        return results

    def _read_text(self, commit: Any, finished: set[int], touched: dict[str, RequestState]) -> list[int]:
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
            ends = seq_id in finished and self._core.stop_token(seq_id) >= 0
            hit = sample.detokenizer.append(tokens, ends_with_stop_token=ends)
            if hit is not None:
                sample.stop_string = hit.stop
                self._core.stop(seq_id, hit.num_tokens)
                stopped.append(seq_id)
        return stopped

    def _sequence_params(self, request: Request, index: int, stream: bool) -> Any:
        """What the core knows of one completion."""
        params = request.params
        bias = params.logit_bias
        return self._module.SequenceParams(
            max_tokens=request.max_tokens,
            min_tokens=params.min_tokens,
            first_n_token_no_eos=params.first_n_token_no_eos,
            ignore_eos=params.ignore_eos,
            eos_token_id=self._eos_token_id if params.eos_id is None else params.eos_id,
            stop_token_ids=list(params.stop_token_ids),
            seed=request.seeds[index],
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
        )

    def _forget(self, state: RequestState) -> None:
        """Take a request's sequences out of the core."""
        for sample in state.samples:
            if sample.output is None:
                self._core.abort(sample.seq_id)
                self._core.release(sample.seq_id)
                self._owners.pop(sample.seq_id, None)
