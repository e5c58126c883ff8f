"""Rows of scores and options for the tests of samplers."""

from __future__ import annotations

import torch
from torch import Tensor

# A list that the odd distributions below overflow, and a vocabulary that leaves a part of a group.
SIZES = {"num_threads": 64, "capacity": 256, "unroll": 1}
VOCAB = 1002
ROWS = 8
TOP_K = (-1, 1, 2, 5, 20, 200, VOCAB - 1, VOCAB, VOCAB + 5, 0)
TOP_P = (1.0, 0.9, 0.95, 0.5, 0.1, 1e-6, 0.0, 0.9999999, 0.99)
MIN_P = (0.0, 0.0, 0.0, 1.0, 0.05, 0.3)
INV_TEMPERATURE = (1.0, 0.0, 0.5, 2.0, 10.0)


def normal(scale: float, shift: float = 0.0) -> Tensor:
    return torch.randn(ROWS, VOCAB) * scale + shift


def masked(share: float, value: float) -> Tensor:
    return torch.where(torch.rand(ROWS, VOCAB) < share, value, normal(3.0))


def scores_of(kind: str) -> Tensor:
    """Rows of one shape of distribution."""
    if kind == "one":
        return torch.cat([torch.full((ROWS, 1), 50.0), normal(1.0)[:, 1:]], 1).roll(517, 1)
    if kind == "zipf":
        return -1.1 * torch.log(torch.arange(1.0, VOCAB + 1))[torch.randperm(VOCAB)] + normal(0.3)
    makers = {
        "flat": lambda: normal(1.0),
        "usual": lambda: normal(3.0),
        "wide": lambda: normal(20.0, 100.0),
        "equal": lambda: torch.zeros(ROWS, VOCAB),
        "ties": lambda: torch.randint(-3, 40, (ROWS, VOCAB)) * 0.5,
        "zeros of both signs": lambda: torch.where(torch.rand(ROWS, VOCAB) < 0.5, 0.0, -0.0),
        "masked": lambda: masked(0.9, -torch.inf),
        "few": lambda: masked(0.997, -torch.inf),
        "impossible": lambda: masked(2.0, -torch.inf),
        "penalised": lambda: masked(0.7, -1e4),
        "huge": lambda: normal(1e30),
        "subnormal": lambda: normal(1e-39),
    }
    return makers[kind]()


KINDS = "flat usual wide equal ties one zipf masked few impossible penalised huge subnormal".split() + [
    "zeros of both signs"
]


def choose(values: tuple) -> Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), (ROWS,))]


def options() -> tuple[Tensor, Tensor, Tensor]:
    return choose(TOP_K).int(), choose(TOP_P), choose(MIN_P)


def streams() -> tuple[Tensor, Tensor]:
    return torch.randint(-(2**63), 2**63 - 1, (ROWS,)), torch.randint(0, 2**40, (ROWS,))
