"""Rewrite the source of a kernel's function once, not each time that it is traced.

TileLang parses and rewrites a function wherever `T.macro` or `T.prim_func` meets its definition. Kernels
define theirs inside of functions, so every trace does it anew, which takes most of its time. What comes out
depends on a function's code and on what some names in it stand for; where these stand for the same, it is
taken again.
"""

from __future__ import annotations

import ast as syntax
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class _Rewritten:
    """Code of one function after TileLang's passes over its text.

    Attributes:
        names: of the variables around it.
        evaluated: expressions that the passes have looked at, and what they were.
        make: gives the function for values of `names`.
        source: for messages.
    """

    names: tuple[str, ...]
    evaluated: tuple[tuple[Any, Any], ...]
    make: Callable[..., Any]
    source: str


class MacroCache:
    """What functions were rewritten to.

    Attributes:
        taken: functions that were not rewritten because their code was known.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._known: dict[CodeType, _Rewritten] = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While it is entered, TileLang takes what is known."""
        from tilelang.language.eager import ast, builder

        rewrite, evaluate = ast.mutate, ast._try_eval

        def mutate(function: Any) -> Any:
            around = ast.utils.get_func_nonlocals(function)
            known = self._known.get(function.__code__)
            if (
                known is not None
                and known.names == tuple(around)
                and all(evaluate(e, around, function.__globals__) is was for e, was in known.evaluated)
            ):
                self.taken += 1
                return ast.IRGenerator(gen=known.make(**around), source=known.source)
            return self._rewrite(rewrite, function, tuple(around))

        with mock.patch.object(builder, "mutate", mutate):
            yield

    def _rewrite(self, rewrite: Any, function: Any, names: tuple[str, ...]) -> Any:
        from tilelang.language.eager import ast

        compiled, evaluate = ast.utils.get_compiled_object, ast._try_eval
        made: list[Any] = []
        evaluated: list[tuple[Any, Any]] = []

        def noted(*args: Any) -> Any:
            made.append(compiled(*args))
            return made[-1]

        def looked_at(node: Any, *args: Any) -> Any:
            as_it_is = syntax.parse(syntax.unparse(node), mode="eval").body  # it may be rewritten, too
            evaluated.append((as_it_is, evaluate(node, *args)))
            return evaluated[-1][1]

        with (
            mock.patch.object(ast.utils, "get_compiled_object", noted),
            mock.patch.object(ast, "_try_eval", looked_at),
        ):
            result = rewrite(function)
        if not result.extra_type_hints:  # they hold values of their own
            self._known[function.__code__] = _Rewritten(names, tuple(evaluated), made[-1], result.source)
        return result
