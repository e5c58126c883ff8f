"""Rotary tables: golden cosines and sines, stated frequencies, growth by pages."""

from __future__ import annotations

import pytest
import torch

from deepinfer.layers.rotary import PAGE, RotaryTable, RotaryTables, plain_frequencies, yarn_frequencies
from tests.support.compare import assert_same_bits
from tests.support.golden import TensorFile

ORIGINAL_LENGTH = {"release": 65536, "tiny": 512}


@pytest.mark.parametrize("model", ORIGINAL_LENGTH)
@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_golden_rows(units: TensorFile, model: str, kind: str) -> None:
    """Up to position 1,048,575, where another rounding of a frequency would show in the second digit."""
    if kind == "window":
        table = RotaryTable(plain_frequencies(64, 10000.0))
    else:
        table = RotaryTable(yarn_frequencies(64, 160000.0, 16, 32, 1, ORIGINAL_LENGTH[model]))
    positions = units[f"rope/{model}/positions"]
    cos, sin = table.rows(positions, int(positions.max()) + 1)
    torch.testing.assert_close(cos, units[f"rope/{model}/{kind}/cos"], rtol=0, atol=1.2e-7)
    torch.testing.assert_close(sin, units[f"rope/{model}/{kind}/sin"], rtol=0, atol=1.2e-7)


def test_stated_frequencies() -> None:
    yarn = yarn_frequencies(64, 160000.0, 16, 32, 1, 65536)
    stated = {
        0: 1.0,
        1: 0.687656045,
        15: 3.63553851e-3,
        16: 2.26562493e-3,
        20: 2.96977785e-4,
        24: 1.95312532e-5,
        25: 5.37231244e-6,
        31: 5.68052940e-7,
    }
    for pair, value in stated.items():
        assert yarn[pair].item() == pytest.approx(value, rel=1e-6), f"{pair=}"
    plain = plain_frequencies(64, 10000.0)
    assert plain[1].item() == pytest.approx(0.749894202, rel=1e-6)
    assert plain[31].item() == pytest.approx(1.33352150e-4, rel=1e-6)


def test_growth_changes_no_value() -> None:
    """A table that grew page by page holds what a table made at once holds."""
    positions = torch.tensor([0, 5, PAGE - 1, PAGE, 2 * PAGE + 3])
    grown, whole = (RotaryTable(plain_frequencies(64, 10000.0)) for _ in range(2))
    first = grown.rows(positions[:2], 6)
    assert grown.num_positions == PAGE
    grown.rows(positions[2:4], PAGE + 1)
    assert grown.num_positions == 2 * PAGE
    for part, all_rows in zip(
        grown.rows(positions, 2 * PAGE + 4), whole.rows(positions, 3 * PAGE), strict=True
    ):
        assert_same_bits(part, all_rows)
    assert_same_bits(first[0], whole.rows(positions[:2], 6)[0])


def test_reserve_both() -> None:
    tables = RotaryTables(RotaryTable(torch.ones(4)), RotaryTable(torch.ones(4)))
    tables.reserve(PAGE + 1)
    assert tables.plain.num_positions == tables.yarn.num_positions == 2 * PAGE
