"""Settings: every DEEPINFER_* environment variable, typed and read once.

`Settings.from_env()` runs at an entry point; the object is passed down and pickled to workers, and nothing
else reads the environment (but `native.py`, which has to know the accelerator before anything is installed).
An unknown name or a bad value is a ValueError. `python -m deepinfer.settings` prints the documentation.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.native import ACCELERATORS

PREFIX = "DEEPINFER_"


@dataclass(frozen=True)
class Kind:
    """How the text of a variable becomes a value."""

    describe: str  # what would work, for messages and for the documentation
    parse: Callable[[str], Any]  # raises ValueError
    takes_empty: bool = False  # whether an empty text is a value; else it means unset


def env(
    name: str, default: Any, kind: Kind, help: str, shown_default: str | None = None, idle: str | None = None
) -> Any:
    """A field of Settings.

    Args:
        name: the environment variable.
        default: the field's value when the variable is unset.
        kind: how its text is read.
        help: one sentence for the documentation.
        shown_default: the documentation's words for a default that depends on something.
        idle: why the field has no effect yet; the variable's text is checked, and setting it warns.
    """
    metadata = {"name": name, "kind": kind, "help": help, "shown_default": shown_default, "idle": idle}
    return dataclasses.field(default=default, metadata=metadata)


def _boolean(text: str) -> bool:
    return text not in ("0", "", "false", "False")


def _integer(minimum: int) -> Kind:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError
        return value

    return Kind(f"an integer >= {minimum}", parse)


def _number(minimum: float) -> Kind:
    def parse(text: str) -> float:
        value = float(text)
        if not minimum <= value < float("inf"):  # refuses NaN too
            raise ValueError
        return value

    return Kind(f"a number >= {minimum:g}", parse)


def _choice(*choices: str) -> Kind:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return Kind(f"one of {', '.join(choices)}", parse)


def parse_token_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Inclusive ranges of token ids, "0..3,7,10..12" -> ((0, 3), (7, 7), (10, 12)).

    Raises ValueError unless the ids are plain decimal numbers in strictly increasing order.
    """
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        for number in (first, last) if dots else (first,):
            if not (number.isascii() and number.isdigit()):
                raise ValueError(f"{part!r} is neither a token id nor a range such as 10..12")
        low, high = int(first), int(last if dots else first)
        if high < low or (ranges and low <= ranges[-1][1]):
            raise ValueError(f"{part!r} does not continue in strictly increasing order")
        ranges.append((low, high))
    return tuple(ranges)


def _listed(*choices: str) -> Kind:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(","))
        if not set(names) <= set(choices) or len(set(names)) < len(names):
            raise ValueError
        return names

    return Kind(f"some of {', '.join(choices)}, with commas between them", parse)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(0.0).parse(part) for part in text.split(","))


BOOLEAN = Kind("0, false or empty for no, anything else for yes", _boolean, takes_empty=True)
ANY_INTEGER = Kind("an integer", int)
TEXT = Kind("any text", str)
NUMBERS = Kind("a number >= 0, or several with commas between them", _numbers)
TOKEN_RANGES = Kind("increasing token ids and inclusive ranges such as 0..3,7,10..12", parse_token_ranges)


@dataclass(frozen=True)
class Settings:
    """The process's settings. The whole list is the documentation of the environment."""

    accelerator: str = env(
        "DEEPINFER_ACCELERATOR",
        "auto",
        _choice("auto", *ACCELERATORS),
        "Device to run on, and the folder that build.sh builds into; auto takes what the machine has.",
    )
    batch_invariant: bool | None = env(
        "DEEPINFER_BATCH_INVARIANT",
        None,
        BOOLEAN,
        "A row's bits never depend on the batch it is computed in.",
        "1 on a CPU, else 0",
    )
    num_draft_tokens: int = env(
        "DEEPINFER_USE_NEXTN_DECODE",
        5,
        _integer(0),
        "Draft tokens per request and decode step, at most the drafter's block; 0 switches speculative "
        "decoding off. A checkpoint without a drafter runs without drafts.",
    )
    use_draft_budget: bool = env(
        "DEEPINFER_ENABLE_MTP_VARLEN",
        False,
        BOOLEAN,
        "Choose how many drafts of each request to verify by the drafter's confidence and the measured time "
        "of a step; 0 verifies every draft.",
    )
    step_time_dir: str | None = env(
        "DEEPINFER_DECODE_PERF_CACHE_DIR",
        None,
        TEXT,
        "Directory that keeps measured step times between starts; only the engine's own files in it are "
        "touched.",
        "none: they are measured at each start that needs them",
    )
    step_time_max_age: int = env(
        "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC",
        3600,
        _integer(0),
        "Seconds that kept step times are believed.",
    )
    confidence_temperatures: tuple[float, ...] | None = env(
        "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
        None,
        NUMBERS,
        "Temperatures of the drafter's confidences, one for all draft positions or one for each; the floor "
        "is 1e-5.",
        "those of the calibration file, else of the checkpoint, else 1",
    )
    max_backtracking_tokens: int | None = env(
        "DEEPINFER_MAX_BACKTRACKING_TOKENS",
        None,
        _integer(0),
        "Positions that a decode step may take back; enlarges the window and compression rings. "
        "Never less than the drafter's block + 1.",
        "the drafter's block + 1",
    )
    replay_mode: str = env(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
        "off",
        _choice("off", "mask", "compact"),
        "Bounded replay: compact runs only the newest tokens of a prompt through the decoder layers, "
        "close to the exact result (off) and cheaper; mask gives the result of compact at full cost.",
    )
    replay_keep_tokens: int = env(
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
        0,
        _integer(0),
        "Tokens of a prompt that bounded replay keeps: at least the window and the positions that a step may "
        "take back, 134 with this model's drafter; 140 is usual. Without effect when the mode is off.",
    )
    use_async_scheduling: bool | None = env(
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
        None,
        BOOLEAN,
        "Commit a decode step while the device runs the next one.",
        "1, but 0 for prefill-only engines",
    )
    decode_token_blacklist: tuple[tuple[int, int], ...] = env(
        "DEEPINFER_DECODE_TOKEN_BLACKLIST",
        (),
        TOKEN_RANGES,
        "Token ids that are never sampled.",
        "none",
    )
    sampler_force_topk: int = env(
        "DEEPINFER_SAMPLER_FORCE_TOPK",
        0,
        _integer(0),
        "Restrict every row to its k best tokens before anything else; 0 means no restriction.",
    )
    prefill_max_sum_seqlen_k: int | None = env(
        "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K",
        None,
        _integer(1),
        "Cap on the sum of total sequence lengths in a prefill step.",
        "no cap",
    )
    index_score_bytes: int | None = env(
        "DEEPINFER_INDEX_ATTN_MEMORY_LIMIT",
        None,
        _integer(1),
        "Bytes of index scores held at a time, or those of one row; more rows are scored in parts.",
        "64 MiB on a CPU, else 512 MiB",
    )
    num_state_slots_ratio: float = env(
        "DEEPINFER_NUM_STATE_SLOTS_RATIO",
        1.2,
        _number(1.0),
        "State slots = int(max_num_seqs * ratio) + 1.",
    )
    grammar_processes: int = env(
        "DEEPINFER_SO_BUILDER_CPUS",
        4,
        _integer(1),
        "Grammars that are compiled at once, each in a process of its own; at most one for each CPU.",
    )
    grammar_timeout_s: int = env(
        "DEEPINFER_XGRAMMAR_TIMEOUT",
        20,
        _integer(1),
        "Seconds that a grammar may take to compile; then its request ends with an error.",
    )
    grammar_memory_bytes: int = env(
        "DEEPINFER_XGRAMMAR_MEMORY_LIMIT_BYTES",
        2 << 30,
        _integer(1 << 20),
        "Memory that compiling a grammar may take; then its request ends with an error.",
    )
    grammar_cache_bytes: int = env(
        "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES",
        10 << 30,
        ANY_INTEGER,
        "Most bytes of compiled grammars that are kept for later requests; <= 0 keeps all.",
    )
    disable_grammar_cache: bool = env(
        "DEEPINFER_XGRAMMAR_DISABLE_CACHE",
        False,
        BOOLEAN,
        "Keep no compiled grammars.",
    )
    logging_interval_steps: int = env(
        "DEEPINFER_LOGGING_INTERVAL_STEP",
        100,
        ANY_INTEGER,
        "Steps between two log lines of the engine, a fifth for prefill-only engines; <= 0 means never.",
    )
    enforce_eager: bool = env(
        "DEEPINFER_ENFORCE_EAGER",
        False,
        BOOLEAN,
        "Capture no graphs: every step launches its kernels one by one. On a CPU there are none anyway.",
    )
    graph_interval: int | None = env(
        "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL",
        None,
        _integer(1),
        "Distance between the numbers of query tokens that decode graphs are captured for; below it powers "
        "of two.",
        "a few sizes that measured step times justify",
    )
    graphs_on_demand: bool = env(
        "DEEPINFER_CUDAGRAPH_ON_DEMAND",
        False,
        BOOLEAN,
        "Capture a graph when a step first needs it, not all at the start: for runs that see few sizes.",
    )
    draft_enforce_eager: bool = env(
        "DEEPINFER_DFLASH_ENFORCE_EAGER",
        False,
        BOOLEAN,
        "Capture no graphs of the drafter.",
    )
    draft_graph_interval: int | None = env(
        "DEEPINFER_DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL",
        None,
        _integer(1),
        "Distance between the numbers of sequences that the drafter's graphs are captured for.",
        "two sizes for each octave",
    )
    disable_sync_guard: bool = env(
        "DEEPINFER_DISABLE_SYNC_GUARD",
        False,
        BOOLEAN,
        "Let a launch of a step wait for the device silently; else it is an error. On a CPU nothing waits.",
    )
    disable_core_binding: bool = env(
        "DEEPINFER_DISABLE_CORE_BINDING",
        False,
        BOOLEAN,
        "Let the process run on all cores; else only on those next to its device. On a CPU it runs on all.",
    )
    cpp_log_level: str = env(
        "DEEPINFER_CPP_LOG_LEVEL",
        "info",
        _choice("off", "error", "warn", "info"),
        "What the native scheduler logs.",
        idle="the native scheduler logs nothing",
    )
    kernel_library: str | None = env(
        "DEEPINFER_KERNEL_LIBRARY",
        None,
        TEXT,
        "Directory of prebuilt kernels, made by `python -m tilelang_ops.build --out`; a kernel that it lacks "
        "is compiled at its first use.",
        "none: kernels are compiled at their first use",
    )
    external_kernels: tuple[str, ...] = env(
        "DEEPINFER_EXTERNAL_KERNELS",
        (),
        _listed("deep_gemm", "flash_mla", "deep_select"),
        "Libraries whose kernels take the place of our own where they can, on SM100 GPUs (doc/kernels.md).",
        "none: they have not run here",
    )
    fp8_products: bool = env(
        "DEEPINFER_FP8_PRODUCTS",
        False,
        BOOLEAN,
        "On SM90 GPUs multiply rounded activations and dense weights, and index queries and keys, by their "
        "codes in FP8: faster, and sums have fewer bits (doc/kernels.md). The engine's tests on a GPU have "
        "not run so yet.",
    )
    engram_on_device: bool = env(
        "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE",
        False,
        BOOLEAN,
        "Keep the Engram tables in the GPU's memory, not in pinned memory of the host, where it reads the "
        "rows that it needs.",
    )
    hf_model_dir: str | None = env(
        "DEEPINFER_HF_MODEL_DIR",
        None,
        TEXT,
        "Checkpoint that the examples use, a directory or a Hub id.",
        "the bundled model",
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read all variables.

        Variables that have no effect here are accepted with one warning that says why.

        Args:
            environ: the environment; that of the process when None.

        Raises:
            ValueError: for unknown DEEPINFER_* names (naming the nearest known one) and for values that do
                not parse (naming variable, value and what would work); one line for each.
        """
        environ = os.environ if environ is None else environ
        fields = {field.metadata["name"]: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        problems: list[str] = []
        idle: list[str] = []
        for name in sorted(name for name in environ if name.startswith(PREFIX)):
            field = fields.get(name)
            if field is None:
                if name in WITHOUT_EFFECT:
                    idle.append(f"{name} ({WITHOUT_EFFECT[name]})")
                else:
                    problems.append(_unknown(name, [*fields, *WITHOUT_EFFECT]))
                continue
            kind, text = field.metadata["kind"], environ[name].strip()
            if text == "" and not kind.takes_empty:
                continue
            if field.metadata["idle"]:
                idle.append(f"{name} ({field.metadata['idle']})")
            try:
                values[field.name] = kind.parse(text)
            except ValueError as error:
                detail = f" ({error})" if kind is TOKEN_RANGES else ""
                problems.append(f"{name}={environ[name]!r}: expected {kind.describe}{detail}")
        if problems:
            raise ValueError("\n".join(problems))
        if idle:
            warnings.warn(f"without effect in this engine: {'; '.join(idle)}", stacklevel=2)
        return cls(**values)


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"{name} is not a variable of this engine; the nearest one is {nearest}"


def _without_effect(reason: str, names: str) -> dict[str, str]:
    return {PREFIX + name: reason for name in names.split()}


# Variables of the original release that this engine accepts and does not use, with the reason.
WITHOUT_EFFECT: dict[str, str] = {
    **_without_effect(
        "there is no expert parallelism",
        "USERBUFFER_COMM_SMS REARRANGE_P2P_GROUPS OVERRIDE_NUM_EXTRA_EXPERTS EXPERT_COUNT_WINDOW_SIZE "
        "EXPERT_REARRANGEMENT_STEP_INTERVAL REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE MOE_LB_STAT_INTERVAL "
        "FORCE_IMBALANCE_RATIO FORCE_LOAD_BALANCE SHOW_EPLB_DETAIL",
    ),
    **_without_effect(
        "one process is one engine on one device",
        "NCCL_NUM_SMS GLOO_TIMEOUT NCCL_MEMORY_SAMPLE_INTERVAL_STEPS RINGBUFFER_WARNING_INTERVAL "
        "PREFILL_ATTEMPT_INTERVAL PREFILL_ANY_ATTEMPT_INTERVAL",
    ),
    **_without_effect(
        "it is for device memory or caches that are managed otherwise here",
        "JIT_CACHE_DIR PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING",
    ),
    **_without_effect("it is read from the checkpoint", "ENGRAM_PAD_TOKEN"),
    **_without_effect("this quantity is not computed", "COMPUTE_SUM_SMALLER_PROBS"),
    **_without_effect(
        "the KV store keeps what the prefix cache does",
        "PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE",
    ),
    **_without_effect("a request's error says what its grammar failed at", "XGRAMMAR_DEBUG"),
    **_without_effect(
        "there is no image input",
        "USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT",
    ),
    **_without_effect("Python's own garbage collection stays on", "GC_INTERVAL_STEP"),
    **_without_effect(
        "there is no profile server", "PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE TORCH_PROFILER_DIR"
    ),
    **_without_effect(
        "it belongs to a test of the original", "FUSED_SAMPLE_STRESS_TEST FUSED_SAMPLE_DETAIL_LOG"
    ),
}


def table() -> str:
    """The documentation's table of all variables, in Markdown."""
    lines = ["| Variable | Setting | Default | Values | Meaning |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(Settings):
        meta = field.metadata
        help = f"{meta['help']} **No effect yet: {meta['idle']}.**" if meta["idle"] else meta["help"]
        default = meta["shown_default"] or str(
            int(field.default) if field.default is False else field.default
        )
        lines.append(f"| `{meta['name']}` | `{field.name}` | {default} | {meta['kind'].describe} | {help} |")
    lines += ["", "| Variable of the original, accepted with a warning | Why it has no effect |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in sorted(WITHOUT_EFFECT.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
