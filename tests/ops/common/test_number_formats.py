"""FP8, MXFP4 and FP4: bytes against golden data, against exhaustive search and at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.ops.quant import (
    decode_fp4,
    decode_fp8,
    decode_mxfp4,
    encode_fp4,
    encode_fp8,
    encode_mxfp4,
    round_fp4,
    round_fp8,
    round_mxfp4,
)
from tests.support.compare import assert_same_bits
from tests.support.golden import TensorFile
from tilelang_ops.common.numerics import decode_e2m1, decode_e8m0, encode_e2m1

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FORMATS = {
    "fp8": (encode_fp8, decode_fp8, round_fp8, 32),
    "mxfp4": (encode_mxfp4, decode_mxfp4, round_mxfp4, 32),
    "fp4": (encode_fp4, decode_fp4, round_fp4, 16),
}


@pytest.mark.parametrize(
    ("golden_name", "name", "width"),
    [("window_kv", "fp8", 512), ("index_key", "mxfp4", 128), ("compressed_kv", "fp4", 512)],
)
def test_golden_bytes(units: TensorFile, golden_name: str, name: str, width: int) -> None:
    encode, decode, rounded, _ = FORMATS[name]
    x = units["formats/input"][:, :width]
    codes, scales = encode(x)
    assert_same_bits(codes, units[f"formats/{golden_name}/codes"])
    assert_same_bits(scales, units[f"formats/{golden_name}/scale_bytes"])
    expected = units[f"formats/{golden_name}/rounded"]
    assert_same_bits(rounded(x), expected)
    assert_same_bits(decode(codes, scales), expected.float())


def test_golden_gemm_input(units: TensorFile) -> None:
    assert_same_bits(round_fp8(units["formats/input"]), units["formats/gemm_input/rounded"])


def test_stated_fp4_group() -> None:
    """The example of the specification, bf16 inputs."""
    x = [0.1, -0.2, 0.3, 0.4, 0.5, -0.6, 0.7, 0.8, 0.9, 1, -1.1, 1.2, 1.3, 1.4, 1.5, 3.1]
    values = [0, -0.25, 0.25, 0.5, 0.5, -0.5, 0.75, 0.75, 1, 1, -1, 1, 1.5, 1.5, 1.5, 3]
    codes, scales = encode_fp4(torch.tensor(x).bfloat16())
    assert codes.tolist() == list(bytes.fromhex("9021a233444c5575"))
    assert scales.tolist() == [0x30]
    assert decode_fp4(codes, scales).tolist() == values


def test_stated_scales() -> None:
    group = torch.full((32,), 0.01)
    group[7] = -3.0
    assert encode_fp8(group)[1].tolist() == [120]
    group[7] = 0.9
    assert encode_mxfp4(group)[1].tolist() == [125]


def test_every_e2m1_pair() -> None:
    """256 bytes decode to pairs, low nibble first, and encode to themselves."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    signed = MAGNITUDES + [-value for value in MAGNITUDES]
    expected = torch.tensor([[signed[byte & 15], signed[byte >> 4]] for byte in range(256)])
    assert_same_bits(decode_e2m1(codes), expected)
    assert_same_bits(encode_e2m1(expected), codes)


def test_e2m1_is_nearest_with_ties_to_even() -> None:
    """Every multiple of 1/64 up to 8, and the floats next to each middle."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat(
        [
            torch.arange(0, 8, 1 / 64),
            torch.nextafter(middles, torch.tensor(0.0)),
            torch.nextafter(middles, torch.tensor(9.0)),
            torch.tensor([1e-30]),
        ]
    )
    x = torch.cat([x, -x])

    def nearest(value: float) -> float:
        value = min(abs(value), 6.0)
        code = min(range(8), key=lambda code: (abs(MAGNITUDES[code] - value), code % 2))
        return MAGNITUDES[code]

    expected = torch.tensor([math.copysign(nearest(value), value) for value in x.tolist()])
    assert_same_bits(decode_e2m1(encode_e2m1(x)), expected)


def test_e4m3_elements_are_nearest() -> None:
    """With the scale pinned to 1 by a 448 in the group, codes are the nearest of all E4M3 values."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = sorted(set(table[table.isfinite()].tolist()))
    x = torch.cat([torch.linspace(-448, 448, 31 * 400), torch.linspace(-0.1, 0.1, 31 * 400)]).view(-1, 31)
    x = torch.cat([torch.full((x.shape[0], 1), 448.0), x], dim=1)
    codes, scales = encode_fp8(x)
    assert (scales == 127).all()
    distance = (decode_fp8(codes, scales) - x).abs().double()
    grid = torch.tensor(values, dtype=torch.float64)
    best = torch.stack([(grid - row[:, None].double()).abs().amin(1) for row in x])
    assert_same_bits(distance, best)


@pytest.mark.parametrize(
    ("encode", "largest", "floor"), [(encode_fp8, 448, 1e-4), (encode_mxfp4, 6, 6 * 2.0**-126)]
)
def test_e8m0_scale_is_the_least_that_fits(encode, largest: int, floor: float) -> None:
    """Every bf16 magnitude: the smallest power of two that is at least max(amax, floor) / largest."""
    amax = torch.arange(0, 0x7F80, 3, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    scales = encode(amax[:, None].expand(-1, 32))[1][:, 0]
    for value, byte in zip(amax.tolist(), scales.tolist(), strict=True):
        quotient = torch.tensor(max(value, torch.tensor(floor).item())).div(largest).item()
        mantissa, exponent = math.frexp(quotient)
        assert byte - 127 == (exponent - 1 if mantissa == 0.5 else exponent), f"{value=} {byte=}"


def test_e8m0_values() -> None:
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


def test_fp4_scale_is_nearest_and_saturates() -> None:
    """The scale rounds to nearest, so the largest value may need more than 6 of it; it never exceeds 448."""
    group = torch.zeros(16)
    group[0] = 6 * 1.06  # between the scales 1 and 1.125, nearer to 1
    codes, scales = encode_fp4(group)
    assert (scales.item(), decode_fp4(codes, scales)[0].item()) == (0x38, 6.0)
    group[0] = 1e6
    codes, scales = encode_fp4(group)
    assert (scales.item(), decode_fp4(codes, scales)[0].item()) == (0x7E, 6 * 448.0)


@pytest.mark.parametrize("name", FORMATS)
def test_zero_groups(name: str) -> None:
    """Zero stays zero and keeps its sign; the scale is the floor's."""
    encode, decode, _, _ = FORMATS[name]
    x = torch.tensor([0.0, -0.0]).repeat(16)
    codes, scales = encode(x)
    assert_same_bits(decode(codes, scales), x)
    assert set(scales.tolist()) == {"fp8": {105}, "mxfp4": {1}, "fp4": {1}}[name]


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_twice_changes_nothing(name: str) -> None:
    _, _, rounded, _ = FORMATS[name]
    x = torch.randn(50, 64) * torch.logspace(-6, 4, 50)[:, None]
    once = rounded(x)
    if name != "fp4":  # an FP4 scale is rounded, so a saturated group gets a smaller scale the second time
        assert_same_bits(rounded(once), once)
    assert_same_bits(rounded(x.bfloat16()).float(), rounded(x.bfloat16().float()))


@pytest.mark.parametrize("name", FORMATS)
def test_error_is_bounded(name: str) -> None:
    """Half a step of the element format, for random values whose scales are normal numbers."""
    _, _, rounded, group = FORMATS[name]
    x = torch.randn(64, 128) * torch.logspace(-0.5, 2.5, 64)[:, None]
    amax = x.unflatten(1, (-1, group)).abs().amax(-1, keepdim=True).expand(-1, -1, group).flatten(1)
    bound = {"fp8": x.abs() / 16 + amax * 2.0**-9 / 112, "mxfp4": amax / 3, "fp4": amax / 5}[name]
    assert ((rounded(x) - x).abs() <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_faults_stay_in_their_group_and_are_seen(name: str, bad: float) -> None:
    _, _, rounded, group = FORMATS[name]
    x = torch.randn(2, 64)
    clean = rounded(x)
    x[1, 3] = bad
    spoilt = rounded(x)
    if math.isnan(bad) or name != "fp4":  # an FP4 scale saturates at infinity
        assert spoilt[1, :group].isnan().all()
    spoilt[1, :group] = clean[1, :group]
    assert_same_bits(spoilt, clean)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    encode, _, _, _ = FORMATS[name]
    x = torch.randn(40, 96)
    codes, scales = encode(x)
    for start, stop in ((0, 1), (3, 4), (5, 12), (39, 40)):
        part: Tensor = x[start:stop].clone()
        for got, whole in zip(encode(part), (codes, scales), strict=True):
            assert_same_bits(got, whole[start:stop])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 32), (2, 3, 4, 64)])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    encode, decode, rounded, group = FORMATS[name]
    x = torch.randn(shape)
    codes, scales = encode(x)
    assert codes.shape == (*shape[:-1], shape[-1] if name == "fp8" else shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // group)
    assert decode(codes, scales).shape == rounded(x).shape == shape


@pytest.mark.parametrize("name", FORMATS)
def test_partial_groups_are_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="groups"):
        FORMATS[name][0](torch.zeros(2, 24))
