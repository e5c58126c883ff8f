"""LLMEngine: requests in, steps, results out. One engine is one device and one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.arrivals import ArrivalGate
from deepinfer.engine.assembly import OutputAssembler
from deepinfer.engine.completion_side import CompletionSide
from deepinfer.engine.emulation import Emulation
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.executor import Executor
from deepinfer.engine.hand_off import HandOffStats
from deepinfer.engine.intake import Intake, Prompt, Request
from deepinfer.engine.parts import build_parts
from deepinfer.engine.prefix_exchange import PrefixExchange
from deepinfer.engine.prompt_side import PromptSide
from deepinfer.engine.stats import EngineStats, StatsLogger, draft_reliability
from deepinfer.engine.stream_executor import QueuedResult, StreamExecutor
from deepinfer.engine.structured import StructuredRequests
from deepinfer.engine.summary import StatsSummary
from deepinfer.engine.swap import HostSwap, measure_copy_rate
from deepinfer.kv_transfer.connector import KVConnector
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.outputs import RequestOutput
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.sequence_bytes import SequenceBytes
from deepinfer.runtime.step_output import StepResult
from deepinfer.sampling.calibration import ReliabilityBin
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.structured_output.builder import GrammarBuilder


class LLMEngine:
    """Schedules requests, runs the model step by step and assembles their results.

    Use `from_engine_args`. Methods are not to be called from several threads at once, but for
    `abort_request`, which any thread may call.
    """

    def __init__(self, args: EngineArgs, settings: Settings) -> None:
        parts = build_parts(args, settings)
        self.tokenizer = parts.tokenizer
        self.scheduler_config = parts.scheduler_config
        self.cache_config = parts.cache_config
        self.memory_plan = parts.memory_plan
        self.core = parts.core
        self.vocab_size = parts.spec.vocab_size  # columns of the logits
        self.model_config = parts.model_config
        self.cache_counters = parts.caches.counters  # records that forwards have read and written
        self.model_runner = parts.runner
        self.stats = EngineStats(parts.scheduler_config.num_draft_tokens)
        self._builder = parts.builder
        self._executor: Executor | StreamExecutor = (
            Executor(parts.runner, use_thread=parts.use_async)
            if parts.queue is None
            else StreamExecutor(parts.runner, parts.queue)
        )
        self._exchange = None
        if parts.prefixes is not None:
            self._exchange = PrefixExchange(
                parts.core, self._executor, parts.caches, parts.prefixes, parts.owns_store
            )
        self.engine_type = args.engine_type
        self._identity = parts.identity
        self._pools = SequenceBytes(parts.caches, parts.runner.draft_scores)
        self._swap: HostSwap | None = None
        if parts.swap_bytes > 0:
            self._swap = HostSwap(parts.core, self._executor, self._pools)
            parts.core.set_copy_rate(measure_copy_rate(self._pools))
        self._hand_off: PromptSide | CompletionSide | None = None
        self._is_async = parts.use_async
        self._use_draft_budget = parts.use_draft_budget
        self._in_flight: _InFlight | None = None
        self._results: list[RequestOutput] = []  # of this step, or of one that was interrupted behind them
        self._intake = Intake(
            self.tokenizer, parts.spec.vocab_size, self.scheduler_config.max_model_len, args.verification
        )
        is_prompt_side = args.engine_type is EngineType.PROMPT
        self._assembler = OutputAssembler(parts.core_module, self.core, self.tokenizer, is_prompt_side)
        self.emulation: Emulation | None = None
        if parts.pretended is not None:
            rank = self.core, self._executor, self._assembler, self._intake, parts.pretended
            self.emulation = Emulation(*rank, parts.scheduler_config.num_draft_tokens)
        self._structured = StructuredRequests(
            self.core,
            self._assembler,
            parts.vocabulary,
            vocab_size=parts.spec.vocab_size,
            eos_token_id=self.tokenizer.eos_token_id,
            special_ids=frozenset(self.tokenizer.all_special_ids),
            settings=settings,
        )
        interval = 0 if args.disable_log_stats else settings.logging_interval_steps
        self._stats_logger = StatsLogger(self.stats, interval)
        self._is_closed = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs, settings: Settings | None = None) -> LLMEngine:
        """Load the model and make an engine.

        Args:
            args: what to run and how.
            settings: read from the environment when None.
        """
        return cls(args, Settings.from_env() if settings is None else settings)

    def connect(self, connect: Callable[[bytes, EntryLayout], KVConnector]) -> None:
        """Join a PROMPT engine with a COMPLETION engine.

        Args:
            connect: makes this side's connector for an identity and a layout, and waits for the other side:
                `functools.partial(SharedMemoryConnector.connect, path)` or a listener's `accept`. The
                connector is closed with the engine.

        Raises:
            TransferError: nobody answers, or it is another model's engine.
        """
        self.check_open()
        if self._identity is None or self._hand_off is not None:
            raise ValueError("connect a PROMPT or COMPLETION engine, and once")
        identity, layout = self._identity[0].digest(), self._identity[1]
        parts = self.core, self._executor, self._pools, self._assembler, connect(identity, layout)
        if self.engine_type is EngineType.PROMPT:
            self._hand_off = PromptSide(*parts, identity=identity)
        else:
            self._hand_off = CompletionSide(
                *parts,
                identity=identity,
                layout=layout,
                max_waiting=self.scheduler_config.max_num_seqs,
                structured=self._structured,
            )

    def wait_for_requests(self, timeout_s: float) -> bool:
        """In a COMPLETION engine: take what was handed over, waiting for the first.

        Returns:
            False when nothing more can come, because the other side is gone.
        """
        assert isinstance(self._hand_off, CompletionSide), "connect a COMPLETION engine"
        self._hand_off.receive(timeout_s)
        return not self._hand_off.is_peer_gone

    @property
    def hand_off_stats(self) -> HandOffStats:
        """What was handed off, or taken over."""
        return HandOffStats() if self._hand_off is None else self._hand_off.stats

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int] | dict[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> None:
        """Queue a request.

        Args:
            request_id: names the request in results; must not be one that is still running.
            prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            sampling_params: `SamplingParams()` when None.
            stream: `step` also returns its unfinished state whenever it got new tokens.

        Raises:
            InvalidRequestError: (a ValueError) when the request cannot run; nothing was queued.
        """
        self.submit(self.check_request(request_id, Prompt.of(prompt), sampling_params), stream=stream)

    def check_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None
    ) -> Request:
        """Find everything that is wrong with a request, without queueing it.

        Raises:
            InvalidRequestError: naming what was given and what would work.
        """
        return self._intake.check(request_id, prompt, sampling_params)

    def submit(self, request: Request, *, stream: bool = False) -> None:
        """Queue a checked request.

        Raises:
            ValueError: the id is in use, or the request can never fit into the cache.
        """
        self.check_open()
        if self.engine_type is EngineType.COMPLETION:
            raise RuntimeError("a COMPLETION engine takes its requests from a PROMPT engine")
        if self.engine_type is EngineType.PROMPT and self._hand_off is None:
            raise RuntimeError("connect the PROMPT engine with a COMPLETION engine first")
        if request.grammar is not None:
            self._structured.submit(request, stream=stream)
        else:
            self._structured.check_id(request.request_id)
            self._assembler.add(request, stream=stream)
        if isinstance(self._hand_off, PromptSide):
            self._hand_off.announce(request.request_id, request.params.n)

    def abort_request(self, request_ids: str | Iterable[str]) -> int:
        """End requests wherever they are; unknown or finished ids are ignored.

        Their results, with what they have so far and `finish_reason="abort"`, come from the next `step`.

        Returns:
            How many were unfinished.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        # A request whose grammar comes meanwhile has gone from the one to the other.
        return sum(self._structured.abort(name) or self._assembler.abort(name) for name in ids)

    def drop_request(self, request_ids: Iterable[str]) -> None:
        """End requests without a result, as an interrupted caller needs it; unknown ids are ignored."""
        request_ids = set(request_ids)
        self._results = [output for output in self._results if output.request_id not in request_ids]
        dropped = self._assembler.drop(request_ids)
        dropped += self._structured.drop(request_ids)
        if self._hand_off is not None:
            self._hand_off.note_ended(dropped)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to return."""
        if self._hand_off is not None and self._hand_off.has_work:
            return True
        return self.get_num_unfinished_requests() > 0 or bool(self._results)

    def get_num_unfinished_requests(self) -> int:
        """Requests whose result has not been returned yet; some may wait for their grammars."""
        return self._assembler.num_requests + self._structured.num_unfinished

    @property
    def grammar_builder(self) -> GrammarBuilder:
        """Builds the grammars of structured requests; its `stats` count them."""
        return self._structured.builder

    def so_builder_has_pending(self) -> bool:
        """Whether a request waits for its grammar."""
        return self._structured.num_waiting > 0

    def step(self) -> list[RequestOutput]:
        """Run one step.

        With asynchronous scheduling the step that this call launches is committed by the next call, under
        whose forward that host work hides; see doc/async.md.

        In a PROMPT engine a request that is handed off ends with `finish_reason="handed_off"`; if the other
        side does not take it after all, or goes away before it has ended it, a later step returns another
        result of it, with the error. A COMPLETION engine returns errors for requests that the other side had
        when it went away.

        Returns:
            Results of the requests that ended, and the state of streaming requests with new tokens. They
            belong to the caller.
        """
        self.check_open()
        try:
            self._step()
        except BaseException:  # an interrupt or a fault: forget what runs, its sequences are recomputed
            self._in_flight = None
            try:
                self._executor.drain()
            finally:  # also when a second interrupt comes: what runs still ends before what is launched next
                self.core.discard_in_flight()
                if self._swap is not None:
                    self._swap.after_interruption()
                if self._hand_off is not None:
                    self._hand_off.after_interruption()
                if self._exchange is not None:
                    self._exchange.discard()
                self._assembler.note_interruption()
                self._structured.reset()
            raise
        outputs, self._results = self._results, []
        self._structured.end(outputs)
        outputs += self._structured.take_results()
        if self._hand_off is not None:
            self._hand_off.note_results(outputs)
            outputs += self._hand_off.take_results()
        self.stats.add_results(outputs)
        return outputs

    def get_stats(self) -> StatsSummary:
        """Everything that was counted since the engine started; `print` shows it as a report."""
        self.check_open()
        return StatsSummary.of(
            self.stats,
            self.core,
            runner=self.model_runner,
            executor=self._executor,
            swap=self._swap,
            grammars=self._structured.thread,
            reliability=self.draft_reliability(),
        )

    def draft_reliability(self) -> list[list[ReliabilityBin]]:
        """How the drafter's confidences compare with what came true, by position; see `stats`."""
        return draft_reliability(self.core)

    def settle(self) -> None:
        """Commit the step in flight when no request is left, so that every block and slot is free."""
        if self._in_flight is not None and not self.has_unfinished_requests():
            self.step()

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes, as when weights have changed.

        Returns:
            False, and nothing changes, while a request is unfinished.
        """
        self.check_open()
        if self.has_unfinished_requests():
            return False
        self.settle()
        if self._exchange is not None:
            self._exchange.reset()
        return self.core.reset_prefix_cache()

    @property
    def kv_store(self) -> PrefixExchange | None:
        """The connection with the KV store; None when there is none."""
        return self._exchange

    def prefix_cache_stats(self) -> Any:
        """`_core.PrefixCacheStats`: hits and evictions since the start, and what is kept."""
        return self.core.prefix_cache_stats()

    def _copy_swapped(self) -> None:
        """Copy what was preempted before anybody writes to its blocks."""
        if self._swap is not None:
            with self.stats.timers.timed("swap"):
                self._swap.copy_out()

    def _step(self) -> None:
        timers, structured = self.stats.timers, self._structured
        self._copy_swapped()
        with timers.timed("grammar"):
            structured.admit()
        if self._exchange is not None:
            with timers.timed("store"):
                self._exchange.fetch()
        if self._hand_off is not None:
            with timers.timed("transfer"):
                self._hand_off.before_plan()
        if self._swap is not None:
            with timers.timed("swap"):
                self._swap.copy_in()
        with timers.timed("schedule"):
            plan = self.core.schedule()
            self.stats.num_overlapped_steps += plan is not None and self._in_flight is not None
            ended = self.core.take_ended()[0]
        self._copy_swapped()
        if plan is not None:
            with timers.timed("build"):
                inputs_of_forward = self._builder.batch(plan)
            with timers.timed("grammar"):
                structured.warm(plan)
            gate = None if self._exchange is None else self._exchange.gate(inputs_of_forward[2])
            dealt_rows = self._executor.forward(*inputs_of_forward, gate)
        elif self._exchange is not None:
            self._exchange.fill()
        # The step before: its outcome is needed before this one's sampling parameters are known.
        self._results += self._finish(ended)
        if plan is None:
            if self._in_flight is None:
                self._executor.pause()
                if structured.num_waiting and not self._results:
                    structured.wait()
                if self._hand_off is not None and not self._results:
                    self._hand_off.when_idle()
            return
        if plan.can_redistribute:
            with timers.timed("wait"):
                seqlens_q = dealt_rows.result()  # known since the forward began
            self.core.set_seqlens_q(plan, seqlens_q)
        with timers.timed("build"):
            inputs = self._builder.sampling(plan)
        with timers.timed("grammar"):
            grammars = structured.step(plan, inputs)
        if inputs.host["is_ratio"].any():
            idle = self._idle_slots(inputs_of_forward[0], gate)
            self._executor.run_beside(self.model_runner.draft_scores.release, idle)
        sampled = self._executor.sample(inputs, plan.num_drafting, grammars)
        self._in_flight = _InFlight(plan, sampled, gate)
        if not self._is_async:
            self._results += self._finish(_NOTHING)

    def _idle_slots(self, batch: Batch, gate: ArrivalGate | None) -> list[int]:
        """State slots whose drafts nobody tests any more: free ones, and those that the step in flight fills
        with snapshots, forks and prefixes."""
        slots = [0, *self.core.free_slots().tolist()]  # 0 belongs to nobody; steps that are measured use it
        if "state_copies" in batch.planned:
            slots += batch.planned["state_copies"][:, 1].tolist()
        if gate is not None:
            slots += [arrival.slot for arrival in gate.arrivals]
        return slots

    def _finish(self, ended: np.ndarray) -> list[RequestOutput]:
        """Commit the step in flight, if there is one; results of what ended."""
        timers, step = self.stats.timers, self._in_flight
        if step is None:
            outputs = self._assembler.collect(ended)
            if self._hand_off is not None:  # what an interrupted step has left
                self._hand_off.after_commit()
            return outputs
        with timers.timed("wait"):
            result = step.result.result()
        if self._exchange is not None and step.gate is not None:
            self._exchange.settle(step.gate)
        if self._swap is not None:
            self._swap.check()
        if self._hand_off is not None:
            self._hand_off.check()
        with timers.timed("commit"):
            commit = self.core.commit(step.plan, **result.as_arrays())
            plan = step.plan
            proposes_for_some = 0 < plan.num_drafting < plan.num_seqs  # of such steps nothing is known
            if self._use_draft_budget and not plan.is_prefill and not proposes_for_some:
                self.core.add_step_time(
                    plan.num_seqs, plan.num_rows, result.device_ms, plan.num_drafting > 0, commit.num_tokens
                )
            if self._swap is not None:
                self.core.add_prefill_time(step.plan, result.device_ms)
        self._in_flight = None
        self._copy_swapped()
        if self._exchange is not None:
            with timers.timed("store"):
                self._exchange.keep()
        self.stats.add_step(step.plan, commit)
        self._stats_logger.after_step(step.plan)
        with timers.timed("text"):
            outputs = self._assembler.collect(ended, commit)
        if self._hand_off is not None:
            with timers.timed("transfer"):
                self._hand_off.after_commit()
        return outputs

    def close(self) -> None:
        """Drop the model and its caches; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._executor.drain()
        self._executor.close()
        if self._exchange is not None:
            self._exchange.close()
        if self._hand_off is not None:
            self._hand_off.close()
        self._structured.close()
        if self._swap is not None:
            self._swap.close()
        self._in_flight = None
        self.core.discard_in_flight()
        self._assembler.drop_all()
        del self.model_runner, self._executor

    def check_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("the engine is closed; make a new one")


_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _InFlight:
    """A launched step."""

    plan: Any  # _core.StepPlan
    result: Future[StepResult] | QueuedResult[StepResult]
    gate: ArrivalGate | None  # what came into the pools under its forward
