"""One order of summation for all machines with fused multiply-add: their bits agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.native import load_cpu_ops
from deepinfer.ops import cpu, rows
from deepinfer.ops.experts import routed_experts
from deepinfer.ops.gemm import linear
from deepinfer.ops.index_scores import index_scores
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import encode_fp4, encode_fp8, encode_mxfp4
from tests.support.compare import assert_same_bits
from tilelang_ops.attention import sparse_attention


def run_all(dtype: torch.dtype) -> dict[str, Tensor]:
    """Every kernel whose result is a sum, on fixed inputs."""
    torch.manual_seed(5)
    x, streams = torch.randn(50, 96).to(dtype), torch.randn(50, 4, 96).to(dtype)
    ids, weights = torch.randint(0, 6, (50, 3)).int(), torch.rand(50, 3)
    w13, w2 = torch.randn(6, 128, 96).bfloat16(), torch.randn(6, 96, 64).bfloat16()
    window = torch.cat(encode_fp8(torch.randn(2, 100, 512)), dim=-1)
    entries = torch.cat(encode_fp4(torch.randn(2, 64, 512)), dim=-1)
    window_index, main_index = torch.randint(-1, 200, (50, 90)).int(), torch.randint(-1, 128, (50, 60)).int()
    q, sink = torch.randn(50, 5, 512).to(dtype), torch.randn(5)
    codes, scales = encode_mxfp4(torch.randn(4, 64, 128))
    index = (
        torch.tensor([[2, 1]], dtype=torch.int32),
        torch.zeros(50).int(),
        torch.randint(0, 129, (50,)).int(),
    )
    mean_square, mixes = torch.rand(50), torch.randn(50, 24)
    return {
        "linear": linear(x, torch.randn(70, 96)),
        "rounded": linear(x, torch.randn(70, 96), round_inputs=True),
        "experts": routed_experts(x, ids, weights, w13, w2, 2.0, round_inputs=True),
        "attention": sparse_attention(q, window, window_index, entries, main_index, sink, 512**-0.5),
        "index": index_scores(torch.randn(50, 8, 128), torch.randn(50, 8), codes, scales, *index, 128),
        "norm": rms_norm(x, torch.randn(96), 1e-6),
        "mixes": rows.mix_coefficients(mixes, mean_square, mixes[0], mixes[1], 4, 20, 1e-6, 1e-6)[2],
        "streams": rows.advance_streams(streams, torch.rand(50, 4), None, None, None)[2],
        "gate": rows.gate_streams(streams, torch.randn(50, 5 * 96).to(dtype), torch.randn(4, 96), 1e-6),
        "route": rows.route_topk(mixes, mixes[2], 5, 1.5, None, None)[1],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_agree(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    fused = [name for name in load_cpu_ops().instruction_sets() if name != "generic"]
    results: list[dict[str, Tensor]] = []
    for name in fused:
        monkeypatch.setattr(cpu, "_contexts", [load_cpu_ops().Context(2, name)])
        results.append(run_all(dtype))
    for other in results[1:]:
        for what, expected in results[0].items():
            assert_same_bits(other[what], expected, what)


@pytest.mark.parametrize("name", ["sse9", ""])
def test_unknown_instruction_set(name: str) -> None:
    with pytest.raises(ValueError, match="kernels"):
        load_cpu_ops().Context(1, name)


def test_best_instruction_set_is_the_default() -> None:
    make: Callable = load_cpu_ops().Context
    assert make(1).instruction_set == make(1, "auto").instruction_set == load_cpu_ops().instruction_sets()[0]
    assert make(3).num_threads == 3
