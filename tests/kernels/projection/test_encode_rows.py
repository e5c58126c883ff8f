"""encode_rows' kernel: each step against its reference, the bytes against the encoding of the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.norm.rms_norm import cuda as rms_norm
from tilelang_ops.projection.encode_rows import Norm, Records, Rotation, cuda, reference

EPS = 1e-6


def _values(num_rows: int, width: int) -> Tensor:
    x = torch.randn(num_rows, width) * torch.logspace(-6, 6, num_rows)[:, None]
    x[0, :16] = 0.0
    return x.bfloat16()


def _rotation(num_rows: int, pairs: int, inverse: bool = False) -> Rotation:
    angles = 100 * torch.rand(num_rows, pairs)
    return Rotation(angles.cos(), angles.sin(), inverse)


@pytest.mark.parametrize(("format", "width"), [("fp8", 64), ("mxfp4", 64), ("fp4", 64)])
def test_bytes_of_given_values(run_kernel: KernelRunner, format: str, width: int) -> None:
    x = _values(21, width)
    x[5, 3], x[6, 40], x[7, 20] = torch.inf, -torch.inf, torch.nan
    actual, _ = run_kernel.overhanging()(cuda, x, format, None, None, None, False)
    expected = reference.run(x, format, None, None, None, False)
    assert_same_bits(actual.scales, expected.scales, "scales")
    finite = torch.ones(21, dtype=torch.bool)
    finite[5:8] = False  # the codes of a group whose scale is NaN mean nothing
    assert_same_bits(actual.codes[finite], expected.codes[finite], "codes")


def test_heads_and_inverse(run_kernel: KernelRunner) -> None:
    """Several vectors of a row share its rotation, which is exact for quarter turns."""
    x = _values(12, 64).view(4, 3, 64)
    turns = torch.randint(0, 4, (4, 16))
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0])[turns]
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0])[turns]
    for inverse in (False, True):
        rotation = Rotation(cos, sin, inverse)
        actual, _ = run_kernel.overhanging()(cuda, x, "fp8", None, rotation, None, False)
        expected = reference.run(x, "fp8", None, rotation, None, False)
        assert_same_bits(actual.scales, expected.scales, "scales")
        assert_same_bits(actual.codes, expected.codes, "codes")
    alone, _ = run_kernel.overhanging()(
        cuda, x[2:3], "fp8", None, Rotation(cos[2:3], sin[2:3], True), None, False
    )
    assert_same_bits(alone.codes[0], actual.codes[2], "a row alone")


def _pool(parts: int, records: int, fields: int, section: int) -> Tensor:
    """[parts, records, fields] of a larger allocation whose other bytes are 7."""
    whole = torch.full((parts * section,), 7, dtype=torch.uint8)
    return whole.as_strided((parts, records, fields), (section, fields, 1))


@pytest.mark.parametrize("format", ["fp8", "fp4", "mxfp4"])
def test_norm_rotate_store(run_kernel: KernelRunner, format: str) -> None:
    """A pool holds the bytes of the kernel's own vectors, and nothing else changes in it.

    FP8 vectors are columns of longer rows.
    """
    num_rows, width, pairs = 7, 64, 16
    x = _values(num_rows, width)
    if format == "fp8":
        x = torch.cat([torch.zeros(num_rows, 32).bfloat16(), x], 1)[:, 32:]
    norm = Norm(torch.rand(width) + 0.5, EPS)
    rotation = _rotation(num_rows, pairs)
    index = torch.tensor([14, -1, 0, 3, 7, -1, 9])
    fields = {"fp8": 66, "fp4": 36, "mxfp4": 32}[format]
    codes = _pool(4, 4, fields, 6 * fields)
    scales = _pool(4, 4, 2, 10) if format == "mxfp4" else None
    result, after = run_kernel.overhanging()(
        cuda, x, format, norm, rotation, Records(codes, scales, index), True
    )
    records = after[4]
    normed, _ = run_kernel.overhanging()(rms_norm, x, norm.weight, EPS)
    torch.testing.assert_close(result.normed.float(), normed.float(), rtol=2.0**-7, atol=0.0)
    # What is stored: rotation and encoding of the normed vectors. Rotations may round to a neighbour, so
    # vectors with quarter turns are compared bit for bit and the others by value elsewhere.
    expected = Records(codes.clone(), None if scales is None else scales.clone(), index)
    expected.codes.copy_(codes)
    whole = _pool(4, 4, fields, 6 * fields)
    whole_scales = _pool(4, 4, 2, 10) if scales is not None else None
    reference.run(result.normed, format, None, rotation, Records(whole, whole_scales, index), False)
    differs = (records.codes != whole).sum() + (
        0 if scales is None else (records.scales != whole_scales).sum()
    )
    assert differs <= 2, f"{differs=} of {records.codes.numel()}"
    untouched = torch.ones(16, dtype=torch.bool)
    untouched[index[index >= 0]] = False
    assert (records.codes.reshape(16, -1)[untouched] == 7).all()


def test_float_records(run_kernel: KernelRunner) -> None:
    x = _values(3, 64)
    pool = torch.zeros(2, 4, 64)
    index = torch.tensor([6, -1, 1])
    _, after = run_kernel.overhanging()(cuda, x, "fp8", None, None, Records(pool, None, index), False)
    expected = pool.clone()
    expected.view(-1, 64)[[6, 1]] = x[[0, 2]].float()
    assert_same_bits(after[4].codes, expected)
