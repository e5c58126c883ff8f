"""EngineArgs: what a caller may set, and the only place that resolves defaults into frozen configs."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from types import NoneType
from typing import Any

from deepinfer.config import ARITHMETICS, Arithmetic, CacheConfig, ReplayConfig, ReplayMode, SchedulerConfig
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.memory_plan import CacheDemand, RankBudget, blocks_to_allocate
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.store import KVStore
from deepinfer.models.base import ModelSpec
from deepinfer.sampling_params import check_verification
from deepinfer.settings import Settings

LOGPROBS_MODES = ("raw", "temperature", "processed")

# Bounds of the fields that are integers; the native core counts in 32 bits.
_INT32_MAX = 2**31 - 1
_INTEGERS = {
    "max_model_len": (1, _INT32_MAX),
    "max_num_seqs": (1, _INT32_MAX),
    "max_num_batched_tokens": (1, _INT32_MAX),
    "num_blocks": (1, _INT32_MAX),
    "cache_bytes": (1, 2**63 - 1),
    "num_prefix_states": (0, _INT32_MAX),
    "prefix_state_interval": (0, _INT32_MAX),
    "lookahead_tokens": (0, _INT32_MAX),
    "kv_store_bytes": (1, 2**63 - 1),
    "emulated_ep": (1, _INT32_MAX),
    "emulated_redundant_experts": (0, _INT32_MAX),
    "emulated_engram": (0, _INT32_MAX),
    "seed": (0, 2**63 - 1),
}
_OPTIONAL = (
    "max_model_len",
    "max_num_batched_tokens",
    "num_blocks",
    "cache_bytes",
    "kv_store_bytes",
    "batch_invariant",
    "enable_prefix_caching",
    "num_prefix_states",
)

# Tokens of a prefill step when neither the model length nor the decode batch asks for more.
MIN_BATCHED_TOKENS = 4096

# Sum of total lengths that no prefill step reaches.
NO_SUM_LIMIT = 1 << 30

# Share of the machine's memory that caches may take when `cache_bytes` is not given (CPU).
CPU_CACHE_SHARE = 0.25

# Share of a GPU's memory that is taken when `gpu_memory_utilization` is not given.
GPU_MEMORY_SHARE = 0.9

# Presets of the arithmetic that a GPU has; the first is its default.
GPU_ARITHMETICS = ("w8a8", "bfloat16")


# States that the prefix cache keeps when nobody says how many, and the share of memory that they may take.
NUM_PREFIX_STATES = 64
PREFIX_STATES_SHARE = 16


# What becomes of the bytes of a preempted request.
PREEMPTION_MODES = ("auto", "recompute", "swap")

# Host memory for them when nobody says how much, and the share of memory that it may be.
SWAP_BYTES = 4 << 30
SWAP_SHARE = 16


# Limit of a directory that is given as the KV store.
KV_STORE_BYTES = 16 << 30


@dataclass
class EngineArgs:
    """Arguments of an engine.

    Attributes:
        model: local checkpoint directory, or a Hub id.
        tokenizer: directory with `tokenizer.json`; the model's when None.
        revision: Hub revision of the model.
        tokenizer_revision: Hub revision of the tokenizer; `revision` when None.
        load_format: "auto" reads the checkpoint's tensors, "dummy" draws random ones; then `model` may
            also be the name of a built-in configuration, "deepseek-v4.1-flash".
        emulated_ep: with "dummy", hold one rank's share of experts and tables in a group of so many ranks.
        emulated_redundant_experts: copies of experts in that group.
        emulated_engram: ranks that the tables are divided among, if another number; 0 for `emulated_ep`.
        seed: seeds the process's generators (rank r uses seed + r); requests have their own seeds.
        max_model_len: most prompt + output tokens of a request; min(4096, the model's own limit) when None.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: query tokens per step; max(max_model_len, 4096, decode tokens) when None.
        chunked_prefill: split prompts that exceed the step's tokens.
        max_prefill_tflops: estimated attention work of a prefill step, in TFLOP; 0 means no limit.
        tokens_per_block: -1, or the paged block size, which is fixed at 128.
        lookahead_tokens: smallest partial chunk worth starting.
        stop_preempted_request: end a preempted request with an error instead of recomputing it.
        preemption_mode: what becomes of the caches of a preempted request: "recompute" forgets them, "swap"
            keeps them in host memory while there is room, "auto" does so where that takes less time.
        swap_space: host memory for them in GiB; 4, or a sixteenth of the engine's memory, when None.
        engine_type: which phases the engine runs; PROMPT and COMPLETION engines are connected with
            `LLMEngine.connect`.
        arithmetic: rounding preset: "float32", "w8a8", "bfloat16" or "plain"; "float32" on a CPU when None.
        batch_invariant: a row's bits never depend on its batch; DEEPINFER_BATCH_INVARIANT when None.
        logprobs_mode: what log-probabilities mean: "raw" (the model's distribution), "temperature" (after
            penalties, bias, masks and temperature) or "processed" (after truncation too).
        verification: how drafts are tested for requests that do not say: "coupled" (outputs are those of
            plain sampling) or "ratio" (outputs follow its law).
        calibration_file: what `python -m deepinfer.calibrate` wrote; scales the drafter's confidences.
        gpu_memory_utilization: share of the device's memory (on a CPU the machine's) for weights, workspace
            and caches together, which decides how many blocks fit. None: the caches take a quarter of the
            machine's memory at most.
        cache_bytes: memory for both cache pools, overriding `gpu_memory_utilization`.
        num_blocks: paged blocks, overriding what `cache_bytes` would give.
        enable_prefix_caching: reuse what requests with the same first tokens have computed; on when None.
        num_prefix_states: states that the prefix cache can keep while every request runs, each of the size of
            a state slot; 64, or what a sixteenth of the caches' memory holds, when None.
        prefix_state_interval: tokens between two states that are kept of a long prompt, a multiple of 128; 0
            keeps those at its last border and where it leaves the path of an earlier prompt.
        kv_store: where prefixes are kept outside the caches: a `KVStore`, which stays the caller's, or a
            directory of this engine and others; none when None.
        kv_store_bytes: limit of that directory; 16 GiB when None.
        disable_log_stats: no periodic statistics line.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    load_format: str = "auto"
    emulated_ep: int = 1
    emulated_redundant_experts: int = 0
    emulated_engram: int = 0
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True
    max_prefill_tflops: float = 0.0
    tokens_per_block: int = -1
    lookahead_tokens: int = 0
    stop_preempted_request: bool = False
    preemption_mode: str = "auto"
    swap_space: float | None = None
    engine_type: EngineType = EngineType.NORMAL
    arithmetic: str | None = None
    batch_invariant: bool | None = None
    logprobs_mode: str = "raw"
    verification: str = "coupled"
    calibration_file: str | None = None
    gpu_memory_utilization: float | None = None
    cache_bytes: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool | None = None
    num_prefix_states: int | None = None
    prefix_state_interval: int = 0
    kv_store: KVStore | str | None = None
    kv_store_bytes: int | None = None
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        self.load_format = self.load_format.lower()
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(
                f"load_format={self.load_format!r}: choose 'auto' (safetensors) or 'dummy' (random weights)"
            )
        if self.is_dummy and (self.kv_store is not None or self.engine_type != EngineType.NORMAL):
            raise ValueError(
                "load_format='dummy': random weights have no identity, so drop kv_store and engine_type"
            )
        if not self.is_dummy and self.emulated_rank != (1, 0, 0):
            raise ValueError(
                "emulated_ep, emulated_redundant_experts and emulated_engram need load_format='dummy'"
            )
        if self.tokens_per_block not in (-1, BLOCK_SIZE):
            raise ValueError(f"tokens_per_block={self.tokens_per_block}: blocks hold {BLOCK_SIZE} tokens")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(
                f"logprobs_mode={self.logprobs_mode!r}: choose one of {', '.join(LOGPROBS_MODES)}"
            )
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(
                f"preemption_mode={self.preemption_mode!r}: choose one of {', '.join(PREEMPTION_MODES)}"
            )
        if self.prefix_state_interval % BLOCK_SIZE:
            raise ValueError(
                f"prefix_state_interval={self.prefix_state_interval}: expected a multiple of {BLOCK_SIZE}"
            )
        check_verification(self.verification)
        if self.arithmetic is not None and self.arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic={self.arithmetic!r}: choose one of {', '.join(ARITHMETICS)}")
        self.engine_type = EngineType(self.engine_type)

    def _check_types(self) -> None:
        """ValueError for the first field that is of another type than declared, or out of range."""
        for name in ("model", "tokenizer"):
            if isinstance(getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(getattr(self, name)))
        for name in ("model", "load_format"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a string")
        if isinstance(self.kv_store, os.PathLike):
            self.kv_store = os.fspath(self.kv_store)
        if not isinstance(self.kv_store, (str, KVStore, NoneType)) or self.kv_store == "":
            raise ValueError(f"kv_store={self.kv_store!r}: expected a KVStore or a directory")
        for name in ("tokenizer", "revision", "tokenizer_revision", "calibration_file"):
            if not isinstance(getattr(self, name), (str, os.PathLike, NoneType)):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a string")
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                bounds = f">= {low}" if isinstance(value, int) and value < low else f"from {low} to {high}"
                raise ValueError(f"{name}={value!r}: expected an integer {bounds}")
        for name in (
            "chunked_prefill",
            "stop_preempted_request",
            "disable_log_stats",
            "batch_invariant",
            "enable_prefix_caching",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPTIONAL):
                raise ValueError(f"{name}={value!r}: expected True or False")
        share = self.gpu_memory_utilization
        if share is not None and (
            isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1
        ):
            raise ValueError(f"gpu_memory_utilization={share!r}: expected a number above 0 and at most 1")
        space = self.swap_space
        if space is not None and (
            isinstance(space, bool) or not isinstance(space, (int, float)) or not 0 <= space < math.inf
        ):
            raise ValueError(f"swap_space={space!r}: expected a number of GiB >= 0; 0 swaps nothing")
        limit = self.max_prefill_tflops
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
            raise ValueError(f"max_prefill_tflops={limit!r}: expected a number >= 0; 0 means no limit")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """EngineArgs from keywords; an unknown one is a TypeError that names the nearest field."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in names:
                import difflib

                near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
                raise TypeError(f"unknown engine argument {name!r}; the nearest one is {near!r}")
        return cls(**kwargs)

    @property
    def is_dummy(self) -> bool:
        """Whether weights are drawn instead of read."""
        return self.load_format == "dummy"

    @property
    def emulated_rank(self) -> tuple[int, int, int]:
        """Ranks of the group, copies of experts in it, ranks that tables are divided among."""
        return self.emulated_ep, self.emulated_redundant_experts, self.emulated_engram

    def resolve_arithmetic(
        self, settings: Settings, device_type: str = "cpu", *, multiplies_codes: bool = False
    ) -> Arithmetic:
        """The arithmetic preset with batch invariance decided (argument, then environment, then on).

        Args:
            settings: the environment.
            device_type: "cpu", which has all presets and float32 by default, or "cuda".
            multiplies_codes: the device has products in FP8 that are faster than bfloat16's, which the
                settings may ask for.

        Raises:
            ValueError: a GPU has no such arithmetic, or products in FP8 are asked for where there are none.
        """
        name = self.arithmetic or ("float32" if device_type == "cpu" else GPU_ARITHMETICS[0])
        if device_type != "cpu" and name not in GPU_ARITHMETICS:
            raise ValueError(
                f"arithmetic={name!r}: a GPU computes in {' or '.join(GPU_ARITHMETICS)}; choose one of them, "
                "or run on the CPU (DEEPINFER_ACCELERATOR=cpu)"
            )
        base = ARITHMETICS[name]
        has_codes = multiplies_codes and base.quantize_activations
        if settings.fp8_products and device_type != "cpu" and not has_codes:
            raise ValueError(
                f"DEEPINFER_FP8_PRODUCTS=1 with arithmetic {name!r}: products in FP8 need an SM90 GPU, the "
                "arithmetic w8a8 and a model whose rows are multiples of 128 channels; unset it"
            )
        invariant = self.batch_invariant if self.batch_invariant is not None else settings.batch_invariant
        return dataclasses.replace(
            base,
            batch_invariant=True if invariant is None else invariant,
            fp8_products=has_codes and settings.fp8_products,
        )

    def resolve_async(self, settings: Settings) -> bool:
        """Whether a step is committed under the next one's forward (environment, then the engine type)."""
        asked = settings.use_async_scheduling
        return EngineType(self.engine_type).default_zero_overhead_scheduling if asked is None else asked

    def resolve_scheduler(
        self, settings: Settings, model_limit: int, num_draft_tokens: int
    ) -> SchedulerConfig:
        """Limits of a step.

        Args:
            settings: the environment.
            model_limit: the checkpoint's `max_position_embeddings`.
            num_draft_tokens: drafts verified per request and step.

        Raises:
            ValueError: when the given numbers contradict each other.
        """
        max_model_len = self.max_model_len or min(4096, model_limit)
        if max_model_len > model_limit:
            raise ValueError(f"max_model_len={max_model_len} exceeds the model's own limit of {model_limit}")
        decode_tokens = self.max_num_seqs * (1 + num_draft_tokens)
        budget = self.max_num_batched_tokens or max(max_model_len, MIN_BATCHED_TOKENS, decode_tokens)
        if budget < decode_tokens:
            raise ValueError(
                f"max_num_batched_tokens={budget} is less than a full decode step of {decode_tokens} tokens "
                f"(max_num_seqs={self.max_num_seqs} x (1 + {num_draft_tokens} drafts)): "
                "raise it or lower max_num_seqs"
            )
        if not self.chunked_prefill and budget < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={budget} is less than max_model_len={max_model_len}: "
                "a prompt could not be prefilled in one step; use chunked_prefill=True or raise the budget"
            )
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            chunked_prefill=self.chunked_prefill,
            max_sum_seqlen_k=settings.prefill_max_sum_seqlen_k or NO_SUM_LIMIT,
            max_prefill_tflops=self.max_prefill_tflops,
            stop_preempted_request=self.stop_preempted_request,
            num_draft_tokens=num_draft_tokens,
        )

    @staticmethod
    def resolve_replay(settings: Settings, spec: ModelSpec, max_backtracking: int) -> ReplayConfig:
        """Bounded replay of the model's decoder windows.

        Raises:
            ValueError: when so few tokens are kept that a step that takes drafts back could miss some.
        """
        mode, keep = ReplayMode(settings.replay_mode), settings.replay_keep_tokens
        if mode is ReplayMode.OFF:
            return ReplayConfig()
        name = f"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE={mode}"
        windows = [w.window for w in spec.windows if spec.first_decoder_layer <= w.layer_id < spec.num_layers]
        if not windows:
            raise ValueError(f"{name}: this model has no decoder layer with a window; set it to off")
        least = max(windows) + max_backtracking
        if keep < least:
            raise ValueError(
                f"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS={keep} is less than {least} tokens, the window of "
                f"{max(windows)} and the {max_backtracking} that a step may take back, which {name} needs: "
                f"keep {max(least, 140)} tokens, or set the mode to off"
            )
        return ReplayConfig(mode, keep)

    def memory_limit(self, device_bytes: int | None = None) -> int | None:
        """Bytes for weights, workspace and caches together; None when only the caches have a limit.

        Args:
            device_bytes: memory of the GPU, of which `GPU_MEMORY_SHARE` is taken unless told otherwise; None
                on a CPU.
        """
        if self.cache_bytes is not None:
            return None
        share = self.gpu_memory_utilization
        if share is None and device_bytes is None:
            return None
        memory = _physical_memory() if device_bytes is None else device_bytes
        return int((GPU_MEMORY_SHARE if share is None else share) * memory)

    def resolve_cache(
        self,
        scheduler: SchedulerConfig,
        settings: Settings,
        block_bytes: int,
        slot_bytes: int,
        max_backtracking: int,
        used_bytes: int = 0,
        device_bytes: int | None = None,
    ) -> CacheConfig:
        """Sizes of the cache pools: as many blocks as every running request could use, or as memory allows.

        Args:
            scheduler: limits of a step.
            settings: the environment.
            block_bytes: of one paged block.
            slot_bytes: of one state slot.
            max_backtracking: positions that a step may take back.
            used_bytes: what weights and workspace take of `memory_limit`.
            device_bytes: as in `memory_limit`.

        Raises:
            ValueError: when not even one request of `max_model_len` fits, with the numbers that would.
        """
        demand = CacheDemand(
            scheduler.max_model_len, scheduler.max_num_seqs, settings.num_state_slots_ratio, BLOCK_SIZE
        )
        limit = self.memory_limit(device_bytes)
        if limit is not None and limit <= used_bytes and self.num_blocks is None:
            share, memory = self.gpu_memory_utilization, device_bytes or _physical_memory()
            raise ValueError(
                f"gpu_memory_utilization={GPU_MEMORY_SHARE if share is None else share} is {limit} bytes, "
                f"and weights and workspace alone take {used_bytes}: raise it above {used_bytes / memory:.3f}"
            )
        room = self.cache_bytes or int(CPU_CACHE_SHARE * _physical_memory())
        budget = RankBudget(0, room if limit is None else limit - used_bytes, block_bytes, slot_bytes)
        if self.num_blocks is not None:
            usable = self.num_blocks - 1
            if usable < demand.blocks_per_seq:
                shorter = f", or lower max_model_len to {usable * BLOCK_SIZE}" if usable > 0 else ""
                raise ValueError(
                    f"num_blocks={self.num_blocks}: {max(usable, 0)} usable blocks of {BLOCK_SIZE} tokens "
                    f"cannot hold one request of max_model_len={scheduler.max_model_len}: raise it to "
                    f"{demand.blocks_per_seq + 1}{shorter}"
                )
            num_states = self._num_prefix_states(budget, None)
            num_blocks = self.num_blocks
        else:
            num_blocks = blocks_to_allocate([budget], demand) + 1
            num_states = self._num_prefix_states(budget, demand)
            num_blocks = min(num_blocks, budget.num_blocks(demand.num_slots + num_states) + 1)
        return CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_state_slots=demand.num_slots + num_states,
            max_backtracking=max_backtracking,
            prefix_caching=self.use_prefix_caching,
            num_prefix_states=num_states,
            prefix_state_interval=self.prefix_state_interval,
        )

    def resolve_swap_bytes(self) -> int:
        """Host memory for the caches of preempted requests; 0 where these are recomputed or end."""
        is_prompt_only = self.engine_type == EngineType.PROMPT  # its requests leave instead
        if self.preemption_mode == "recompute" or self.stop_preempted_request or is_prompt_only:
            return 0
        if self.swap_space is not None:
            return int(self.swap_space * (1 << 30))
        return min(SWAP_BYTES, (self.memory_limit() or _physical_memory()) // SWAP_SHARE)

    def resolve_kv_store(self) -> tuple[KVStore | None, bool]:
        """The KV store, and whether it is the engine's own.

        Raises:
            ValueError: there is no prefix cache for it, or the directory is something else.
        """
        store = self.kv_store
        if store is None:
            return None, False
        if not self.use_prefix_caching:
            raise ValueError(
                "kv_store needs the prefix cache: drop enable_prefix_caching=False, or the store"
            )
        if isinstance(store, KVStore):
            return store, False
        return DirectoryStore(store, self.kv_store_bytes or KV_STORE_BYTES), True

    @property
    def use_prefix_caching(self) -> bool:
        """Whether the engine has a prefix cache."""
        return True if self.enable_prefix_caching is None else self.enable_prefix_caching

    def _num_prefix_states(self, budget: RankBudget, demand: CacheDemand | None) -> int:
        """State slots beyond those of running requests; with a demand they leave room for what it needs.

        Raises:
            ValueError: the caller wants more than fit.
        """
        if not self.use_prefix_caching:
            return 0
        slot_bytes = max(budget.slot_bytes, 1)
        most = None
        if demand is not None:
            blocks = demand.blocks_per_seq * budget.block_bytes
            most = (budget.cache_bytes - blocks) // slot_bytes - demand.num_slots
        if self.num_prefix_states is None:
            share = max(0, budget.cache_bytes) // PREFIX_STATES_SHARE // slot_bytes
            return min(NUM_PREFIX_STATES, share, share if most is None else most)
        if most is not None and self.num_prefix_states > most:
            raise ValueError(
                f"num_prefix_states={self.num_prefix_states} leaves no room for one request of "
                f"max_model_len={demand.max_model_len}: {most} would fit"
            )
        return self.num_prefix_states


BLOCK_SIZE = 128  # tokens per paged block, fixed by the cache layout


def _physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
