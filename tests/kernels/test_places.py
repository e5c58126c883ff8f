"""Kernels are emulated for every architecture for which their programs differ."""

from __future__ import annotations

import inspect

from tests.support.kernel_runs import WITH_VARIANTS
from tilelang_ops.build import factories
from tilelang_ops.common.kernels import CUDA_TARGETS


def test_only_these_have_programs_of_an_architecture() -> None:
    found = set()
    for target in CUDA_TARGETS:
        for factory in factories(target):
            if "arch" in inspect.signature(factory.make).parameters or set(CUDA_TARGETS) - set(
                factory.targets
            ):
                family = factory.name.partition(".")[0]
                found.add(family if family in WITH_VARIANTS else factory.name)
    assert found == set(WITH_VARIANTS)
