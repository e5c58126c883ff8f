"""Report: one JSON line for each setting with all that it depends on, and tables for people."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepinfer import __version__

# Column title, key, format.
_COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "decode": (
        ("requests", "num_requests", "d"),
        ("context", "context_length", "d"),
        ("drafts", "num_drafts", "d"),
        ("request-steps/s", "request_steps_per_s", ",.1f"),
        ("tokens/step, measured", "tokens_per_request_step", ".3f"),
        ("tokens/s", "tokens_per_s", ",.1f"),
        ("per user", "tokens_per_s_per_user", ",.1f"),
        ("per device", "tokens_per_s_per_device", ",.1f"),
        ("step ms p50", "step_ms_p50", ".2f"),
        ("p90", "step_ms_p90", ".2f"),
        ("p99", "step_ms_p99", ".2f"),
        ("TTFT ms p50", "ttft_ms_p50", ".1f"),
        ("TPOT ms p50", "tpot_ms_p50", ".2f"),
        ("host ms", "host_ms_per_step", ".3f"),
        ("device idle", "device_idle_share", ".2%"),
        ("peak GiB", "peak_gib", ".1f"),
        ("steps (dropped)", "steps", "s"),
    ),
    "prefill": (
        ("tokens/step", "prefill_batch_size", "d"),
        ("context", "context_length", "d"),
        ("uncached", "uncached", "d"),
        ("tokens/s", "prefill_tokens_per_s", ",.0f"),
        ("per device", "prefill_tokens_per_s_per_device", ",.0f"),
        ("step ms p50", "step_ms_p50", ".2f"),
        ("p90", "step_ms_p90", ".2f"),
        ("p99", "step_ms_p99", ".2f"),
        ("TTFT ms p50", "ttft_ms_p50", ".1f"),
        ("host ms", "host_ms_per_step", ".3f"),
        ("device idle", "device_idle_share", ".2%"),
        ("peak GiB", "peak_gib", ".1f"),
        ("steps (dropped)", "steps", "s"),
    ),
    "trace": (
        ("arrivals", "arrivals", "s"),
        ("drafts", "num_drafts", "d"),
        ("requests/s", "requests_per_s", ".2f"),
        ("tokens/s", "tokens_per_s", ",.1f"),
        ("per device", "tokens_per_s_per_device", ",.1f"),
        *(
            (f"{title} ms {share}", f"{key}_ms_{share}", ".1f")
            for title, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("in all", "total"))
            for share in ("p50", "p90", "p99")
        ),
    ),
}
_ASSUMED = (
    ("assumed acceptance", "assumed_acceptance", ".2f"),
    ("assumed tokens/step", "assumed_tokens_per_request_step", ".3f"),
    ("assumed per user", "assumed_tokens_per_s_per_user", ",.1f"),
    ("assumed per device", "assumed_tokens_per_s_per_device", ",.1f"),
)
_PUBLISHED = (("published ms", "published_step_ms", ".2f"), ("of it", "step_of_published", ".2f"))


def machine() -> dict[str, Any]:
    """What ran the measurement."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else _cpu_name(),
        "instructions": None if gpu else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "deepinfer": __version__,
    }


def write_line(file: Path | None, result: dict[str, Any]) -> None:
    """Append a JSON line; nothing without a file."""
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(result) + "\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results of one phase in Markdown; columns that no result has are left out."""
    columns = [*_COLUMNS[results[0]["phase"]], *_ASSUMED, *_PUBLISHED]
    rows = [
        {**each, "steps": f"{each.get('num_steps')} ({each.get('num_dropped_steps')})"} for each in results
    ]
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    lines = [
        "| " + " | ".join(title for title, _, _ in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [_cell(row, key, form) for _, key, form in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def name(setting: dict[str, Any]) -> str:
    """What tells a setting from the others of a run."""
    if setting["phase"] == "prefill":
        return f"{setting['prefill_batch_size']} tokens a step"
    if setting["phase"] == "decode":
        return f"{setting['num_requests']} requests, {setting['num_drafts']} drafts"
    return f"{setting['arrivals']}, {setting['num_drafts']} drafts"


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    is_void = key.startswith("tokens_per") and row.get("tokens_are_meaningful") is False
    return format(value, form) + (" (random weights)" if is_void else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
