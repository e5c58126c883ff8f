"""Imports run the way that doc/architecture.md says: down the rooms, with the exceptions it names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# From the top; a room imports what stands behind it. All others are rooms at the side.
ORDER = ("entrypoints", "engine", "runtime", "models", "layers", "ops", "tilelang_ops")
LOWEST_FOR_SIDE = ORDER.index("ops")
EXCEPTIONS = {
    ("models", "runtime.batch"),
    ("models", "runtime.caches"),
    ("checkpoint", "models.registry"),
    ("calibrate", "entrypoints.calibrate"),
    ("replay_report", "entrypoints.replay_report"),
}
FILES = sorted(path for top in ("deepinfer", "tilelang_ops") for path in (ROOT / top).rglob("*.py"))


def room_of(module: str) -> str:
    """`deepinfer.engine.intake` -> "engine", `deepinfer.config` -> "config", `tilelang_ops.moe` -> itself."""
    parts = module.split(".")
    return parts[0] if parts[0] == "tilelang_ops" or len(parts) == 1 else parts[1]


def imports_of(file: Path) -> Iterator[str]:
    """Modules of this repository that a file imports when it runs; imports for type checkers left out."""
    tree = ast.parse(file.read_text())
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            names = [f"{node.module}.{alias.name}" if is_package else node.module for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in ("deepinfer", "tilelang_ops"))


def is_allowed(room: str, module: str) -> bool:
    """Whether a file of a room may import a module."""
    target = room_of(module)
    if target == room or (room, module.removeprefix("deepinfer.")) in EXCEPTIONS:
        return True
    if target not in ORDER:  # a room at the side
        return room != "tilelang_ops"
    return ORDER.index(target) > (ORDER.index(room) if room in ORDER else LOWEST_FOR_SIDE - 1)


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(file: Path) -> None:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    wrong = [name for name in imports_of(file) if not is_allowed(room_of(module), name)]
    assert not wrong, f"{module} imports {wrong}"


def test_the_rule_can_be_broken() -> None:
    assert not is_allowed("layers", "deepinfer.models.base")
    assert not is_allowed("models", "deepinfer.runtime.model_runner")
    assert not is_allowed("sampling", "deepinfer.layers.norm")
    assert not is_allowed("tilelang_ops", "deepinfer.config")
    assert is_allowed("engine", "deepinfer.sampling.seeds") and is_allowed("sampling", "tilelang_ops.moe")


def test_the_page_names_the_exceptions() -> None:
    page = (ROOT / "doc" / "architecture.md").read_text()
    paragraph = re.search(r"\*\*Imports go down\.\*\*.*?\n\n", page, re.DOTALL).group()
    for _, module in EXCEPTIONS:
        assert f"`{module}`" in paragraph, f"{module} is not named"
