"""Number formats of the emulator: every code, and every rounding, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.emulator import programs
from tests.support.compare import assert_same_bits
from tests.support.emulator import EmulatedProgram

LARGEST = {
    "float16": 65504.0,
    "bfloat16": torch.finfo(torch.bfloat16).max,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def narrow(x: Tensor, dtype: str) -> Tensor:
    """The emulator's cast."""
    out = torch.empty(x.shape, dtype=getattr(torch, dtype))
    EmulatedProgram(programs.cast("float32", dtype))(x, out)
    return out


def codes(dtype: str) -> Tensor:
    """Every value of a type, as the type."""
    bits = 8 * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    whole = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.uint16)
    return whole.view(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", [*LARGEST, "float8_e8m0fnu"])
def test_every_code_widens_to_torchs_value(dtype: str) -> None:
    x = codes(dtype)
    out = torch.empty(x.shape)
    EmulatedProgram(programs.cast(dtype, "float32"))(x, out)
    expected = x.float()
    assert torch.equal(out.isnan(), expected.isnan())
    assert_same_bits(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", LARGEST)
def test_narrowing_rounds_to_nearest_even(dtype: str) -> None:
    """At every code, half way between neighbours, and just beside that: as torch where torch is finite."""
    values = codes(dtype).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:].double() + values[:-1].double()).div(2).float()
    near = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (torch.inf, -torch.inf)]
    x = torch.cat([values, -values, middles, *near])
    assert_same_bits(narrow(x, dtype), x.to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", LARGEST)
def test_too_large_saturates_or_becomes_infinite(dtype: str) -> None:
    huge = torch.finfo(torch.float32).max
    x = torch.tensor([huge, -huge, torch.inf, -torch.inf])
    saturates = dtype.startswith("float8")
    end = LARGEST[dtype] if saturates else torch.inf
    assert narrow(x, dtype).float().abs().eq(end).all()
    assert narrow(torch.tensor([torch.nan]), dtype).float().isnan().all()


def test_scales_round_up() -> None:
    """E8M0 holds powers of two; the GPU's conversion takes the next one above."""
    powers = torch.ldexp(torch.ones(253), torch.arange(-126, 127))
    above = torch.nextafter(powers, torch.full_like(powers, torch.inf))
    x = torch.cat([powers, above, torch.tensor([0.0, torch.inf, torch.nan])])
    whole = torch.arange(1, 254)
    expected = torch.cat([whole, whole + 1, torch.tensor([0, 254, 255])])
    assert narrow(x, "float8_e8m0fnu").view(torch.uint8).long().tolist() == expected.tolist()


def test_packed_nibbles() -> None:
    """The low nibble is the even element; all 256 bytes."""
    packed = torch.arange(256).to(torch.uint8)
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])
    expected = torch.stack([values[packed.long() & 15], values[packed.long() >> 4]], -1).flatten()
    out = torch.empty(512)
    EmulatedProgram(programs.packed_nibbles())(packed.view(torch.float4_e2m1fn_x2), out)
    assert torch.equal(out, expected + 0.5)


def test_floats_become_integers_as_on_a_gpu() -> None:
    x = torch.tensor([1.9, -1.9, 3e9, -3e9, torch.nan, torch.inf])
    out = torch.empty(6, dtype=torch.int32)
    EmulatedProgram(programs.cast("float32", "int32"))(x, out)
    assert out.tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]
