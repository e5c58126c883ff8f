"""Parts: what an engine is made of, built from its arguments and settings in order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer import __version__, native
from deepinfer.checkpoint.loader import (
    Checkpoint,
    load_dummy,
    load_model,
    load_tokenizer,
    open_checkpoint,
    open_dummy,
)
from deepinfer.checkpoint.token_text import TokenTable
from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.config import Arithmetic, CacheConfig, ReplayConfig, SchedulerConfig
from deepinfer.engine.arg_utils import BLOCK_SIZE, EngineArgs
from deepinfer.engine.decode_graphs import build_graphs, graph_sizes
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.kv_identity import hand_off_identity, kv_identity, prefix_salt
from deepinfer.engine.memory_plan import MemoryPlan, plan_caches, plan_fixed
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.keys import Identity
from deepinfer.kv_transfer.prefix import PrefixStore
from deepinfer.models.base import ModelSpec
from deepinfer.ops import cpu
from deepinfer.ops.external_kernels import use_external_kernels
from deepinfer.platform import open_device
from deepinfer.platform.base import DeviceQueue
from deepinfer.runtime.async_batch import NgramVocab
from deepinfer.runtime.batch_builder import BatchBuilder
from deepinfer.runtime.cache_layout import CacheLayout
from deepinfer.runtime.caches import Caches, default_score_bytes
from deepinfer.runtime.memory import held_bytes
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.random_caches import fill_with_random_records
from deepinfer.runtime.step_time import StepTimeCache, StepTimes, measure, sizes_to_measure
from deepinfer.runtime.synthetic_step import SyntheticSteps
from deepinfer.sampling.confidence import resolve_confidence_scale
from deepinfer.sampling.sampler import Sampler
from deepinfer.settings import Settings
from deepinfer.structured_output.grammar import Vocabulary
from deepinfer.utils.logging import get_logger
from deepinfer.utils.timer import QueueTimers
from tilelang_ops.common.kernels import use_library
from tilelang_ops.common.row_codes import UNIT

logger = get_logger(__name__)

# Tokens that each request has when the time of decode steps is measured.
CONTEXT_TOKENS = 128  # what longer contexts add is learnt while serving


@dataclass(frozen=True)
class EngineParts:
    """One engine's parts.

    Attributes:
        model_config: the model's own, of the checkpoint or of an emulated rank.
        core_module: the `_core` module.
        core: its `EngineCore`, which decides who runs.
        caches: the pools that the runner reads and writes.
        runner: the device's work.
        builder: turns the core's plans into the runner's inputs.
        queue: the device's, if it works through one by itself.
        memory_plan: what was allocated, and why.
        identity: who can go on with this engine's sequences, and how their bytes lie, if anybody is to.
        vocabulary: makes what tokens stand for, for grammars.
        prefixes: the KV store as this engine uses it, if there is one.
        owns_store: the store is closed with the engine.
        swap_bytes: host memory for preempted sequences, 0 when they are recomputed.
        pretended: the model if it has random weights: it can leave out prefills.
    """

    tokenizer: Tokenizer
    spec: ModelSpec
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    memory_plan: MemoryPlan
    model_config: Any
    core_module: Any
    core: Any
    caches: Caches
    runner: ModelRunner
    builder: BatchBuilder
    queue: DeviceQueue | None
    use_async: bool
    use_draft_budget: bool
    identity: tuple[Identity, EntryLayout] | None
    prefixes: PrefixStore | None
    owns_store: bool
    vocabulary: Callable[[], Vocabulary]
    swap_bytes: int
    pretended: Any


def build_parts(args: EngineArgs, settings: Settings) -> EngineParts:
    """Load the checkpoint and allocate everything a step needs.

    Raises:
        CheckpointError: when the checkpoint is not what its config says.
        ValueError: when arguments or settings contradict each other or the model.
    """
    torch.manual_seed(args.seed)
    device, queue = open_device(settings)
    use_library(_kernel_library(settings))
    use_external_kernels(settings.external_kernels, device)
    if args.is_dummy:
        checkpoint = open_dummy(args.model, args.revision, *args.emulated_rank)
    else:
        checkpoint = open_checkpoint(args.model, args.revision)
    tokenizer = load_tokenizer(checkpoint, args.tokenizer, args.tokenizer_revision or args.revision)
    arithmetic = args.resolve_arithmetic(
        settings, device.type, multiplies_codes=_multiplies_codes(device, checkpoint)
    )
    use_async = args.resolve_async(settings)
    num_drafts = settings.num_draft_tokens if checkpoint.config.num_nextn_predict_layers else 0
    load: dict[str, Any] = {"with_drafter": num_drafts > 0, "use_tqdm": sys.stderr.isatty(), "device": device}
    if args.is_dummy:
        model, drafter = load_dummy(checkpoint, arithmetic, seed=args.seed, **load)
    else:
        load["tables_on_host"] = not settings.engram_on_device
        model, drafter = load_model(checkpoint, arithmetic, **load)
    score_bytes = settings.index_score_bytes or default_score_bytes(device.type)
    spec = dataclasses.replace(model.spec, scratch_bytes=score_bytes)
    if num_drafts > spec.draft_block_size:
        raise ValueError(
            f"DEEPINFER_USE_NEXTN_DECODE={num_drafts}: this drafter was trained for blocks of "
            f"{spec.draft_block_size} tokens; choose 0 to {spec.draft_block_size}"
        )
    scheduler = args.resolve_scheduler(settings, checkpoint.config.max_position_embeddings, num_drafts)
    block = spec.draft_block_size if num_drafts else 0  # the drafter's block is computed whole
    backtracking = max(settings.max_backtracking_tokens or 0, block + 1)
    layout = CacheLayout.build(
        spec, release=arithmetic.release_caches, block_size=BLOCK_SIZE, max_backtracking=backtracking
    )
    replay = args.resolve_replay(settings, spec, backtracking)
    itemsize = getattr(torch, arithmetic.compute_dtype).itemsize
    swap_bytes = args.resolve_swap_bytes()
    device_bytes = _device_bytes(device)
    weights = held_bytes(model, drafter, device=device)
    sizes = None  # of captured steps
    if queue is not None and not settings.enforce_eager and args.engine_type != EngineType.PROMPT:
        sizes = graph_sizes(settings, scheduler, drafter is not None)
    fixed = plan_fixed(spec, scheduler, weights, itemsize, swap_bytes, device.type, sizes)
    cache = args.resolve_cache(
        scheduler,
        settings,
        layout.block_bytes,
        layout.slot_bytes,
        backtracking,
        used_bytes=MemoryPlan(None, fixed, device.type != "cpu").num_bytes,
        device_bytes=device_bytes,
    )
    model.reserve(scheduler.max_model_len + 1 + spec.draft_block_size)
    items = (*fixed, *plan_caches(layout, cache, scheduler))
    memory_plan = MemoryPlan(args.memory_limit(device_bytes), items, device.type != "cpu")
    logger.info("memory plan\n%s", memory_plan.text())
    core_module = native.load_core()
    core = core_module.EngineCore(
        _core_config(
            core_module,
            args,
            settings,
            scheduler,
            cache,
            replay,
            checkpoint,
            spec,
            use_async,
            layout,
            swap_bytes,
            prefix_salt(checkpoint, arithmetic),
        )
    )
    ngram_vocab = None
    if spec.max_ngram:
        own = load_tokenizer(checkpoint) if args.tokenizer else tokenizer  # the model's, whoever encodes
        fold = own.compressed_vocab()
        core.set_compressed_vocab(fold.token_map, fold.pad_id)
        is_barrier = torch.zeros(spec.vocab_size, dtype=torch.bool)
        is_barrier[checkpoint.config.image_token_id] = True
        ngram_vocab = NgramVocab(
            torch.from_numpy(fold.token_map).to(device), is_barrier.to(device), fold.pad_id
        )
    banned_ids = _banned_ids(tokenizer, settings, spec)
    caches = Caches(layout, cache.num_blocks, cache.num_state_slots, device)
    caches.score_bytes = score_bytes
    if args.is_dummy:
        fill_with_random_records(caches, args.seed)
        logger.info("emulated\n%s", checkpoint.share.describe(checkpoint.config))
    sampler = Sampler(
        spec.vocab_size,
        banned_token_ids=banned_ids,
        force_top_k=settings.sampler_force_topk,
        logprobs_mode=args.logprobs_mode,
        device=device,
        fused=queue is not None,
    )
    confidence_scale = resolve_confidence_scale(
        num_drafts,
        environment=settings.confidence_temperatures,
        calibration_file=args.calibration_file,
        checkpoint=checkpoint.config.dspark_sts_temperatures,
    ).to(device)
    runner = ModelRunner(
        model,
        drafter,
        caches,
        sampler,
        num_draft_tokens=num_drafts,
        max_num_seqs=scheduler.max_num_seqs,
        confidence_scale=confidence_scale,
        eos_token_id=tokenizer.eos_token_id,
        ngram_vocab=ngram_vocab,
        is_queued=queue is not None,
    )
    if queue is not None:
        queue.drain()  # weights and pools were not made by its launches
        runner.timers = QueueTimers(queue.mark)
        if sizes is not None:
            runner.graphs = build_graphs(
                sizes,
                queue,
                model,
                drafter,
                caches,
                sampler,
                scheduler,
                confidence_scale,
                tokenizer.eos_token_id,
            )
    store, owns_store = args.resolve_kv_store()
    prefixes = identity = None
    if store is not None or args.engine_type != EngineType.NORMAL:
        identity = kv_identity(checkpoint, arithmetic, layout, spec, with_drafter=num_drafts > 0)
        prefixes = None if store is None else PrefixStore(store, *identity)
        identity = hand_off_identity(identity[0], replay), identity[1]
    use_draft_budget = settings.use_draft_budget and num_drafts > 0
    if use_draft_budget:
        key = _step_time_key(checkpoint, arithmetic, scheduler, device, settings)
        times = _step_times(key, settings, runner, caches, scheduler, spec, queue)
        core.set_step_times(*times.for_core())
    return EngineParts(
        tokenizer=tokenizer,
        spec=spec,
        scheduler_config=scheduler,
        cache_config=cache,
        memory_plan=memory_plan,
        model_config=checkpoint.config,
        core_module=core_module,
        core=core,
        caches=caches,
        runner=runner,
        builder=BatchBuilder(core, device, replay.mode, queue),
        queue=queue,
        use_async=use_async,
        use_draft_budget=use_draft_budget,
        identity=identity,
        prefixes=prefixes,
        owns_store=owns_store,
        vocabulary=functools.partial(_vocabulary, tokenizer, spec.vocab_size, banned_ids),
        swap_bytes=swap_bytes,
        pretended=model if args.is_dummy else None,
    )


def _vocabulary(tokenizer: Tokenizer, size: int, banned_ids: list[int]) -> Vocabulary:
    """What tokens stand for; those that are never sampled for nothing."""
    tokens = TokenTable(tokenizer.backend).token_bytes()
    for token_id in banned_ids:
        if token_id < len(tokens):
            tokens[token_id] = b""
    return Vocabulary(tokens, size, tokenizer.eos_token_id)


def _device_name(device: torch.device) -> str:
    return device.type if device.type == "cpu" else torch.cuda.get_device_name(device)


def _step_time_key(
    checkpoint: Checkpoint,
    arithmetic: Arithmetic,
    scheduler: SchedulerConfig,
    device: torch.device,
    settings: Settings,
) -> dict[str, Any]:
    """What the time of a step depends on."""
    config = repr(checkpoint.config).encode()
    return {
        "model": str(checkpoint.path.resolve()),
        "config": hashlib.sha256(config).hexdigest(),
        "arithmetic": dataclasses.asdict(arithmetic),
        "device": _device_name(device),
        "eager": settings.enforce_eager,
        "machine": platform.machine(),
        "threads": (torch.get_num_threads(), cpu.context().num_threads),
        "versions": (__version__, torch.__version__),
        "num_draft_tokens": scheduler.num_draft_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
    }


def _step_times(
    key: dict[str, Any],
    settings: Settings,
    runner: ModelRunner,
    caches: Caches,
    scheduler: SchedulerConfig,
    spec: ModelSpec,
    queue: DeviceQueue | None,
) -> StepTimes:
    """The curve of step times: what an earlier start has kept, else measured now."""
    directory = settings.step_time_dir
    kept = StepTimeCache(directory, settings.step_time_max_age) if directory else None
    times = kept.read(key) if kept is not None else None
    if times is None:
        sizes = sizes_to_measure(scheduler.max_num_seqs, scheduler.num_draft_tokens)
        context = max(1, min(CONTEXT_TOKENS, scheduler.max_model_len - scheduler.num_draft_tokens - 1))
        steps = SyntheticSteps(runner, caches, spec.max_ngram, context, spec.vocab_size)
        with contextlib.ExitStack() as stack:
            if queue is not None:
                stack.enter_context(queue.launching())
                stack.enter_context(queue.waiting())
            times = measure(steps, sizes)
        runner.reset()
        if kept is not None:
            kept.write(key, times)
    return times


def _multiplies_codes(device: torch.device, checkpoint: Checkpoint) -> bool:
    """Whether products in FP8 serve this device and model: SM90, and rows of whole units."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return all(width % UNIT == 0 for width in checkpoint.config.scaled_widths)


def _device_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None on a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory


def _kernel_library(settings: Settings) -> Path | None:
    """The directory of prebuilt kernels, if one is named."""
    if settings.kernel_library is None:
        return None
    directory = Path(settings.kernel_library)
    if not directory.is_dir():
        raise ValueError(
            f"DEEPINFER_KERNEL_LIBRARY={settings.kernel_library} is no directory; make it with "
            "python -m tilelang_ops.build --out, or unset it"
        )
    return directory


def _banned_ids(tokenizer: Tokenizer, settings: Settings, spec: ModelSpec) -> list[int]:
    """Ids that are never sampled: what no text stands for, and the blacklist."""
    banned = {*tokenizer.undecodable_ids, *tokenizer.internal_ids}
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
    replay: ReplayConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    use_async: bool,
    layout: CacheLayout,
    swap_bytes: int,
    salt: int,
) -> Any:
    """The C++ core's configuration."""
    image_token = checkpoint.config.image_token_id
    config = core.CoreConfig(
        role=core.Role(int(args.engine_type)),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        vocab_size=spec.vocab_size,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        num_state_slots=cache.num_state_slots,
        chunked_prefill=scheduler.chunked_prefill,
        min_prefill_chunk=max(1, args.lookahead_tokens),
        max_sum_seqlen_k=scheduler.max_sum_seqlen_k,
        max_prefill_tflops=scheduler.max_prefill_tflops,
        stop_preempted_request=scheduler.stop_preempted_request,
        preemption_mode=core.PreemptionMode.__members__[args.preemption_mode.upper()],
        swap_limit_bytes=swap_bytes,
        block_bytes=layout.block_bytes,
        slot_bytes=layout.slot_bytes,
        draft_score_bytes=4 * spec.vocab_size,
        num_draft_tokens=scheduler.num_draft_tokens,
        use_draft_budget=settings.use_draft_budget,
        async_scheduling=use_async,
        prefix_caching=cache.prefix_caching,
        prefix_state_interval=cache.prefix_state_interval,
        prefix_salt=salt,
        max_ngram=spec.max_ngram,
        attention_terms=[(term.flops, term.divisor, term.offset, term.cap) for term in spec.attention_terms],
        flops_per_token=spec.flops_per_token,
        image_token_begin=image_token,
        image_token_end=image_token + 1,
        replay_keep_tokens=replay.keep_tokens,
    )
    return config
