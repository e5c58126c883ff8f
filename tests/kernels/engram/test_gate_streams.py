"""gate_streams' kernel: float64, a dot product of zero, rows alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.engram.gate_streams import cuda

EPS = 1e-6


def expected(streams: Tensor, key_value: Tensor, weight: Tensor) -> Tensor:
    """The operator in float64."""
    num_streams, width = weight.shape
    x = streams.double()
    keys, value = key_value.double().split([num_streams * width, width], 1)
    keys = keys.view_as(x)
    norms = (x.square().mean(-1) + EPS).sqrt() * (keys.square().mean(-1) + EPS).sqrt()
    dot = (x * weight.double() * keys).sum(-1) / norms * width**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return x + gate[..., None] * value[:, None]


@pytest.mark.parametrize(
    ("width", "dtype"), [(1056, torch.bfloat16), (257, torch.bfloat16), (128, torch.float32)]
)
def test_gate_streams(run_kernel: KernelRunner, width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(4, width)
    streams, key_value = torch.randn(9, 4, width).to(dtype), torch.randn(9, 5 * width).to(dtype)
    streams[3], key_value[4] = 0, 0
    batch, _ = run_kernel(cuda, streams, key_value, weight, EPS)
    rtol = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(batch.double(), expected(streams, key_value, weight), rtol=rtol, atol=1e-5)
    if width == 1056:
        passes = torch.arange(9) % 4 == 3
        mixed, _ = run_kernel(cuda, streams, key_value, weight, EPS, passes)
        assert_same_bits(mixed, torch.where(passes.view(-1, 1, 1), streams, batch), "rows that pass")
    for start, stop in ((0, 1), (8, 9), (2, 6)):
        part, _ = run_kernel(cuda, streams[start:stop].clone(), key_value[start:stop].clone(), weight, EPS)
        assert_same_bits(part, batch[start:stop], f"rows {start}..{stop}")
