"""encode_units' kernel against its meaning, byte by byte."""

from __future__ import annotations

import torch

from tests.support.kernel_runs import KernelRunner
from tests.support.row_codes import assert_same_units
from tilelang_ops.projection.encode_rows import Rotation
from tilelang_ops.projection.encode_units import cuda
from tilelang_ops.projection.rotate import reference as rotate


def test_encode_units(run_kernel: KernelRunner) -> None:
    """As they are, and turned by quarters, which is exact; zeros; a NaN; groups far apart in a unit."""
    x = (torch.randn(5, 384) * torch.logspace(-6, 6, 5)[:, None]).bfloat16()
    x[0, :200] = 0.0
    x[2, 128:160] *= 2.0**-9
    x[4, 3] = torch.nan
    run = run_kernel.overhanging()
    assert_same_units(run(cuda, x, None)[0], x)
    assert_same_units(run(cuda, x[:, :192].contiguous(), None)[0], x[:, :192])
    heads = x.view(5, 3, 128)
    turns = torch.randint(0, 4, (5, 16))
    cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0])[turns], torch.tensor([0.0, 1.0, 0.0, -1.0])[turns]
    for inverse in (False, True):
        rotated = heads.clone()
        rotate.run(rotated, cos, sin, inverse)
        assert_same_units(run(cuda, heads, Rotation(cos, sin, inverse))[0], rotated.flatten(1))
