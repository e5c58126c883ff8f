"""Presets: the settings of the published figures, one rank's share of each on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RELEASE = "deepseek-v4.1-flash"  # the built-in configuration
CONTEXT = 131_072

# Decode: 64 devices, 384 experts and 64 copies, 7 on each device. Prefill: 4 devices, 96 experts on each.
DECODE = {"phases": ["decode"], "dummy": True, "model": RELEASE, "emulated_ep": 64, "redundant_experts": 64}
PREFILL = {"phases": ["prefill"], "dummy": True, "model": RELEASE, "emulated_ep": 4, "yoco_clip": True}


@dataclass(frozen=True)
class Preset:
    """Options of the benchmark, and what was published for them.

    Attributes:
        options: values of its command line.
        published_ms: step time that the charts of the original release give, on SM100.
        drafts: the number of drafts that it belongs to; None for prefill.
    """

    options: dict[str, Any]
    published_ms: float
    drafts: int | None = None


def _decode(num_requests: int, published_ms: float) -> Preset:
    options = DECODE | {
        "decode_num_requests": [num_requests],
        "context_length": CONTEXT,
        "speculation": [0, 3],
        "prefill_batch_size": [65_536],
    }
    return Preset(options, published_ms, 3)


def _prefill(batch_size: int, published_ms: float, engram: int = 0) -> Preset:
    options = PREFILL | {
        "prefill_batch_size": [batch_size],
        "context_length": CONTEXT,
        "uncached": 4096,
        "emulated_engram": engram,
    }
    return Preset(options, published_ms)


PRESETS = {
    "published-decode-8": _decode(8, 9.99),
    "published-decode-64": _decode(64, 13.20),
    "published-decode-256": _decode(256, 31.53),
    "published-prefill-4096": _prefill(4096, 68.3),
    # A quarter of the tables and the activations of so many rows do not fit together in 139 GiB.
    "published-prefill-65536": _prefill(65_536, 731.7, engram=16),
}
