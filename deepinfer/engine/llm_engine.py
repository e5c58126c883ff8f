"""LLMEngine: requests in, steps, results out. One engine is one device and one model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from deepinfer import native
from deepinfer.checkpoint.loader import load_model, load_tokenizer, open_checkpoint
from deepinfer.config import CacheConfig, SchedulerConfig
from deepinfer.engine.arg_utils import BLOCK_SIZE, EngineArgs
from deepinfer.engine.assembly import OutputAssembler
from deepinfer.engine.intake import Intake, Prompt, Request
from deepinfer.engine.stats import EngineStats, StatsLogger
from deepinfer.models.base import ModelSpec
from deepinfer.outputs import RequestOutput
from deepinfer.runtime.batch_builder import BatchBuilder
from deepinfer.runtime.cache_layout import CacheLayout
from deepinfer.runtime.caches import Caches
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)


class LLMEngine:
    """Schedules requests, runs the model step by step and assembles their results.

    Use `from_engine_args`. Methods are not to be called from several threads at once, but for
    `abort_request`, which any thread may call.
    """

    def __init__(self, args: EngineArgs, settings: Settings) -> None:
        torch.manual_seed(args.seed)
        checkpoint = open_checkpoint(args.model, args.revision)
        config = checkpoint.config
        self.tokenizer = load_tokenizer(checkpoint, args.tokenizer, args.tokenizer_revision or args.revision)
        arithmetic = args.resolve_arithmetic(settings)
        model, _ = load_model(checkpoint, arithmetic, use_tqdm=sys.stderr.isatty())
        spec = model.spec
        num_drafts = 0
        self.scheduler_config = args.resolve_scheduler(config.max_position_embeddings, num_drafts)
        backtracking = max(settings.max_backtracking_tokens or 0, num_drafts + 1)
        layout = CacheLayout.build(
            spec,
            release=arithmetic.release_caches,
            block_size=BLOCK_SIZE,
            max_backtracking=backtracking,
        )
        self.cache_config = args.resolve_cache(
            self.scheduler_config, settings, layout.block_bytes, layout.slot_bytes, backtracking
        )
        device = torch.device("cpu")
        caches = Caches(layout, self.cache_config.num_blocks, self.cache_config.num_state_slots, device)
        sampler = Sampler(
            spec.vocab_size,
            banned_token_ids=self._banned_ids(settings, spec),
            force_top_k=settings.sampler_force_topk,
            logprobs_mode=args.logprobs_mode,
            device=device,
        )
        core = native.load_core()
        self.core = core.EngineCore(
            _core_config(core, args, settings, self.scheduler_config, self.cache_config, spec)
        )
        if spec.max_ngram:
            fold = self.tokenizer.compressed_vocab()
            self.core.set_compressed_vocab(fold.token_map, fold.pad_id)
        self.model_runner = ModelRunner(model, caches, sampler, BatchBuilder(self.core, device))
        self.stats = EngineStats()
        self._intake = Intake(self.tokenizer, spec.vocab_size, self.scheduler_config.max_model_len)
        self._assembler = OutputAssembler(core, self.core, self.tokenizer)
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
        self._assembler.add(request, stream=stream)

    def abort_request(self, request_ids: str | Iterable[str]) -> int:
        """End requests wherever they are; unknown or finished ids are ignored.

        Their results, with what they have so far and `finish_reason="abort"`, come from the next `step`.

        Returns:
            How many were unfinished.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return sum(self._assembler.abort(request_id) for request_id in ids)

    def drop_request(self, request_ids: Iterable[str]) -> None:
        """End requests without a result, as an interrupted caller needs it; unknown ids are ignored."""
        self._assembler.drop(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return self._assembler.num_requests > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose result has not been returned yet."""
        return self._assembler.num_requests

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            Results of the requests that ended, and the state of streaming requests with new tokens. They
            belong to the caller.
        """
        self.check_open()
        try:
            return self._step()
        except BaseException:  # an interrupt or a fault: forget the step, its sequences are recomputed
            self.core.discard_in_flight()
            self._assembler.note_interruption()
            raise

    def _step(self) -> list[RequestOutput]:
        stats, timers = self.stats, self.stats.timers
        with timers.timed("schedule"):
            plan = self.core.schedule()
            ended = self.core.take_ended()[0]
        if plan is None:
            return self._assembler.collect(ended)
        result = self.model_runner.run(plan, timers)
        with timers.timed("commit"):
            commit = self.core.commit(plan, **result.as_arrays())
            stats.add_step(plan, commit.num_tokens, len(commit.finished_ids))
            self._stats_logger.after_step(plan)
        with timers.timed("text"):
            return self._assembler.collect(ended, commit)

    def close(self) -> None:
        """Drop the model and its caches; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._assembler.drop_all()
        del self.model_runner

    def check_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("the engine is closed; make a new one")

    def _banned_ids(self, settings: Settings, spec: ModelSpec) -> list[int]:
        """Ids that are never sampled: what no text stands for, and the blacklist."""
        banned = {*self.tokenizer.undecodable_ids, *self.tokenizer.internal_ids}
        for first, last in settings.decode_token_blacklist:
            if last >= spec.vocab_size:
                raise ValueError(
                    f"DEEPINFER_DECODE_TOKEN_BLACKLIST names token {last}; the vocabulary ends at "
                    f"{spec.vocab_size - 1}"
                )
            banned.update(range(first, last + 1))
        return sorted(banned)


def _core_config(
    core: Any,
    args: EngineArgs,
    settings: Settings,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    spec: ModelSpec,
) -> Any:
    """The C++ core's configuration."""
    config = core.CoreConfig(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        vocab_size=spec.vocab_size,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        num_state_slots=cache.num_state_slots,
        chunked_prefill=scheduler.chunked_prefill,
        min_prefill_chunk=max(1, args.lookahead_tokens),
        max_prefill_tflops=scheduler.max_prefill_tflops,
        stop_preempted_request=scheduler.stop_preempted_request,
        num_draft_tokens=scheduler.num_draft_tokens,
        max_ngram=spec.max_ngram,
    )
    if settings.prefill_max_sum_seqlen_k is not None:
        config.max_sum_seqlen_k = settings.prefill_max_sum_seqlen_k
    return config
