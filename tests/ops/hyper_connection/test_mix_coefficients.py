"""mix_coefficients: golden block, the specification's Sinkhorn example, float64 and single rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.hyper_connection import mix_coefficients
from tilelang_ops.hyper_connection.mix_coefficients.reference import sinkhorn


def mix(projection: Tensor, mean_square: Tensor, scale: Tensor, base: Tensor, num_streams=4, num_rounds=20):
    return mix_coefficients(
        projection,
        mean_square,
        scale,
        base,
        num_streams=num_streams,
        num_rounds=num_rounds,
        eps=1e-6,
        norm_eps=1e-20,
    )


def random_input(num_rows: int, num_streams: int):
    width = (2 + num_streams) * num_streams
    return (
        3 * torch.randn(num_rows, width),
        0.1 + torch.rand(num_rows),
        torch.randn(width),
        torch.randn(width),
    )


def naive(projection, mean_square, scale, base, num_streams, num_rounds):
    """One row with Python floats."""
    z = [p / math.sqrt(mean_square) * s + b for p, s, b in zip(projection, scale, base, strict=True)]
    m, eps = num_streams, 1e-6
    gates = [1 / (1 + math.exp(-v)) for v in z[: 2 * m]]
    rows = [[math.exp(v) for v in z[2 * m + i * m : 2 * m + (i + 1) * m]] for i in range(m)]
    rows = [[v / sum(row) + eps for v in row] for row in rows]
    for step in range(2 * num_rounds - 1):
        if step % 2:
            rows = [[v / (sum(row) + eps) for v in row] for row in rows]
        else:
            sums = [sum(row[j] for row in rows) + eps for j in range(m)]
            rows = [[row[j] / sums[j] for j in range(m)] for row in rows]
    return [g + eps for g in gates[:m]], [2 * g for g in gates[m:]], rows


def test_golden_block(units) -> None:
    site = units.under("mhc")
    flat = site["streams"].flatten(1)
    pre, post, comb = mix(
        (flat.double() @ site["fn"].double().T).float(),
        flat.square().mean(1),
        site["scale"].repeat_interleave(torch.tensor([4, 4, 16])),
        site["base"],
    )
    for name, actual in (("pre", pre), ("post", post), ("comb", comb)):
        torch.testing.assert_close(actual, site[name], rtol=1e-6, atol=1e-6)


def test_specified_example() -> None:
    logits = torch.tensor([[1.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 3, 0], [0.5, 0, 0, 1]])
    expected = torch.tensor(
        [
            [0.5291, 0.1453, 0.0941, 0.2316],
            [0.1221, 0.6736, 0.0590, 0.1453],
            [0.0791, 0.0590, 0.7678, 0.0941],
            [0.2697, 0.1221, 0.0791, 0.5291],
        ]
    )
    actual = sinkhorn((torch.softmax(logits, 1) + 1e-6).unsqueeze(0), 20, 1e-6)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=6e-5)


@pytest.mark.parametrize("num_streams", [1, 2, 4, 5])
@pytest.mark.parametrize("num_rounds", [1, 2, 20])
def test_against_python_floats(num_streams: int, num_rounds: int) -> None:
    inputs = random_input(6, num_streams)
    actual = mix(*inputs, num_streams=num_streams, num_rounds=num_rounds)
    for row in range(6):
        expected = naive(
            inputs[0][row].tolist(),
            inputs[1][row].item(),
            inputs[2].tolist(),
            inputs[3].tolist(),
            num_streams,
            num_rounds,
        )
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got[row], torch.tensor(want), rtol=3e-6, atol=3e-6)


def test_row_alone_is_row_in_batch() -> None:
    projection, mean_square, scale, base = random_input(1030, 4)
    batch = mix(projection, mean_square, scale, base)
    for num_rows in [*range(1, 36), 63, 64, 65, 127, 128, 129, 500]:
        for start in (0, 1, 13, 1030 - num_rows):
            rows = slice(start, start + num_rows)
            part = mix(projection[rows], mean_square[rows], scale, base)
            for name, actual, expected in zip(("pre", "post", "comb"), part, batch, strict=True):
                assert_same_bits(actual, expected[rows], f"{name} of {num_rows} rows from {start}")


def test_extreme_projections_stay_finite() -> None:
    projection = torch.tensor([[1e4, -1e4] * 12, [-1e4] * 24, [0.0] * 24])
    ones = torch.ones(24)
    for mixes in mix(projection, torch.ones(3), ones, torch.zeros(24)):
        assert torch.isfinite(mixes).all()


def test_on_device(device: str) -> None:
    check_against_cpu(mix, *random_input(7, 4), device=device, rtol=1e-5, atol=1e-6)
