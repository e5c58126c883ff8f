"""What an engine's bytes depend on, where others are to use them."""

from __future__ import annotations

import dataclasses
import json
import platform

import torch

from deepinfer import __version__
from deepinfer.checkpoint.fingerprint import fingerprint
from deepinfer.checkpoint.loader import Checkpoint
from deepinfer.config import Arithmetic
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
    """Who can use an engine's bytes, and the parts of them.

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
