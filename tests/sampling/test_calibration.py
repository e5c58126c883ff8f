"""Temperature fit against the published data set, and its parts against closed forms and brute force."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np
import pytest

from deepinfer.sampling.calibration import (
    GRID,
    Blocks,
    Calibration,
    auroc,
    expected_calibration_error,
    fit,
    held_out_survivals,
    log_loss,
    reliability_table,
    reliability_text,
    report,
    sigmoid,
)

NUM_BLOCKS = 20_000
SCALES = (1.8, 1.8, 1.5, 1.3, 1.3)  # how over-confident the data set's head is


@functools.cache
def published() -> Blocks:
    """The deterministic data set: SplitMix64 numbers -> logits that are too large by SCALES."""
    with np.errstate(over="ignore"):
        n = np.arange(NUM_BLOCKS, dtype=np.uint64)[:, None]
        z = n * np.uint64(16) + np.arange(16, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    u = ((z >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    normal = np.vectorize(NormalDist().inv_cdf)
    k = np.arange(5)
    true = 1.2 + 0.9 * normal(u[:, :1]) + 0.5 * normal(u[:, 1:6]) - 0.05 * k
    stands = np.cumprod(u[:, 6:11] < 1 / (1 + np.exp(-true)), axis=1)
    return Blocks(true * np.array(SCALES), stands.sum(1), np.full(NUM_BLOCKS, 5))


def labels_of(blocks: Blocks) -> np.ndarray:
    return np.stack([blocks.labels(position) for position in range(blocks.num_positions)], 1)


def test_the_data_set_is_the_published_one():
    blocks = published()
    assert blocks.logits[0] == pytest.approx([4.24142, 4.20810, 2.35251, 2.64706, 2.50725], abs=5e-6)
    assert blocks.logits[1] == pytest.approx([1.61287, 0.16900, 1.66209, 0.44568, -0.35592], abs=5e-6)
    assert labels_of(blocks)[0].tolist() == [True] * 5
    assert labels_of(blocks)[1].tolist() == [False] * 5
    assert labels_of(blocks).mean(0) == pytest.approx([0.7270, 0.5504, 0.4250, 0.3342, 0.2662], abs=5e-5)


@pytest.mark.parametrize(
    ("num_bins", "temperatures", "before", "after"),
    [
        (
            15,
            [1.7783, 1.7783, 1.5849, 1.2589, 1.2589],
            [0.0944, 0.1318, 0.1424, 0.1340, 0.1250],
            [0.0111, 0.0110, 0.0122, 0.0088, 0.0067],
        ),
        (
            20,
            [1.7783, 1.7783, 1.5849, 1.2589, 1.4125],
            [0.0944, 0.1325, 0.1429, 0.1343, 0.1250],
            [0.0112, 0.0114, 0.0097, 0.0111, 0.0071],
        ),
    ],
)
def test_fit_of_the_published_data_set(num_bins, temperatures, before, after):
    blocks = published()
    found = fit(blocks, num_bins)
    assert found.temperatures == pytest.approx(temperatures, abs=5e-5)
    assert not found.offsets.any() and not found.needed_offset.any() and not found.is_at_grid_end.any()
    identity = report(blocks, Calibration.identity(5), num_bins)
    assert [entry.ece for entry in identity] == pytest.approx(before, abs=6e-5)
    assert [entry.ece for entry in report(blocks, found, num_bins)] == pytest.approx(after, abs=6e-5)
    for entry, scaled in zip(identity, report(blocks, found, num_bins)):
        assert entry.auroc == pytest.approx(scaled.auroc, abs=0.01)  # temperatures hardly change an order
        assert scaled.survival == pytest.approx(scaled.acceptance, abs=scaled.ece)


def test_toy_error():
    scores, labels = np.array([0.05, 0.12, 0.55, 0.62, 0.97]), np.array([0, 1, 1, 0, 1])
    assert expected_calibration_error(scores, labels, 10) == pytest.approx(0.4060, abs=1e-12)
    table = reliability_table(scores, labels, 10)
    assert [entry.count for entry in table] == [1, 1, 0, 0, 0, 1, 1, 0, 0, 1]
    assert (table[5].low, table[5].high, table[5].mean_score, table[5].mean_label) == (0.5, 0.6, 0.55, 1.0)
    assert (table[2].mean_score, table[2].mean_label) == (0.0, 0.0)
    gap = sum(entry.count * abs(entry.mean_score - entry.mean_label) for entry in table)
    assert gap / 5 == pytest.approx(0.4060, abs=1e-12)


def test_error_counts_the_ends_of_the_scale():
    assert expected_calibration_error(np.array([0.0, 1.0]), np.array([0, 1]), 15) == pytest.approx(
        0, abs=2e-8
    )
    assert expected_calibration_error(np.array([0.0, 1.0]), np.array([1, 0]), 15) == pytest.approx(
        1, abs=2e-8
    )


def test_auroc_is_the_share_of_ordered_pairs():
    rng = np.random.default_rng(5)
    for _ in range(20):
        scores, labels = rng.integers(0, 40, 60) / 40 + 1e-3, rng.integers(0, 2, 60)
        pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]]
        assert auroc(scores, labels) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert np.isnan(auroc(np.array([0.1, 0.2]), np.array([1, 1])))


def test_labels_beyond_a_cut_do_not_count():
    """Blocks cut by their end carry no label behind it, whatever stands there."""
    whole = published()
    cut = np.where(np.arange(NUM_BLOCKS) % 4 == 0, 2, 5)
    blocks = Blocks(whole.logits, np.minimum(whole.num_accepted, cut), cut)
    found, expected = fit(blocks), fit(whole)
    assert found.temperatures[:2].tolist() == expected.temperatures[:2].tolist()
    kept = cut == 5
    only_whole = Blocks(whole.logits[kept], whole.num_accepted[kept], cut[kept])
    entries = report(blocks, found)
    assert [entry.num_blocks for entry in entries] == [20_000, 20_000, 15_000, 15_000, 15_000]
    for position in (2, 3, 4):
        assert entries[position] == report(only_whole, found)[position]
    # Taking a missing label for a refusal, or selecting by outcome, is what the counts protect from.
    assert entries[4].acceptance == pytest.approx(0.2662, abs=0.01)


def test_log_loss():
    expected = -(np.log(0.9) + np.log(0.8) + np.log(0.25)) / 3
    assert log_loss(np.array([0.9, 0.2, 0.25]), np.array([1, 0, 1])) == pytest.approx(expected, abs=1e-12)
    assert log_loss(np.array([0.0]), np.array([True])) == pytest.approx(-np.log(1e-8)), "finite"


def test_fit_is_the_best_of_all_temperatures_one_position_after_the_other():
    """Against a search in plain Python, sums written out."""
    rng = np.random.default_rng(4)
    logits = rng.normal(0.5, 1.5, (300, 2))
    stands = np.cumprod(rng.random((300, 2)) < sigmoid(logits / 1.7), axis=1)
    observed = rng.integers(1, 3, 300)
    blocks = Blocks(logits, np.minimum(stands.sum(1), observed), observed)

    def error(position: int, temperatures: list[float]) -> float:
        bins = [[0, 0.0, 0.0] for _ in range(15)]
        for row in range(300):
            if observed[row] > position:
                score = 1.0
                for value, temperature in zip(logits[row], temperatures):
                    score *= 1 / (1 + math.exp(-value / temperature))
                place = bins[min(int(score * 15), 14)]
                place[0] += 1
                place[1] += score
                place[2] += float(stands[row, position])
        total = sum(count for count, _, _ in bins)
        return sum(n / total * abs(a / n - b / n) for n, a, b in bins if n)

    chosen: list[float] = []
    for position in range(2):
        grid = [10 ** (-1 + step / 20) for step in range(41)]
        errors = [error(position, [*chosen, temperature]) for temperature in grid]
        chosen.append(grid[errors.index(min(errors))])
    found = fit(blocks)
    assert found.temperatures.tolist() == pytest.approx(chosen)
    assert report(blocks, found, 15)[1].ece == pytest.approx(error(1, chosen))


def test_held_out_estimates_come_from_fits_of_the_other_sources():
    whole = published().select(np.arange(3000))
    sources = np.arange(3000) % 7 * 10
    survivals = held_out_survivals(whole, sources, 3)
    for fold in ((0, 30, 60), (10, 40), (20, 50)):
        held_out = np.isin(sources, fold)
        expected = fit(whole.select(~held_out)).survivals(whole.logits[held_out])
        assert (survivals[held_out] == expected).all()
    assert (survivals != fit(whole).survivals(whole.logits)).any()


def test_reliability_text():
    table = reliability_table(np.array([0.05, 0.12, 0.55, 0.62, 0.97]), np.array([0, 1, 1, 0, 1]), 10)
    lines = reliability_text({"before": table, "after, elsewhere": table}).split("\n")
    assert len(lines) == 6, "no empty rows"
    assert lines[0].split() == ["estimate", "before", "after,", "elsewhere"]
    assert lines[3].split() == ["0.50", "-", "0.60"] + ["1", "0.550", "1.000"] * 2
    assert len({len(line) for line in lines}) == 1


def shifted_head(offset: float) -> Blocks:
    """One position; confidences of a head that is right but for a constant."""
    rng = np.random.default_rng(1)
    true = rng.normal(1.5, 0.7, 40_000)
    stands = rng.random(40_000) < sigmoid(true)
    return Blocks((true - offset)[:, None], stands.astype(np.int64), np.ones(40_000, dtype=np.int64))


def test_an_offset_is_fitted_where_temperatures_fail():
    blocks = shifted_head(2.5)  # true logits around 1.5 come out around -1
    found = fit(blocks)
    assert found.needed_offset.tolist() == [True] and found.is_at_grid_end.tolist() == [False]
    assert found.temperatures[0] == pytest.approx(1, rel=0.3)
    assert found.offsets[0] == pytest.approx(2.5, abs=0.5)
    assert report(blocks, found)[0].ece < 0.02 < 0.2 < report(blocks, Calibration.identity(1))[0].ece


def test_an_offset_can_be_asked_for():
    """A head that is a little off: temperatures do what they can, an offset does better."""
    blocks = shifted_head(0.6)
    found, with_offset = fit(blocks), fit(blocks, always_offset=True)
    assert not found.needed_offset.any() and not found.offsets.any() and not with_offset.needed_offset.any()
    assert with_offset.temperatures[0] == pytest.approx(1, rel=0.3)
    assert with_offset.offsets[0] == pytest.approx(0.6, abs=0.3)
    (before,), (after,) = report(blocks, found), report(blocks, with_offset)
    assert after.ece < before.ece and after.log_loss < before.log_loss
    assert after.survival == pytest.approx(after.acceptance, abs=1e-3)


def test_a_head_that_knows_nothing_is_reported():
    """Logits without information: only an end of the grid flattens them, with or without an offset."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 8, (20_000, 1))
    accepted = (rng.random(20_000) < 0.5).astype(np.int64)
    found = fit(Blocks(logits, accepted, np.ones(20_000, dtype=np.int64)))
    assert found.needed_offset.tolist() == [True] and found.is_at_grid_end.tolist() == [True]
    assert found.temperatures[0] == GRID[-1]


@pytest.mark.parametrize("rate", [0, 1])
def test_outcomes_that_are_all_the_same(rate):
    count = 50
    blocks = Blocks(np.zeros((count, 2)), np.full(count, 2 * rate), np.full(count, 2))
    survival = fit(blocks).survivals(blocks.logits)
    assert np.isfinite(survival).all()
    assert abs(survival[:, 0] - rate).max() < 0.02


def test_ties_take_the_first_temperature():
    blocks = Blocks(np.zeros((10, 1)), np.array([0, 1] * 5), np.ones(10, dtype=np.int64))  # sigmoid(0 / T)
    assert fit(blocks).temperatures[0] == GRID[0] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("logits", "accepted", "observed", "words"),
    [
        (np.zeros((2, 3)), [0], [3, 3], "must be"),
        (np.zeros(2), [0, 0], [1, 1], "must be"),
        (np.zeros((1, 3)), [2], [1], "num_accepted <= num_observed"),
        (np.zeros((1, 3)), [2], [4], "num_observed <= k"),
        (np.zeros((1, 3)), [-1], [3], "0 <= num_accepted"),
        (np.full((1, 3), np.nan), [0], [3], "not finite"),
    ],
)
def test_blocks_that_make_no_sense(logits, accepted, observed, words):
    with pytest.raises(ValueError, match=words):
        Blocks(logits, np.array(accepted), np.array(observed))


def test_a_position_without_labels():
    blocks = Blocks(np.zeros((4, 3)), np.zeros(4, dtype=np.int64), np.full(4, 2))
    with pytest.raises(ValueError, match="position 3"):
        fit(blocks)
