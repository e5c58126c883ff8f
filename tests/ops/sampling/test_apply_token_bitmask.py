"""apply_token_bitmask against single bits in plain Python: vocabularies around word borders, rows, values."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.sampling import apply_token_bitmask
from tilelang_ops.sampling.apply_token_bitmask import reference


def make(num_rows: int, vocab: int, rows: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Logits with every kind of value, random words, the rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab, generator=generator)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 3e38])
    logits.view(-1)[:: max(1, logits.numel() // 17)] = special[seed % 6]
    words = torch.randint(-(2**31), 2**31, (len(rows), (vocab + 31) // 32), generator=generator)
    return logits, words.to(torch.int32), torch.tensor(rows, dtype=torch.int32)


def expected(logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The same, a bit at a time."""
    result = logits.clone()
    for word_row, row in zip(words.tolist(), rows.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not (word_row[token // 32] & 0xFFFFFFFF) >> (token % 32) & 1:
                result[row, token] = -torch.inf
    return result


def check(logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor) -> None:
    wanted = expected(logits, words, rows)
    apply_token_bitmask(logits, words, rows)
    assert_same_bits(logits, wanted)


@pytest.mark.parametrize("vocab", [1, 7, 31, 32, 33, 63, 64, 65, 257, 4096])
def test_bits(vocab: int) -> None:
    some = random.Random(vocab).sample(range(9), 5)
    for num_rows, rows in (
        (1, [0]),
        (5, [3, 0]),
        (5, []),
        (4, [0, 1, 2, 3]),
        (9, some),
    ):
        for seed in range(3):
            check(*make(num_rows, vocab, rows, seed))


def test_all_and_nothing() -> None:
    logits = torch.randn(2, 70)
    before = logits.clone()
    words = torch.stack([torch.full((3,), -1), torch.zeros(3)]).to(torch.int32)
    apply_token_bitmask(logits, words, torch.tensor([0, 1], dtype=torch.int32))
    assert_same_bits(logits[0], before[0])
    assert (logits[1] == -torch.inf).all()


def test_more_rows_than_are_spread_at_once() -> None:
    count = reference.ROWS_AT_ONCE * 2 + 3
    check(*make(count + 4, 45, list(range(count + 3, 3, -1))))


def test_rows_of_a_wider_table() -> None:
    table = torch.randn(3, 80)
    before = table.clone()
    view = table[:, 8:72]
    apply_token_bitmask(view, torch.zeros(1, 2, dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    before[1, 8:72] = -torch.inf
    assert_same_bits(table, before)


def test_on_device(device: str) -> None:
    def masked(logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        apply_token_bitmask(logits, words, rows)
        return logits

    check_against_cpu(masked, *make(70, 4099, list(range(0, 70, 3))), device=device, bitwise=True)
