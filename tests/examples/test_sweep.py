"""The sweep runs every setting by itself, goes on after a failure and says so; charts need matplotlib."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.sweep import plot_pareto
from tests.support.paths import ROOT

# Stands for the interpreter: notes its arguments; settings of 4 requests fail.
STUB = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *"--decode_num_requests 4"*) echo no room >&2; exit 1;; esac
"""


def sweep(
    tmp_path: Path, *arguments: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    calls = tmp_path / "calls"
    env = os.environ | {"PYTHON": str(stub), "CALLS": str(calls)} | variables
    command = [str(ROOT / "examples/sweep/run_sweep.sh"), *arguments]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return result, calls.read_text().splitlines() if calls.exists() else []


def test_every_setting_runs_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = {"REQUESTS": "1 4", "DRAFTS": "0 3", "BATCHES": "64"}
    result, calls = sweep(tmp_path, str(out), "--steps", "7", **options)
    assert result.returncode == 1
    assert "failed: decode, 4 requests, 0 drafts\nfailed: decode, 4 requests, 3 drafts" in result.stderr
    assert "no room" in result.stderr
    *measured, plotted = calls
    asked = [call.partition(f"--output {out}/results.jsonl ")[2] for call in measured]
    assert asked == [
        "--steps 7 --phases prefill --prefill_batch_size 64",
        *(
            f"--steps 7 --phases decode --decode_num_requests {count} --speculation {drafts}"
            for count in (1, 4)
            for drafts in (0, 3)
        ),
    ]
    assert plotted.endswith(f"plot_pareto.py {out}/results.jsonl --output {out}")


def test_a_sweep_needs_a_directory(tmp_path: Path) -> None:
    result, calls = sweep(tmp_path)
    assert (result.returncode, calls) == (2, []) and "OUT" in result.stderr


def test_charts_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "results.jsonl"
    file.write_text(
        '{"phase": "decode", "tokens_per_s_per_user": 2.0, "tokens_per_s_per_device": 4.0, "num_drafts": 0}\n'
    )
    assert plot_pareto.main([str(file), "--output", str(tmp_path)]) == 2
    assert "pip install -e .[bench]" in capsys.readouterr().err
    assert "tokens_per_s_per_user" in (tmp_path / "decode.csv").read_text()
    file.write_text('{"no": "result"}\n')
    assert plot_pareto.main([str(file), "--output", str(tmp_path)]) == 2
    assert "line 1: no result" in capsys.readouterr().err
