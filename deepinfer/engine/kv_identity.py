"""What an engine's bytes depend on, where others are to use them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform

import torch

from deepinfer import __version__
from deepinfer.checkpoint.fingerprint import fingerprint
from deepinfer.checkpoint.loader import Checkpoint
from deepinfer.config import Arithmetic, ReplayConfig
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.keys import Identity
from deepinfer.models.base import ModelSpec
from deepinfer.ops import cpu
from deepinfer.runtime.cache_layout import CacheLayout


def kv_identity(
    checkpoint: Checkpoint,
    arithmetic: Arithmetic,
    layout: CacheLayout,
    spec: ModelSpec,
    *,
    with_drafter: bool,
) -> tuple[Identity, EntryLayout]:
    """Who can use an engine's blocks and states, and the parts of them.

    Bounded replay is no part of the name: blocks and encoder rings are the same under every setting, and
    whole states are kept of prompts only that were not cut (`hand_off_identity` is stricter).

    Equal bits are promised within one build on one kind of machine, so versions and instruction set are part
    of the name. Without a drafter nobody writes its rings, and they are no part of a state.
    """
    backbone = [window.layer_id for window in layout.windows if window.layer_id < spec.num_layers]
    entries = EntryLayout.of(layout, None if with_drafter else backbone)
    rounding = dataclasses.asdict(arithmetic) | {
        "deepinfer": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instructions": cpu.context().instruction_set,
    }
    identity = Identity(
        model=fingerprint(checkpoint.path),
        arithmetic=json.dumps(rounding, sort_keys=True),
        layout=entries.fingerprint(),
        block_size=layout.block_size,
    )
    return identity, entries


def prefix_salt(checkpoint: Checkpoint, arithmetic: Arithmetic) -> int:
    """64 bits that the hashes of an engine's own prefix cache begin with: configuration, weights, rounding.

    Weights count by the names, sizes and times of their files. They are not read: such a cache ends with its
    engine.
    """
    digest = hashlib.sha256(repr((checkpoint.config, arithmetic)).encode())
    for file in sorted(checkpoint.path.glob("*.safetensors")):
        status = file.stat()
        digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
    return int.from_bytes(digest.digest()[:8], "little")


def hand_off_identity(identity: Identity, replay: ReplayConfig) -> Identity:
    """Who can go on with an engine's sequences.

    Decoder windows of a prompt that was cut begin where the number of kept tokens says; whoever takes them
    for longer ones reads what nobody wrote. The two modes give the same bytes wherever somebody reads.
    """
    return dataclasses.replace(
        identity, arithmetic=f"{identity.arithmetic} bounded replay: {replay.keep_tokens}"
    )
