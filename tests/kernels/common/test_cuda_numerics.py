"""Number formats on kernel expressions give the bits of the torch ones."""

from types import SimpleNamespace

import tilelang.language as T
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common import cuda_numerics, numerics
from tilelang_ops.common.kernels import cuda_kernel

SCALARS = {  # name -> (of a float32 x and an int32 byte, dtype)
    "e2m1": (lambda x, byte: cuda_numerics.e2m1_code(x), "int32"),
    "e4m3": (lambda x, byte: cuda_numerics.e4m3_code(x), "uint8"),
    "fp8_scale": (lambda x, byte: cuda_numerics.fp8_scale_byte(cuda_numerics.magnitude_bits(x)), "int32"),
    "mxfp4_scale": (lambda x, byte: cuda_numerics.mxfp4_scale_byte(cuda_numerics.magnitude_bits(x)), "int32"),
    "fp4_scale": (
        lambda x, byte: T.reinterpret(cuda_numerics.fp4_scale(cuda_numerics.magnitude_bits(x)), "uint8"),
        "uint8",
    ),
    "e2m1_value": (lambda x, byte: cuda_numerics.e2m1_value(byte & 15), "float32"),
    "e4m3_value": (lambda x, byte: cuda_numerics.e4m3_value(T.cast(byte, "uint8")), "float32"),
    "e8m0_value": (lambda x, byte: cuda_numerics.e8m0_value(byte), "float32"),
    "e8m0_inverse": (lambda x, byte: cuda_numerics.e8m0_inverse(byte), "float32"),
}


@cuda_kernel(builds=lambda model: [])
def scalars(name: str):
    function, dtype = SCALARS[name]
    n = T.dynamic("n")

    @T.prim_func
    def scalars(x: T.Tensor((n,), "float32"), out: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as block:
            for j in T.Parallel(128):
                i = block * 128 + j
                if i < n:
                    out[i] = function(x[i], i & 255)

    return scalars


def test_scalars(run_kernel: KernelRunner) -> None:
    x = _floats()
    byte = torch.arange(x.shape[0]) & 255

    def run(x: Tensor) -> dict[str, Tensor]:
        out = {name: x.new_empty(x.shape, dtype=getattr(torch, SCALARS[name][1])) for name in SCALARS}
        for name in SCALARS:
            scalars(name=name)(x, out[name])
        return [out[name].cpu() for name in SCALARS]

    out = dict(zip(SCALARS, run_kernel(SimpleNamespace(run=run), x)[0], strict=True))
    amax = x.abs()
    packed = numerics.encode_e2m1(x.nan_to_num(nan=6.0, posinf=torch.inf, neginf=-torch.inf).repeat(2, 1).T)
    codes = torch.where(x.isnan(), out["e2m1"] & 8 | 7, (packed.squeeze(1) & 15).int())
    assert_same_bits(out["e2m1"], codes, "e2m1")
    e4m3 = x.clamp(-448.0, 448.0).to(numerics.E4M3).view(torch.uint8)
    assert_same_bits(torch.where(x.isnan(), 127, out["e4m3"]), torch.where(x.isnan(), 127, e4m3), "e4m3")
    scales = numerics._ceil_e8m0(amax.clamp(min=1e-4) / 448.0).int()
    assert_same_bits(out["fp8_scale"], scales, "fp8 scale")
    scales = numerics._ceil_e8m0(amax.clamp(min=6 * 2.0**-126) / 6.0).int()
    assert_same_bits(out["mxfp4_scale"], scales, "mxfp4 scale")
    scales = (amax.clamp(min=6 * 2.0**-9) / 6.0).clamp(max=448.0).to(numerics.E4M3)
    assert_same_bits(out["fp4_scale"], scales.view(torch.uint8), "fp4 scale")
    values = numerics.decode_e2m1((byte & 15).to(torch.uint8))[::2]
    assert_same_bits(out["e2m1_value"], values, "e2m1 value")
    values = byte.to(torch.uint8).view(numerics.E4M3).float()
    torch.testing.assert_close(out["e4m3_value"], values, rtol=0, atol=0, equal_nan=True)
    values = numerics.decode_e8m0(byte.to(torch.uint8))
    assert_same_bits(out["e8m0_value"], values, "e8m0 value")
    inverse = (2.0 ** (127 - byte).double()).float().masked_fill(byte == 255, torch.nan)
    assert_same_bits(out["e8m0_inverse"], inverse, "e8m0 inverse")


def _floats() -> Tensor:
    """Normal draws, special values, the formats' boundaries and their neighbours, random bits."""
    edges = [0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 1e-4, 448.0, 464.0, 465.0, 3e38, torch.inf]
    edges = torch.tensor([*edges, 1e-45, 2.0**-126, 6 * 2.0**-126])
    exponents = torch.arange(-120, 125)[:, None]
    powers = (torch.tensor([[1.0, 1.5, 1.75]]) * 2.0 ** exponents.double()).float().flatten()
    near = torch.cat([edges, powers])
    near = torch.cat([near, torch.nextafter(near, near + torch.inf), torch.nextafter(near, near - torch.inf)])
    bits = torch.randint(-(2**31), 2**31, (4096,)).int()
    bits |= torch.where(bits.view(torch.float32).isnan(), 0x400000, 0).int()  # quiet, as arithmetic leaves it
    special = torch.tensor([torch.nan, -torch.nan])
    return torch.cat([near, -near, special, 4 * torch.randn(1024), bits.view(torch.float32)])
