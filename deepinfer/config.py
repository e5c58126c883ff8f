"""Frozen engine configuration: what was decided at construction and never changes afterwards.

`EngineArgs` (engine/arg_utils.py) is the only place that turns user input into these objects; the
checkpoint's own numbers live in the model's typed config. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Arithmetic:
    """How the forward pass rounds. One of the named presets of `ARITHMETICS`.

    Attributes:
        name: the preset's name, as `EngineArgs.arithmetic` takes it.
        compute_dtype: "float32" or "bfloat16", the dtype of activations between operators.
        quantize_activations: round the inputs of every quantised matrix to E4M3 in groups of 32 with
            E8M0 scales (`spec` "w8a8"), as the release does.
        release_caches: keep caches in the release's byte formats; False keeps float32 records and is
            meant for debugging only.
        batch_invariant: products sum in a fixed order, so a row's bits do not depend on its batch.
        fp8_products: matrices that are stored with scales, and index scores, multiply codes, on GPUs that
            are faster so; else the values that the codes mean, in bfloat16.
    """

    name: str
    compute_dtype: str
    quantize_activations: bool
    release_caches: bool
    batch_invariant: bool = True
    fp8_products: bool = False


ARITHMETICS: dict[str, Arithmetic] = {
    a.name: a
    for a in (
        Arithmetic("float32", "float32", False, True),
        Arithmetic("w8a8", "bfloat16", True, True),
        Arithmetic("bfloat16", "bfloat16", False, True),
        Arithmetic("plain", "float32", False, False),
    )
}


class ReplayMode(StrEnum):
    """Bounded replay: what a prefill computes of the decoder's part of a prompt (doc/replay.md)."""

    OFF = "off"  # what its output depends on: exact
    MASK = "mask"  # everything, with the windows that COMPACT has; a debugging aid
    COMPACT = "compact"  # the newest tokens, whose windows begin with the first of them


@dataclass(frozen=True)
class ReplayConfig:
    """Bounded replay, with `keep_tokens` of a prompt going through the decoder; 0 when it is off."""

    mode: ReplayMode = ReplayMode.OFF
    keep_tokens: int = 0


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of the two cache pools, in tokens and slots; bytes follow from the model's spec."""

    block_size: int  # tokens per paged block
    num_blocks: int  # blocks in the paged pool, block 0 reserved
    num_state_slots: int  # slots in the state pool, slot 0 reserved
    max_backtracking: int  # positions a decode step may take back
    prefix_caching: bool = False
    num_prefix_states: int = 0  # slots among `num_state_slots` for states that the prefix cache keeps
    prefix_state_interval: int = 0  # tokens between kept states of a prompt; 0: at its last border only


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduling step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool
    max_sum_seqlen_k: int  # cap on the sum of total lengths in a prefill step
    max_prefill_tflops: float  # estimated attention work of a prefill step; 0 means no limit
    stop_preempted_request: bool
    num_draft_tokens: int
