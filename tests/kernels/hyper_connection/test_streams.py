"""The kernels of the residual streams against their references in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tests.support.row_codes import assert_same_units
from tilelang_ops.common.numerics import decode_fp8, encode_fp8
from tilelang_ops.common.packing import split_float32
from tilelang_ops.gemm.linear import cuda as linear
from tilelang_ops.hyper_connection.advance_norm import cuda as advance_norm
from tilelang_ops.hyper_connection.advance_streams import cuda as advance
from tilelang_ops.hyper_connection.collapse_streams import cuda as collapse
from tilelang_ops.hyper_connection.expand_streams import cuda as expand
from tilelang_ops.hyper_connection.mean_streams import cuda as mean
from tilelang_ops.hyper_connection.mean_streams import reference as mean_reference
from tilelang_ops.hyper_connection.mix_coefficients import cuda as mix
from tilelang_ops.hyper_connection.mix_coefficients.reference import sinkhorn
from tilelang_ops.hyper_connection.project_mix import cuda as project_mix
from tilelang_ops.hyper_connection.start_streams import cuda as start
from tilelang_ops.hyper_connection.start_streams import reference as start_reference
from tilelang_ops.moe import SlotOutputs


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """One rounding; sums of a few products may cancel, so the bound is absolute as well."""
    rtol, atol = (2.0**-8, 1e-5) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 48), (torch.float32, 10)])
def test_advance_expand_collapse(run_kernel: KernelRunner, dtype: torch.dtype, width: int) -> None:
    n, m = 3, 4
    streams, output = torch.randn(n, m, width).to(dtype), torch.randn(n, width).to(dtype)
    pre, post, comb = torch.rand(n, m), torch.rand(n, m), torch.rand(n, m, m)
    mixed = torch.einsum("nij,niw->njw", comb.double(), streams.double())
    expected = mixed + post.double().unsqueeze(-1) * output.double().unsqueeze(1)
    (new, vector, square), _ = run_kernel(advance, streams, pre, output, post, comb)
    _close(new, expected, dtype)
    _close(vector, (pre.double().unsqueeze(-1) * new.double()).sum(1), dtype)
    torch.testing.assert_close(square.double(), new.double().flatten(1).square().mean(-1), rtol=1e-5, atol=0)

    alone, _ = run_kernel(expand, streams, output, post, comb)
    assert_same_bits(alone, new, "expand")
    alone, _ = run_kernel(collapse, new, pre)
    assert_same_bits(alone, vector, "collapse")
    (same, alone, alone_square), _ = run_kernel(advance, new, pre, None, None, None)
    assert_same_bits(same, new, "nothing pending")
    assert_same_bits(alone, vector, "nothing pending")
    assert_same_bits(alone_square, square, "nothing pending")
    row = slice(1, 2)
    (alone, *_), _ = run_kernel(advance, streams[row], pre[row], output[row], post[row], comb[row])
    assert_same_bits(alone[0], new[1], "a row alone")


def test_advance_norm(run_kernel: KernelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams are those of `advance_streams`; the vector is the norm of its collapsed one."""
    n, m, width, eps = 3, 4, 96, 1e-6
    streams, output = torch.randn(n, m, width).bfloat16(), torch.randn(n, width).bfloat16()
    pre, post, comb = torch.rand(n, m), torch.rand(n, m), torch.rand(n, m, m)
    weight = torch.rand(width) + 0.5
    (new, vector, square), _ = run_kernel(advance, streams, pre, output, post, comb)
    wide = vector.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    actual, _ = run_kernel(advance_norm, streams, pre, weight, eps, output, post, comb, True, "codes")
    assert_same_bits(actual.streams, new, "streams")
    torch.testing.assert_close(actual.mean_square, square, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual.values.double(), expected, rtol=2.0**-8, atol=1e-7)
    codes, scales = encode_fp8(actual.values)
    assert_same_bits(actual.codes, codes, "codes")
    assert_same_bits(actual.scales, scales, "scales")
    slots = SlotOutputs(
        torch.randn(2 * n, width).bfloat16(),
        torch.randint(-1, 2 * n, (n, 6), dtype=torch.int32),
        torch.randn(n, width).bfloat16(),
    )
    whole, _ = run_kernel(
        advance_norm, streams, pre, weight, eps, slots.combined(), post, comb, True, "codes"
    )
    monkeypatch.setattr(advance_norm, "MANY_ROWS", n)
    parts, _ = run_kernel(advance_norm, streams, pre, weight, eps, slots, post, comb, True, "codes")
    for name in ("streams", "mean_square", "values", "codes", "scales"):
        assert_same_bits(getattr(parts, name), getattr(whole, name), f"{name} of slots")
    bare, _ = run_kernel(advance_norm, new[1:2], pre[1:2], weight, eps, None, None, None, False, "rounded")
    assert bare.values is bare.codes is None
    rounded = decode_fp8(actual.codes, actual.scales).bfloat16()
    assert_same_bits(bare.rounded[0], rounded[1], "a row alone, nothing pending, rounded")


def test_advance_norm_in_units(run_kernel: KernelRunner) -> None:
    streams, pre, weight = torch.randn(3, 4, 384).bfloat16(), torch.rand(3, 4), torch.rand(384) + 0.5
    streams[1], streams[2, :, 200] = 0.0, torch.nan
    actual, _ = run_kernel.overhanging()(
        advance_norm, streams, pre, weight, 1e-6, None, None, None, True, "units"
    )
    assert_same_units(actual.units, actual.values)


def test_mean_streams(run_kernel: KernelRunner) -> None:
    streams = torch.randn(3, 4, 48).bfloat16()
    features = torch.randn(3, 144).bfloat16()
    for target in (0, 2):
        expected = features.clone()
        mean_reference.run(streams, expected, target)
        _, (_, actual, _) = run_kernel(mean, streams, features, target)
        assert_same_bits(actual, expected, f"{target=}")


def test_start_streams(run_kernel: KernelRunner) -> None:
    table, ids = torch.randn(7, 40).bfloat16(), torch.tensor([6, 0, 3, 3], dtype=torch.int32)
    (streams, pre), _ = run_kernel(start, table, ids, 4, torch.bfloat16)
    expected, expected_pre = start_reference.run(table, ids, 4, torch.bfloat16)
    assert_same_bits(streams, expected, "streams")
    assert_same_bits(pre, expected_pre, "mix")


def test_project_mix(run_kernel: KernelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the product, then the mixes, whether many rows or few are summed."""
    m, width, eps = 4, 256, 1e-6
    scale, base = torch.randn(24), torch.randn(24)
    weight = split_float32(torch.randn(24, m * width) / 16)
    for n in (1, 9):
        streams, square = torch.randn(n, m, width).bfloat16(), torch.rand(n)
        projection, _ = run_kernel.overhanging()(linear, streams.flatten(1), weight, torch.float32, 3)
        expected, _ = run_kernel(mix, projection, square, scale, base, m, 20, eps, eps)
        actual, _ = run_kernel.overhanging()(
            project_mix, streams, weight, square, scale, base, 3, 20, eps, eps
        )
        for name, a, b in zip(("pre", "post", "comb"), actual, expected, strict=True):
            assert_same_bits(a, b, name)
    monkeypatch.setattr(linear, "MANY_ROWS", 1)
    many, _ = run_kernel.overhanging()(project_mix, streams, weight, square, scale, base, 3, 20, eps, eps)
    for name, a, b in zip(("pre", "post", "comb"), many, expected, strict=True):
        assert_same_bits(a, b, f"{name} of many rows")


def test_mix_coefficients(run_kernel: KernelRunner) -> None:
    m, eps, norm_eps = 4, 1e-6, 1e-6
    scale, base = torch.randn(24), torch.randn(24)
    for n in (1, 8, 19):
        projection, square = 10 * torch.randn(n, 24), torch.rand(n)
        actual, _ = run_kernel(mix, projection, square, scale, base, m, 20, eps, norm_eps)
        z = projection.double() / torch.sqrt(square.double() + norm_eps).unsqueeze(1)
        z = z * scale.double() + base.double()
        matrix = torch.softmax(z[:, 2 * m :].unflatten(1, (m, m)), dim=2) + eps
        expected = z[:, :m].sigmoid() + eps, 2 * z[:, m : 2 * m].sigmoid(), sinkhorn(matrix, 20, eps)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    alone, _ = run_kernel(mix, projection[9:10], square[9:10], scale, base, m, 20, eps, norm_eps)
    for a, b in zip(alone, actual, strict=True):
        assert_same_bits(a[0], b[9], "a row alone")
