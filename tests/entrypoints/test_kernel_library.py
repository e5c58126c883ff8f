"""DEEPINFER_KERNEL_LIBRARY reaches the kernels when an engine is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.engine import parts
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.settings import Settings
from tests.support.paths import V41_TINY


class Reached(Exception):
    """The step after the one that is tested."""


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """What the kernels were told; nothing is loaded after that."""
    told: list[Path | None] = []
    monkeypatch.setattr(parts, "use_library", told.append)

    def stop(*args: object) -> None:
        raise Reached

    monkeypatch.setattr(parts, "open_checkpoint", stop)
    return told


@pytest.mark.parametrize("is_named", [True, False])
def test_the_directory_is_handed_down(is_named: bool, named: list[Path | None], tmp_path: Path) -> None:
    settings = replace(Settings(), kernel_library=str(tmp_path) if is_named else None)
    with pytest.raises(Reached):
        parts.build_parts(EngineArgs(str(V41_TINY)), settings)
    assert named == [tmp_path if is_named else None]


def test_a_directory_that_is_not_there_is_an_error(named: list[Path | None], tmp_path: Path) -> None:
    settings = replace(Settings(), kernel_library=str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"DEEPINFER_KERNEL_LIBRARY=.*missing is no directory"):
        parts.build_parts(EngineArgs(str(V41_TINY)), settings)
    assert named == []
