"""CPU kernels of the row operators against their torch references; rows that ignore their batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from deepinfer.ops import rows
from deepinfer.ops.norm import rms_norm, rms_norm_reference
from deepinfer.ops.quant import encode_mxfp4, round_mxfp4
from tests.support.compare import assert_same_bits
from tilelang_ops.common.dispatch import UnsupportedOpError
from tilelang_ops.common.numerics import decode_mxfp4, encode_fp4, encode_fp8
from tilelang_ops.engram.gate_streams import reference as gate_reference
from tilelang_ops.hyper_connection.advance_streams import reference as advance_reference
from tilelang_ops.hyper_connection.collapse_streams import reference as collapse_reference
from tilelang_ops.hyper_connection.expand_streams import reference as expand_reference
from tilelang_ops.hyper_connection.mix_coefficients import reference as mix_reference
from tilelang_ops.moe.route_topk import reference as route_reference
from tilelang_ops.moe.swiglu import reference as swiglu_reference
from tilelang_ops.projection.rotate import reference as rotate_reference

FLOATS = [torch.float32, torch.bfloat16]
ROWS = [0, 1, 5, 70]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Float32 to a few units in the last place of the largest value; bfloat16 to one of its own units."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{actual.shape=} {expected.shape=}"
    )
    rtol, atol = (1e-2, 1e-2) if actual.dtype == torch.bfloat16 else (2e-6, 2e-6)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", [1, 16, 100, 1024])
def test_rms_norm(instruction_set: str, num_rows: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(num_rows, width) * torch.logspace(-3, 3, num_rows)[:, None]).to(dtype)
    weight = torch.randn(width)
    expected = rms_norm_reference(x, weight, 1e-20, torch.float64)
    assert_close(rms_norm(x, weight, 1e-20), expected.to(dtype))
    wide = torch.zeros(num_rows, 2 * width + 1, dtype=dtype)
    wide[:, 1 : width + 1] = x
    assert_same_bits(rms_norm(wide[:, 1 : width + 1], weight, 1e-20), rms_norm(x, weight, 1e-20))
    stacked = x.unsqueeze(1).repeat(1, 3, 1)
    assert_same_bits(rms_norm(stacked, weight, 1e-20)[:, 2].contiguous(), rms_norm(x, weight, 1e-20))


def test_rms_norm_of_zeros_and_faults(instruction_set: str) -> None:
    x = torch.zeros(3, 32)
    x[1, 4] = torch.nan
    out = rms_norm(x, torch.ones(32), 1e-20)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 32)) and torch.isnan(out[1]).all()
    with pytest.raises(UnsupportedOpError, match="meta"):
        rms_norm(x.to("meta"), torch.ones(32), 1e-20)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 512), (6, 4, 512), (33, 8, 128), (3, 2, 5, 70)])
@pytest.mark.parametrize("pairs", [1, 5, 32])
def test_rotate(instruction_set: str, shape: tuple[int, ...], pairs: int, dtype: torch.dtype) -> None:
    angle = torch.randn(shape[0], pairs) * 10
    x = torch.randn(shape).to(dtype)
    actual, expected = x.clone(), x.double()
    rows.rotate(actual, angle.cos(), angle.sin(), False)
    rotate_reference.run(expected, angle.cos().double(), angle.sin().double(), False)
    assert_close(actual, expected.to(dtype))
    assert_same_bits(actual[..., : -2 * pairs], x[..., : -2 * pairs])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("streams", "width"), [(1, 16), (2, 40), (4, 256), (8, 33)])
def test_streams(instruction_set: str, num_rows: int, streams: int, width: int, dtype: torch.dtype) -> None:
    values, output = torch.randn(num_rows, streams, width).to(dtype), torch.randn(num_rows, width).to(dtype)
    pre, post = torch.rand(num_rows, streams), torch.rand(num_rows, streams)
    comb = torch.rand(num_rows, streams, streams)
    expected = advance_reference.run(values, pre, output, post, comb)
    for actual, wanted in zip(rows.advance_streams(values, pre, output, post, comb), expected):
        assert_close(actual, wanted)
    assert_close(
        rows.expand_streams(values, output, post, comb), expand_reference.run(values, output, post, comb)
    )
    assert_close(rows.collapse_streams(values, pre), collapse_reference.run(values, pre))
    for actual, wanted in zip(
        rows.advance_streams(values, pre, None, None, None),
        advance_reference.run(values, pre, None, None, None),
    ):
        assert_close(actual, wanted)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_mix_coefficients(instruction_set: str, num_rows: int, streams: int, rounds: int) -> None:
    width = (2 + streams) * streams
    args = (
        4 * torch.randn(num_rows, width),
        torch.rand(num_rows) + 0.1,
        torch.randn(width),
        torch.randn(width),
    )
    sizes = streams, rounds, 1e-6, 1e-20
    expected = mix_reference.run(*(arg.double() for arg in args), *sizes)
    for actual, wanted in zip(rows.mix_coefficients(*args, *sizes), expected):
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=1e-5, atol=1e-6)


def test_mix_coefficients_limits_streams() -> None:
    with pytest.raises(ValueError, match="streams"):
        rows.mix_coefficients(
            *(torch.ones(1, 99), torch.ones(1), torch.ones(99), torch.ones(99)), 9, 1, 0.0, 0.0
        )


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("experts", "selected"), [(1, 1), (16, 4), (17, 17), (384, 6)])
def test_route_topk(instruction_set: str, num_rows: int, experts: int, selected: int) -> None:
    logits, bias, image_bias = 3 * torch.randn(num_rows, experts), torch.randn(experts), torch.randn(experts)
    for is_image in (None, torch.rand(num_rows) < 0.5):
        ids, weights = rows.route_topk(logits, bias, selected, 1.5, image_bias, is_image)
        expected_ids, expected = route_reference.run(
            logits.double(), bias, selected, 1.5, image_bias, is_image
        )
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights.double(), expected.double(), rtol=1e-6, atol=0)


def test_scores_over_the_whole_range(instruction_set: str) -> None:
    """With every expert chosen and no bias, ratios of weights show each score; below -87 e^x is subnormal."""
    logits = torch.cat([torch.linspace(-86, 100, 4001), torch.linspace(-1, 1, 999)])[None]
    ids, weights = rows.route_topk(logits, torch.zeros(5000), 5000, 1.0, None, None)
    scores = torch.nn.functional.softplus(logits.double(), threshold=1e9).sqrt()[0]
    actual = torch.empty(5000, dtype=torch.float64)
    actual[ids[0].long()] = weights[0].double()
    torch.testing.assert_close(actual / actual.sum(), scores / scores.sum(), rtol=2e-6, atol=0)


def test_router_ties_and_faults(instruction_set: str) -> None:
    logits = torch.zeros(3, 20)
    logits[1, 6] = torch.nan
    ids, weights = rows.route_topk(logits, torch.zeros(20), 3, 1.0, None, None)
    assert ids.tolist() == [[0, 1, 2], [6, 0, 1], [0, 1, 2]]
    assert torch.isnan(weights).any(1).tolist() == [False, True, False]
    ids, _ = rows.route_topk(torch.full((1, 20), torch.nan), torch.zeros(20), 20, 1.0, None, None)
    assert ids[0].tolist() == list(range(20))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", [8, 16, 129])
def test_swiglu(instruction_set: str, num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up, weight = (4 * torch.randn(num_rows, 2 * width)).to(dtype), torch.rand(num_rows)
    for out_dtype, factor in itertools.product(FLOATS, (None, weight)):
        expected = swiglu_reference.run(gate_up, 2.5, torch.float32, factor)
        assert_close(rows.swiglu(gate_up, 2.5, out_dtype, factor), expected.to(out_dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("streams", "width"), [(1, 16), (4, 256), (2, 40)])
def test_gate_streams(
    instruction_set: str, num_rows: int, streams: int, width: int, dtype: torch.dtype
) -> None:
    values = torch.randn(num_rows, streams, width).to(dtype)
    key_value, weight = torch.randn(num_rows, (streams + 1) * width).to(dtype), torch.randn(streams, width)
    expected = gate_reference.run(values, key_value, weight, 1e-20)
    assert_close(rows.gate_streams(values, key_value, weight, 1e-20), expected)


def samples(width: int) -> Tensor:
    """Rows of normal values of every size, of values between codes and at midpoints, zeros, signs, faults."""
    x = torch.randn(60, width) * torch.logspace(-44, 37, 60)[:, None]
    x[7], x[8], x[9] = 0.0, -0.0, torch.arange(width) / 8 - 13
    x[10], x[11] = torch.randint(-24, 25, (width,)) / 4, torch.randint(-2000, 2000, (width,)) / 4
    x[12, ::5], x[13, 3], x[14, 0], x[15, 40] = 0.0, torch.inf, -torch.inf, torch.nan
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("encoding", "encode", "code_width", "group"),
    [(rows.FP8, encode_fp8, 1.0, 32), (rows.FP4, encode_fp4, 0.5, 16), (rows.MXFP4, encode_mxfp4, 0.5, 32)],
)
def test_encoders(
    instruction_set: str, encoding: int, encode: Callable, code_width: float, group: int, dtype: torch.dtype
) -> None:
    x = samples(128).to(dtype)
    codes = torch.full((4, 20, int(128 * code_width)), 0xAA, dtype=torch.uint8)
    scales = torch.full((4, 20, 128 // group), 0xAA, dtype=torch.uint8)
    index = torch.randperm(80)[:60]
    rows._store(x, encoding, codes, scales, index)
    expected_codes, expected_scales = encode(x)
    assert torch.equal(scales.flatten(0, 1)[index], expected_scales)
    # A group with a NaN scale is NaN whatever its codes.
    nan_scale = 0x7F if encoding == rows.FP4 else 0xFF
    is_number = (expected_scales != nan_scale).repeat_interleave(int(group * code_width), dim=1)
    assert torch.equal(codes.flatten(0, 1)[index][is_number], expected_codes[is_number])
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[index] = False
    assert bool(
        (codes.flatten(0, 1)[untouched] == 0xAA).all() and (scales.flatten(0, 1)[untouched] == 0xAA).all()
    )


def test_store_skips_and_checks_records(instruction_set: str) -> None:
    codes, scales = torch.zeros(2, 3, 64, dtype=torch.uint8), torch.zeros(2, 3, 2, dtype=torch.uint8)
    rows._store(torch.ones(3, 64), rows.FP8, codes, scales, torch.tensor([-1, 4, -1]))
    assert scales.flatten(0, 1).any(1).nonzero().flatten().tolist() == [4]
    with pytest.raises(IndexError, match="past its pool"):
        rows._store(torch.ones(1, 64), rows.FP8, codes, scales, torch.tensor([6]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_mxfp4(instruction_set: str, dtype: torch.dtype) -> None:
    x = samples(128).to(dtype)
    expected = decode_mxfp4(*encode_mxfp4(x)).to(dtype)
    torch.testing.assert_close(round_mxfp4(x), expected, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(round_mxfp4(x.view(10, 6, 128))[3], round_mxfp4(x)[18:24])


def cases() -> dict[str, Callable[[slice], tuple[Tensor, ...]]]:
    """Each operator on a slice of 67 fixed rows."""
    streams, output = torch.randn(67, 4, 256), torch.randn(67, 256)
    pre, comb, mixes = torch.rand(67, 4), torch.rand(67, 4, 4), torch.randn(67, 24)
    x, angle = torch.randn(67, 3, 70), torch.randn(67, 32)
    key_value, logits = torch.randn(67, 5 * 256), torch.randn(67, 50)

    def turned(part: slice) -> tuple[Tensor, ...]:
        copy = x[part].clone()
        rows.rotate(copy, angle[part].cos(), angle[part].sin(), False)
        return (copy,)

    weight, scale, bias = torch.randn(256), torch.randn(24), torch.randn(50)
    return {
        "norm": lambda part: (rms_norm(output[part], weight, 1e-6),),
        "rotate": turned,
        "streams": lambda part: rows.advance_streams(
            streams[part], pre[part], output[part], pre[part], comb[part]
        ),
        "mix": lambda part: rows.mix_coefficients(mixes[part], pre[part, 0], scale, scale, 4, 20, 1e-6, 0.0),
        "route": lambda part: rows.route_topk(logits[part], bias, 4, 1.5, None, None),
        "swiglu": lambda part: (rows.swiglu(key_value[part, :258], 1.0, torch.float32, pre[part, 0]),),
        "gate": lambda part: (rows.gate_streams(streams[part], key_value[part], streams[0], 1e-6),),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_rows_ignore_their_batch(with_threads, name: str) -> None:
    run = cases()[name]
    with_threads(1)
    whole = run(slice(0, 67))
    for num_threads, size in itertools.product((1, 2, 4), (1, 3, 16, 67)):
        with_threads(num_threads)
        parts = [run(slice(start, start + size)) for start in range(0, 67, size)]
        for actual, expected in zip(map(torch.cat, zip(*parts)), whole):
            assert_same_bits(actual, expected, f"{num_threads=} {size=}")


def test_kernels_serve_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `register` names exists and is what dispatch hands out."""
    from tilelang_ops.common import dispatch

    registered: dict[str, Callable] = {}
    monkeypatch.setattr(
        rows, "register_backend", lambda package, device, run: registered.update({package: run})
    )
    rows.register()
    assert len(registered) == 13
    for package, run in registered.items():
        module = dispatch.import_module(f"{package}.reference")
        assert isinstance(module, ModuleType)
        assert dispatch.backend(package, torch.device("cpu")).run is run
