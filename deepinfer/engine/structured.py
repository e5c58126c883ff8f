"""Structured requests: they wait for their grammars outside of the scheduler, then their rows follow them.

    submit ----> waiting ----> core, one SequenceGrammar for each completion ----> ended
                    |  a grammar that cannot be built ends the request, and only this one
                    +- aborted or dropped: what nobody else waits for is not built

It costs nothing before the first structured request.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.engine.assembly import OutputAssembler
from deepinfer.engine.intake import Request
from deepinfer.outputs import (
    CompletionOutput,
    ErrorKind,
    FinishReason,
    RequestError,
    RequestMetrics,
    RequestOutput,
)
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.settings import Settings
from deepinfer.structured_output.builder import BuildLimits, GrammarBuilder, GrammarError, Ticket
from deepinfer.structured_output.grammar import Vocabulary
from deepinfer.structured_output.matcher import SequenceMatcher
from deepinfer.structured_output.sequence import SequenceGrammar
from deepinfer.structured_output.step import GrammarRows, GrammarThread, StepGrammars, warm

IDLE_WAIT_S = 0.02  # of a step that has nothing to do but to wait for grammars


@dataclass
class _Waiting:
    """A request whose grammar is being built."""

    request: Request
    ticket: Ticket
    start: Callable[[], list[int]]  # queues its sequences; returns their ids
    index: int | None = None  # of the one completion that it is, when another engine has begun it
    arrival_time: float = field(default_factory=time.time)  # Unix seconds
    arrival: float = field(default_factory=time.monotonic)
    is_aborted: bool = False


class StructuredRequests:
    """The structured requests of one engine.

    Methods are for the engine's own thread, but for `abort`.

    Args:
        core: the engine's `EngineCore`.
        assembler: takes requests whose grammars are there.
        vocabulary: makes what the tokens stand for; called once, by another thread.
        vocab_size: columns of the logits.
        eos_token_id: of the checkpoint.
        special_ids: tokens that are no text.
        settings: limits of the builder.
    """

    def __init__(
        self,
        core: Any,
        assembler: OutputAssembler,
        vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        eos_token_id: int,
        special_ids: frozenset[int],
        settings: Settings,
    ) -> None:
        self._core = core
        self._assembler = assembler
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._special_ids = special_ids
        self.builder = GrammarBuilder(
            vocabulary,
            BuildLimits(
                num_processes=max(1, min(settings.grammar_processes, os.cpu_count() or 1)),
                timeout_s=settings.grammar_timeout_s,
                memory_bytes=settings.grammar_memory_bytes,
            ),
            cache_bytes=0 if settings.disable_grammar_cache else settings.grammar_cache_bytes or -1,
        )
        self.thread = GrammarThread()
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._sequences: dict[int, tuple[SequenceGrammar, str, int]] = {}  # with request and completion
        self._cold: set[int] = set()  # sequences that were in no step yet
        self._failures: dict[tuple[str, int], str] = {}  # why completions end that could not begin
        self._results: list[RequestOutput] = []

    @property
    def num_waiting(self) -> int:
        """Requests, or completions that another engine has begun, whose grammars are being built."""
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait, or ended waiting and have to be returned."""
        return len(self._waiting) + len(self._results)

    def check_id(self, request_id: str) -> None:
        """Raise ValueError when a request of this id waits."""
        if any(each.request.request_id == request_id for each in self._waiting):
            raise ValueError(f"request id {request_id!r} is still running: choose another")

    def submit(self, request: Request, *, stream: bool) -> None:
        """Take a request with a grammar.

        Raises:
            ValueError: as `OutputAssembler.add`, when the grammar is there already; the id is in use.
        """
        assert request.grammar is not None, f"{request=}"
        start = functools.partial(
            self._assembler.add, request, stream=stream, arrival_time=time.time(), arrival=time.monotonic()
        )
        self.check_id(request.request_id)
        self._assembler.check_id(request.request_id)
        self._submit(_Waiting(request, self.builder.request(request.grammar), start))

    def resume(self, request: Request, index: int, start: Callable[[], list[int]]) -> None:
        """Take a completion that another engine has begun.

        Args:
            start: hands it to the scheduler; returns its sequence's id. Called in any case: what ends it here
                is the end of this completion, its request may have others.
        """
        self._submit(_Waiting(request, self.builder.request(request.grammar), start, index))

    def _submit(self, waiting: _Waiting) -> None:
        if waiting.ticket.build is None:
            self._start(waiting)
        else:
            self._waiting.append(waiting)

    def _attach(self, seq_id: int, index: int, request: Request, grammar: Any) -> None:
        """From now on completion `index` of a request follows its compiled grammar."""
        params, spec = request.params, request.grammar
        eos = self._eos_token_id if params.eos_id is None else params.eos_id
        stops = [eos, *(token for token in params.stop_token_ids if token in self._special_ids - {eos})]
        trigger, bound = spec.trigger_token_ids, spec.bound_token_id
        self._sequences[seq_id] = (
            SequenceGrammar(
                lambda: SequenceMatcher(grammar, self._vocab_size, stops, trigger, bound),
                num_prompt=len(request.token_ids),
                stop_token_ids=stops,
                read_outputs=lambda: self._core.output_token_ids(seq_id),
                is_long=params.min_tokens > 0 or params.first_n_token_no_eos > 0,
            ),
            request.request_id,
            index,
        )
        self._cold.add(seq_id)

    def admit(self) -> None:
        """Hand requests whose grammars are there to the scheduler, and end those that have none."""
        for waiting in [each for each in self._waiting if each.ticket.done() or each.is_aborted]:
            with self._lock:  # `abort` finds it here or there
                self._waiting.remove(waiting)
                if waiting.is_aborted:
                    waiting.ticket.give_up()
                    self._end(waiting, FinishReason.ABORT)
                    continue
                try:
                    self._start(waiting)
                except (GrammarError, ValueError) as error:
                    is_grammar = isinstance(error, GrammarError)
                    kind = ErrorKind.GRAMMAR if is_grammar else ErrorKind.INVALID_REQUEST
                    self._end(waiting, FinishReason.ERROR, RequestError(kind.value, str(error)))

    def abort(self, request_id: str) -> bool:
        """End a request that waits; its result comes from the next step. Any thread may call this."""
        with self._lock:
            found = [
                each
                for each in self._waiting
                if each.request.request_id == request_id and not each.is_aborted
            ]
            for waiting in found:
                waiting.is_aborted = True
            return bool(found)

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget those requests that wait; returns them."""
        names = set(request_ids)
        found = [each for each in self._waiting if each.request.request_id in names]
        for waiting in found:
            self._waiting.remove(waiting)
            waiting.ticket.give_up()
        return sorted({each.request.request_id for each in found})

    def take_results(self) -> list[RequestOutput]:
        """Results of requests that ended while they waited."""
        results, self._results = self._results, []
        return results

    def warm(self, plan: Any) -> None:
        """Begin with sequences that are in a step for the first time, while its forward runs."""
        if not self._cold:
            return
        counts = zip(plan.seq_ids.tolist(), plan.num_sampled_rows.tolist())
        new = [seq_id for seq_id, count in counts if count and seq_id in self._cold]
        if not new:
            return
        self._cold.difference_update(new)
        outputs = [(self._sequences[seq_id][0], self._num_outputs(seq_id)) for seq_id in new]
        warm(self.thread, [(grammar, count) for grammar, count in outputs if count is not None])

    def step(self, plan: Any, inputs: SamplingInputs) -> StepGrammars | None:
        """The grammars of a step whose sampling parameters are known; None when it has none."""
        if not self._sequences:
            return None
        ids = plan.seq_ids.tolist()
        if not any(seq_id in self._sequences for seq_id in ids):
            return None
        ends = inputs.host["row_offsets"][1:].tolist()
        parts = []
        for place, (seq_id, end, count) in enumerate(zip(ids, ends, plan.num_sampled_rows.tolist())):
            if count == 0 or seq_id not in self._sequences:
                continue
            grammar = self._sequences[seq_id][0]
            num_outputs = int(inputs.host["token_index"][end - count]) - grammar.num_prompt
            is_forced = bool(np.any(inputs.host["forced"][end - count : end] >= 0))
            parts.append(GrammarRows(grammar, place, end - count, count, num_outputs, is_forced))
        return StepGrammars(self.thread, parts) if parts else None

    def end(self, outputs: Iterable[RequestOutput]) -> None:
        """Forget what belongs to sequences whose results are read; `outputs` learn what went wrong."""
        for seq_id in [seq_id for seq_id in self._sequences if not self._assembler.is_known(seq_id)]:
            grammar, name, index = self._sequences.pop(seq_id)
            self._cold.discard(seq_id)
            if grammar.failure is not None:
                self._failures[name, index] = grammar.failure
        if not self._failures:
            return
        for output in outputs:
            for sample in output.outputs:
                failure = self._failures.get((output.request_id, sample.index))
                if failure and sample.error is not None and sample.error.kind == ErrorKind.GRAMMAR:
                    sample.error = RequestError(sample.error.kind, failure)
        for name, index in list(self._failures):  # a request ends with its last completion
            if not self._assembler.has_request(name):
                del self._failures[name, index]

    def reset(self) -> None:
        """A step was interrupted: everything is made again from the committed tokens."""
        self.thread.settle()
        for grammar, *_ in self._sequences.values():
            grammar.forget()
        self._cold.clear()

    def wait(self) -> None:
        """A step had nothing to launch: give the builder a moment."""
        self.builder.wait(IDLE_WAIT_S)

    def close(self) -> None:
        """End the builder and all that waits for it."""
        for waiting in self._waiting:
            waiting.ticket.give_up()
        self._waiting.clear()
        self.builder.close()
        self.thread.close()

    def _start(self, waiting: _Waiting) -> None:
        grammar = waiting.ticket.result()
        for index, seq_id in enumerate(waiting.start(), start=waiting.index or 0):
            self._attach(seq_id, index, waiting.request, grammar)

    def _num_outputs(self, seq_id: int) -> int | None:
        try:
            return self._core.num_output_tokens(seq_id)
        except KeyError:
            return None

    def _end(self, waiting: _Waiting, reason: FinishReason, error: RequestError | None = None) -> None:
        request = waiting.request
        if waiting.index is not None:
            for seq_id in waiting.start():
                if error is None:
                    self._assembler.abort(request.request_id)
                else:
                    self._assembler.fail(seq_id)
                    self._failures[request.request_id, waiting.index] = error.message
            return
        self._results.append(
            RequestOutput(
                request_id=request.request_id,
                prompt=request.text,
                prompt_token_ids=request.token_ids.tolist(),
                outputs=[
                    CompletionOutput(index=index, finish_reason=reason.value, error=error)
                    for index in range(request.params.n)
                ],
                finished=True,
                metrics=RequestMetrics(
                    arrival_time=waiting.arrival_time, total_ms=1e3 * (time.monotonic() - waiting.arrival)
                ),
            )
        )
