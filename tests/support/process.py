"""Runs of programs in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import ROOT


def clean_env(**changes: str | None) -> dict[str, str]:
    """The process's environment without any DEEPINFER_ variable; None in `changes` removes a name."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def run(
    command: list[str | os.PathLike[str]],
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run to the end; text output, no shell, no standard input."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_env() if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def run_python(code: str, env: Mapping[str, str] | None = None) -> str:
    """Run a snippet in a new interpreter of this environment; it has to succeed. Returns what it printed."""
    result = run([sys.executable, "-c", code], env=env)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
