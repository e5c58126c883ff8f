"""The table of operators in doc/kernels.md, made from the tree.

python -m tests.support.kernel_table      brings the page up to date
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT
from tilelang_ops.build import factories
from tilelang_ops.common.kernels import ASCEND_TARGET, CUDA_TARGETS
from tilelang_ops.common.sizes import RELEASE

OPS = ROOT / "tilelang_ops"
TESTS = ROOT / "tests"
PAGE = ROOT / "doc" / "kernels.md"
HEAD = "| Operator | What | Kernels | Targets | Programs | Tests |"


def table() -> str:
    """One line an operator, in the order of the folders."""
    lines = [HEAD, "|---|---|---|---|---|---|"]
    for folder in operators():
        op = f"{folder.parent.name}.{folder.name}"
        files = [path for name in ("cuda", "ascend") if (path := folder / f"{name}.py").exists()]
        kernels = ", ".join(f"[{path.stem}](../{path.relative_to(ROOT)})" for path in files)
        counts = program_counts(op)
        targets = ", ".join(counts) or "-"
        programs = str(max(counts.values(), default="-"))
        if files and not counts:
            programs = " ".join(f"by `{other}`" for other in lenders(files[0])) or "-"
        tests = ", ".join(f"[{test.stem}](../{test.relative_to(ROOT)})" for test in covering(op))
        cells = (f"`{op}`", meaning(folder), kernels or "reference only", targets, programs, tests)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def operators() -> list[Path]:
    """Folders of all operators."""
    return sorted(path.parent for path in OPS.glob("*/*/op.py"))


def meaning(folder: Path) -> str:
    """First line of the operator's page, without its full stop."""
    module = importlib.import_module(f"tilelang_ops.{folder.parent.name}.{folder.name}.op")
    return module.__doc__.splitlines()[0].rstrip(".").replace("|", "\\|")


@cache
def _all_counts() -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for target in (*CUDA_TARGETS, ASCEND_TARGET):
        for factory in factories(target):
            family, op = factory.make.__module__.split(".")[1:3]
            of_op = counts.setdefault(f"{family}.{op}", {})
            of_op[target] = of_op.get(target, 0) + len(factory.builds(RELEASE))
    return counts


def program_counts(op: str) -> dict[str, int]:
    """Targets that an operator has factories for, and how many programs the release model needs of each."""
    return _all_counts().get(op, {})


def lenders(file: Path) -> list[str]:
    """Operators whose kernels a backend module launches in place of its own."""
    parts = {tuple(module.split(".")) for module, _ in _imports(file)}
    return sorted(
        f"{part[1]}.{part[2]}"
        for part in parts
        if len(part) == 4 and part[::3] == ("tilelang_ops", file.stem)
    )


@cache
def covering(op: str) -> list[Path]:
    """Tests that import an operator's modules or its function: those of its kernels, then of its meaning."""
    family, name = op.split(".")
    wanted = (f"tilelang_ops.{family}.{name}", f"tilelang_ops.{family}")
    found = []
    for room in (f"kernels/{family}", "ops"):
        for path in sorted((TESTS / room).rglob("test_*.py")):
            for module, imported in _imports(path):
                if module.startswith(wanted[0]) or (module == wanted[1] and imported == name):
                    found.append(path)
                    break
    return found


@cache
def _imports(path: Path) -> list[tuple[str, str]]:
    return list(_read_imports(path))


def _read_imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name
                yield f"{node.module}.{alias.name}", ""


def update_page() -> None:
    """Put the table of now into the page, in place of the one that stands there."""
    before, rest = PAGE.read_text().split(HEAD, 1)
    PAGE.write_text(f"{before}{table()}{rest[rest.index(chr(10) * 2) + 1 :]}")


if __name__ == "__main__":
    update_page()
