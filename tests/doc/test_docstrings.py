"""Every public name says what it is: the package's own names, their methods, and all operators."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deepinfer
from tests.support.paths import ROOT

CLASSES = [name for name in deepinfer.__all__ if inspect.isclass(getattr(deepinfer, name))]
OPERATORS = sorted(path.parent for path in (ROOT / "tilelang_ops").glob("*/*/op.py"))
COMMON = sorted(path for path in (ROOT / "tilelang_ops" / "common").glob("*.py") if path.stem != "__init__")


def function_of(member: Any) -> Callable[..., Any] | None:
    """The function behind a method; None for anything else."""
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    return member if inspect.isfunction(member) else None


def methods_of(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods that a class of this package defines, inherited ones included."""
    for base in cls.__mro__:
        if base.__module__.startswith("deepinfer"):
            for name, member in vars(base).items():
                function = function_of(member)
                if not name.startswith("_") and function is not None:
                    yield name, function


def test_there_is_something_to_look_at() -> None:
    assert {"LLM", "LLMEngine", "EngineArgs", "SamplingParams"} <= set(CLASSES)
    assert dict(methods_of(deepinfer.LLM)).keys() >= {"generate", "generate_iter", "chat", "close"}
    assert len(OPERATORS) > 15 and len(COMMON) >= 4


@pytest.mark.parametrize("name", CLASSES)
def test_classes_and_methods(name: str) -> None:
    cls = getattr(deepinfer, name)
    # A dataclass without a docstring gets its signature as one.
    assert cls.__doc__ and not cls.__doc__.startswith(f"{name}("), f"{name} has no docstring"
    silent = [method for method, function in methods_of(cls) if not function.__doc__]
    assert not silent, f"{name} has methods without a docstring: {silent}"


@pytest.mark.parametrize("folder", OPERATORS, ids=lambda path: path.name)
def test_operators(folder: Path) -> None:
    """The family gives out a function named as the operator, or several with that in their names."""
    family, op = folder.parent.name, folder.name
    members = vars(importlib.import_module(f"tilelang_ops.{family}"))
    functions = [f for name, f in members.items() if op in name and inspect.isfunction(f)]
    functions = [f for f in functions if f.__module__ == f"tilelang_ops.{family}.{op}.op"]
    assert functions, f"tilelang_ops.{family} gives out nothing of {op}"
    for function in functions:
        assert function.__doc__ and "Args:" in function.__doc__ and "[" in function.__doc__
        parameters = inspect.signature(function).parameters
        missing = [name for name in parameters if not re.search(rf"\b{name}\b", function.__doc__)]
        assert not missing, f"{function.__name__} does not explain {missing}"


@pytest.mark.parametrize("file", COMMON, ids=lambda path: path.stem)
def test_common_functions(file: Path) -> None:
    module = importlib.import_module(f"tilelang_ops.common.{file.stem}")
    assert module.__doc__
    for name, member in vars(module).items():
        is_own = getattr(member, "__module__", None) == module.__name__ and not name.startswith("_")
        if is_own and (inspect.isfunction(member) or inspect.isclass(member)):
            assert member.__doc__, f"{module.__name__}.{name} has no docstring"
