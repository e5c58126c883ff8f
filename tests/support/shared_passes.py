"""Lower a program for several architectures, and do once what does not depend on them.

Most of the time of lowering goes into passes that rewrite expressions and ask for no target. They meet the
same module for every architecture, until a pass before them has treated the architectures differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Passes that depend on the module alone, and take long enough for it to matter.
SHARED = frozenset(
    {
        "tl.Simplify",
        "tirx.Simplify",
        "tl.FlattenBuffer",
        "tl.LegalizeNegativeIndex",
        "tl.LegalizeSafeMemoryAccess",
        "tl.PlanAndUpdateBufferAllocationLocation",
        "tirx.RemoveNoOp",
        "s_tir.HoistIfThenElse",
        "s_tir.RenormalizeSplitPattern",
    }
)
Functions = dict[Any, Any]  # by their names


class SharedPasses:
    """What the passes of one program gave for the first architecture, for the others.

    Attributes:
        taken: passes that were not run because the same module was known.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._known: dict[tuple[str, int], tuple[Functions, Functions]] = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Around the lowering for one architecture."""
        from tvm.ir.transform import Pass

        run, calls = Pass.__call__, Counter[str]()

        def call(step: Pass, module: Any) -> Any:
            name = step.info.name
            if name not in SHARED:
                return run(step, module)
            calls[name] += 1
            return self._call(lambda: run(step, module), (name, calls[name]), module)

        Pass.__call__ = call
        try:
            yield
        finally:
            Pass.__call__ = run

    def _call(self, run: Any, place: tuple[str, int], module: Any) -> Any:
        """The result of a pass at its place in the pipeline, where it has the same options in each."""
        from tvm import IRModule
        from tvm.ir import structural_equal

        given = _without_targets(module)
        known = self._known.get(place)
        if known is not None and structural_equal(IRModule(given), IRModule(known[0])):
            self.taken += 1
            return IRModule(_with_targets_of(module, known[1]))
        result = run()
        if known is None:
            self._known[place] = given, _without_targets(result)
        return result


def _without_targets(module: Any) -> Functions:
    return {name.name_hint: function.without_attr("target") for name, function in module.functions.items()}


def _with_targets_of(module: Any, functions: Functions) -> Functions:
    targets = {name.name_hint: function.attrs["target"] for name, function in module.functions.items()}
    return {name: function.with_attr("target", targets[name]) for name, function in functions.items()}
