"""Verify lengths: the best choice by closed forms and exhaustive search, step times, fall-backs."""

from __future__ import annotations

import itertools
import random
from statistics import NormalDist

import numpy as np
import pytest

from tests.core.harness import make_engine, make_params, tokens_of

# Decode chart of the specification: query tokens -> ms.
CHART = [(32, 9.99), (256, 13.20), (512, 18.21), (1024, 31.53)]
ALPHA = 0.028601  # ms per request that reconciles the chart with the production table


def chart_points(num_seqs: int, alpha: float = 0.0) -> list[tuple[int, int, float]]:
    """The chart as one row: the time depends on the tokens, straight lines between the points."""
    return [(num_seqs, tokens, alpha * num_seqs + ms) for tokens, ms in CHART]


def padded(table: dict[int, float]) -> list[tuple[int, int, float]]:
    """Sizes of captured graphs."""
    return [(0, tokens, ms) for tokens, ms in table.items()]


def make_budget(num_seqs: int, k: int, points, undrafted=(), **config):
    """An engine with `num_seqs` sequences whose prompts are done; give its next commit confidences."""
    engine = make_engine(
        **{
            "max_num_seqs": num_seqs,
            "num_state_slots": num_seqs + 1,
            "num_blocks": 12 * num_seqs + 1,
            "max_model_len": 64,
            "max_num_batched_tokens": max(64, num_seqs * (1 + k)),
            "num_draft_tokens": k,
            "use_draft_budget": True,
            "draft_budget_min_gain": 0.0,
            **config,
        }
    )
    if points:
        engine.set_step_times(points, list(undrafted))
    return engine


def propose(engine, plan, confidences, tokens=7) -> None:
    confidences = np.asarray(confidences, np.float32)
    drafts = np.full(confidences.shape, 9, np.int32)  # never accepted
    engine.commit(plan, np.full(plan.num_samples, tokens, np.int32), drafts=drafts, confidences=confidences)
    engine.check_integrity()


def choose(confidences, points, undrafted=(), fields=(), **config) -> list[int]:
    """Drafts that each of len(confidences) sequences verifies."""
    confidences = np.asarray(confidences, np.float32)
    num_seqs, k = confidences.shape
    engine = make_budget(num_seqs, k, points, undrafted, **config)
    for index in range(num_seqs):
        engine.add(make_params(**{"max_tokens": 50, **dict(fields)}), tokens_of(1 + index % 3))
    propose(engine, engine.schedule(), confidences)
    return (engine.schedule().seqlens_q - 1).tolist()


def survivals_of(confidences) -> np.ndarray:
    return np.cumprod(np.asarray(confidences, np.float64), axis=1)


def tokens_per_step(confidences, lengths) -> float:
    survivals = survivals_of(confidences)
    return len(lengths) + sum(survivals[r, :n].sum() for r, n in enumerate(lengths))


# --- the specification's populations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1.75), (2, 2.3125), (3, 2.7344), (4, 3.0508), (5, 3.2881)]
)
def test_chain(count, expected):
    assert tokens_per_step([[0.75] * 5], [count]) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("tokens", "ms"),
    [(1, 9.99), (60, 10.3912), (96, 10.9071), (284, 13.7480), (360, 15.2353), (424, 16.4878), (576, 19.8750)]
    + [(768, 24.8700), (1200, 36.1088)],
)
@pytest.mark.parametrize("num_seqs", [1, 60])
def test_straight_lines_of_one_row(tokens, ms, num_seqs):
    engine = make_engine()
    engine.set_step_times(chart_points(60))
    assert engine.step_ms(num_seqs, tokens) == pytest.approx(ms, rel=1e-4)


def rate(confidences, lengths, engine) -> float:
    """Tokens per second that a choice promises."""
    num_seqs = len(lengths)
    return 1e3 * tokens_per_step(confidences, lengths) / engine.step_ms(num_seqs, num_seqs + sum(lengths))


def check_population(confidences, points, drafts, total, tokens_per_second, fixed, gain):
    lengths = choose(confidences, points)
    num_seqs = len(lengths)
    assert sum(lengths) / num_seqs == pytest.approx(drafts, abs=5e-5)
    assert num_seqs + sum(lengths) == total
    engine = make_engine()
    engine.set_step_times(points)
    assert rate(confidences, lengths, engine) == pytest.approx(tokens_per_second, rel=1e-4)
    everything = rate(confidences, [5] * num_seqs, engine)
    assert everything == pytest.approx(fixed, rel=1e-4)
    assert 100 * (rate(confidences, lengths, engine) / everything - 1) == pytest.approx(gain, abs=0.006)


@pytest.mark.parametrize(
    ("num_seqs", "drafts", "total", "tokens_per_second", "fixed", "gain"),
    [
        (48, 5, 288, 11415.1, 11415.1, 0),
        (60, 4, 300, 13018.0, 12949.2, 0.531),
        (96, 3, 384, 16714.4, 15882.1, 5.241),
        (128, 3, 512, 19220.2, 16923.0, 13.574),
        (192, 1.6667, 512, 22405.3, 18109.9, 23.718),
        (256, 1, 512, 24601.9, 18768.1, 31.083),
    ],
)
def test_equal_requests(num_seqs, drafts, total, tokens_per_second, fixed, gain):
    points = chart_points(num_seqs)
    check_population([[0.75] * 5] * num_seqs, points, drafts, total, tokens_per_second, fixed, gain)


def linear_population(num_seqs: int) -> list[list[float]]:
    return [[0.60 + 0.30 * (i + 0.5) / num_seqs] * 5 for i in range(num_seqs)]


@pytest.mark.parametrize(
    ("num_seqs", "drafts", "total", "tokens_per_second", "fixed", "gain"),
    [
        (16, 5, 96, 4942.9, 4942.9, 0),
        (32, 4.8125, 186, 8792.7, 8779.2, 0.15),
        (60, 3.8833, 293, 13645.2, 13271.3, 2.82),
        (96, 3.4167, 424, 17607.2, 16277.2, 8.17),
        (128, 3, 512, 20159.3, 17344.0, 16.23),
        (256, 1.25, 576, 25060.4, 19235.1, 30.29),
    ],
)
def test_spread_requests(num_seqs, drafts, total, tokens_per_second, fixed, gain):
    points = chart_points(num_seqs)
    check_population(linear_population(num_seqs), points, drafts, total, tokens_per_second, fixed, gain)


@pytest.mark.parametrize(
    ("num_seqs", "drafts", "tokens_per_second"), [(60, 3.9333, 13644.9), (96, 3.4167, 17607.2)]
)
def test_captured_sizes_are_filled(num_seqs, drafts, tokens_per_second):
    """Padding is free: the total is always a captured size."""
    engine = make_engine()
    engine.set_step_times(chart_points(num_seqs))
    points = padded({size: engine.step_ms(num_seqs, size) for size in range(8, 6 * num_seqs + 8, 8)})
    confidences = linear_population(num_seqs)
    lengths = choose(confidences, points)
    assert (num_seqs + sum(lengths)) % 8 == 0
    assert sum(lengths) / num_seqs == pytest.approx(drafts, abs=5e-5)
    engine.set_step_times(points)
    assert rate(confidences, lengths, engine) == pytest.approx(tokens_per_second, rel=1e-4)


@pytest.mark.parametrize(
    ("num_seqs", "tokens", "ms"),
    [(60, 360, 14.3773), (60, 275, 13.3216), (96, 576, 18.5021), (96, 407, 15.9907), (16, 96, 10.6783)],
)
def test_production_curve(num_seqs, tokens, ms):
    """The chart's points were taken at (8, 32), (64, 256), (128, 512), (256, 1024)."""
    engine = make_engine()
    engine.set_step_times(production_points(num_seqs))
    assert engine.step_ms(num_seqs, tokens) == pytest.approx(ms, rel=1e-4)


def production_points(num_seqs: int) -> list[tuple[int, int, float]]:
    taken_at = (8, 64, 128, 256)
    return [
        (num_seqs, tokens, ms - ALPHA * at + ALPHA * num_seqs) for at, (tokens, ms) in zip(taken_at, CHART)
    ]


@pytest.mark.parametrize(
    ("num_seqs", "drafts", "total", "tokens_per_second", "fixed", "gain"),
    [
        (16, 4.375, 86, 4954.7, 4929.9, 0.50),
        (60, 3.5833, 275, 14441.7, 13733.3, 5.16),
        (96, 3.3750, 420, 18802.2, 17074.7, 10.12),
    ],
)
def test_production_table(num_seqs, drafts, total, tokens_per_second, fixed, gain):
    logits = [1.04 + 1.56 * NormalDist().inv_cdf((i + 0.5) / num_seqs) for i in range(num_seqs)]
    confidences = [[1 / (1 + np.exp(-x))] * 5 for x in logits]
    points = production_points(num_seqs)
    check_population(confidences, points, drafts, total, tokens_per_second, fixed, gain)


# --- small exact cases ------------------------------------------------------------------------------------

THREE = [[0.95, 0.90, 0.85, 0.80, 0.75], [0.70, 0.60, 0.50, 0.40, 0.30], [0.90, 0.50, 0.90, 0.50, 0.90]]
STEEP_BEHIND_SIX = [(3, 3, 10.0), (3, 6, 10.0), (3, 7, 10.6)]
GRAPHS = padded({4: 10, 8: 11, 12: 13, 16: 17, 20: 22})
ONE_STEP = padded({3: 10, 4: 15, 18: 15.2})


@pytest.mark.parametrize(
    ("points", "lengths", "theta"),
    [
        (STEEP_BEHIND_SIX, [5, 2, 3], 0.663676),
        (GRAPHS, [5, 2, 2], 0.693785),  # the first maximum is (3, 1, 1)
        (ONE_STEP, [5, 5, 5], 0.666326),  # the first maximum is (0, 0, 0)
    ],
)
def test_the_whole_list_is_scanned(points, lengths, theta):
    assert choose(THREE, points) == lengths
    engine = make_engine()
    engine.set_step_times(points)
    assert rate(THREE, lengths, engine) / 1e3 == pytest.approx(theta, abs=5e-7)


def test_ties_go_to_the_lower_sequence_then_to_the_lower_position():
    assert choose([[0.8, 0.8]] * 3, padded({7: 10, 100: 100})) == [2, 1, 1]
    assert choose([[0.5, 1.0]] * 3, padded({5: 10, 100: 100})) == [2, 0, 0]
    assert choose([[1.0, 0.5], [0.5, 1.0], [1.0, 1.0]], padded({6: 10, 100: 100})) == [1, 0, 2]


def test_of_equal_rates_the_shortest_wins():
    """A sure draft whose time is exactly its worth is not verified."""
    assert choose([[1.0, 1.0]], [(1, 1, 10.0), (1, 2, 20.0), (1, 3, 30.0)]) == [0]


def random_curve(rng: random.Random, num_seqs: int, most: int):
    """(points, time) of a random curve: captured sizes or straight lines, convex or not."""
    sizes = sorted({most, *rng.sample(range(1, most + 1), rng.randint(1, min(4, most)))})
    steps = [rng.choice([0.0, 0.1, rng.random(), 5 * rng.random()]) for _ in sizes]
    if rng.random() < 0.3:
        steps.sort()
    times = np.cumsum(steps) + 1.0
    if rng.random() < 0.5:
        table = dict(zip(sizes, times.tolist()))
        return padded(table), lambda tokens: next(ms for size, ms in table.items() if size >= tokens)
    points = [(num_seqs, size, ms) for size, ms in zip(sizes, times.tolist())]
    return points, lambda tokens: float(np.interp(tokens, sizes, times))


@pytest.mark.parametrize("case", range(300))
def test_no_choice_is_better(case):
    """Against all combinations of lengths, on tables that are convex, jagged or flat."""
    rng = random.Random(case)
    num_seqs, k = rng.randint(1, 4), rng.randint(1, 4)
    points, time_of = random_curve(rng, num_seqs, num_seqs * (1 + k))
    levels = rng.choice([4, 1000])
    confidences = [[rng.randint(1, levels) / levels for _ in range(k)] for _ in range(num_seqs)]
    lengths = choose(confidences, points)

    def theta(choice) -> float:
        return tokens_per_step(confidences, choice) / time_of(num_seqs + sum(choice))

    best = max(itertools.product(range(k + 1), repeat=num_seqs), key=theta)
    assert theta(lengths) == pytest.approx(theta(best), rel=1e-6), f"{lengths=} {best=}"


# --- the curve --------------------------------------------------------------------------------------------


def test_two_dimensions_are_exact_for_additive_times():
    """bias + a requests + b tokens, measured on a coarse grid, is found everywhere, also beyond the grid."""

    def ms(num_seqs, tokens):
        return 2.0 + 0.3 * num_seqs + 0.05 * tokens

    engine = make_engine()
    grid = [(n, n * width, ms(n, n * width)) for n in (1, 4, 16, 64) for width in (1, 4, 6)]
    random.shuffle(grid)
    engine.set_step_times(grid, [(n, 1.0 + 0.1 * n) for n in (1, 16, 64)])
    for num_seqs in (1, 2, 3, 4, 9, 16, 40, 64, 100):
        for width in (1, 1.5, 2, 4, 5, 6, 8):
            tokens = int(num_seqs * width)
            assert engine.step_ms(num_seqs, tokens) == pytest.approx(ms(num_seqs, tokens), rel=1e-12)
        assert engine.undrafted_step_ms(num_seqs) == pytest.approx(1.0 + 0.1 * num_seqs, rel=1e-12)


def test_noise_never_makes_more_work_cheaper():
    engine = make_engine()
    engine.set_step_times([(1, 1, 5.0), (1, 4, 4.0), (1, 6, 7.0), (4, 4, 4.5), (4, 16, 9.0), (4, 24, 8.0)])
    for num_seqs in range(1, 4):
        times = [engine.step_ms(num_seqs, tokens) for tokens in range(num_seqs, 8 * num_seqs)]
        assert times == sorted(times), num_seqs
        wider = [engine.step_ms(num_seqs + 1, width * (num_seqs + 1)) for width in range(1, 8)]
        assert all(
            a <= b for a, b in zip([engine.step_ms(num_seqs, w * num_seqs) for w in range(1, 8)], wider)
        )


def test_captured_sizes_are_the_limit():
    """No total beyond the largest captured size, but sequences that exceed it alone run."""
    sure = [[1.0] * 4] * 3
    assert sum(choose(sure, padded({4: 1, 9: 1.001}))) == 6
    assert choose(sure, padded({1: 1, 2: 1.5})) == [0, 0, 0]
    engine = make_engine()
    engine.set_step_times(padded({2: 10.0, 8: 13.0, 16: 19.0}))
    assert [engine.step_ms(1, n) for n in (1, 2, 3, 8, 9, 16)] == [10, 10, 13, 13, 19, 19]
    assert engine.step_ms(1, 20) == pytest.approx(22.0), "the last slope goes on"


@pytest.mark.parametrize(
    ("points", "undrafted", "message"),
    [
        ([(1, 1, 0.0)], [], "cannot take 0 ms"),
        ([(1, 1, float("nan"))], [], "cannot take"),
        ([(1, 0, 1.0)], [], "no step has 1 sequences and 0 tokens"),
        ([(-1, 1, 1.0)], [], "no step has -1 sequences"),
        ([(1, 1, 1.0), (1, 1, 2.0)], [], "two times"),
        ([(0, 1, 1.0), (1, 1, 2.0)], [], "do not mix"),
        ([(1, 1, 1.0)], [(1, -1.0)], "cannot take -1 ms"),
        ([(1, 1, 1.0)], [(0, 1.0)], "wrong or given twice"),
        ([(1, 1, 1.0)], [(2, 1.0), (2, 1.0)], "wrong or given twice"),
    ],
)
def test_times_that_no_step_has(points, undrafted, message):
    engine = make_engine()
    engine.set_step_times([(1, 1, 3.0)])
    with pytest.raises(ValueError, match=message):
        engine.set_step_times(points, undrafted)
    assert engine.step_ms(1, 1) == 3.0, "a refused curve changes nothing"
    with pytest.raises(ValueError, match="no step has 2 sequences and 1 tokens"):
        engine.add_step_time(2, 1, 1.0)
    with pytest.raises(ValueError, match="cannot take"):
        engine.add_step_time(1, 1, 0.0)


# --- corrections while running ----------------------------------------------------------------------------

FLAT = [(n, n * width, 10.0) for n in (1, 8) for width in (1, 6)]


def test_a_slope_per_token_is_learnt():
    """Median of the medians per number of tokens, of at least ten samples; wild ones do not matter."""
    engine = make_engine()
    engine.set_step_times(FLAT)
    for _ in range(9):
        for tokens in (8, 16, 24):
            engine.add_step_time(8, tokens, 10.0 + 0.5 * tokens)
    before = engine.step_ms(8, 40) - engine.step_ms(8, 8)
    for tokens in (8, 16, 24):
        engine.add_step_time(8, tokens, 10.0 + 0.5 * tokens)
    assert before == 0.0, "nine samples of a size are too few"
    for tokens in (8, 16, 24):
        engine.add_step_time(8, tokens, 5000.0)
    assert engine.step_ms(8, 40) - engine.step_ms(8, 8) == pytest.approx(16.0)


def test_what_remains_is_a_constant_per_number_of_sequences():
    engine = make_engine()
    engine.set_step_times(FLAT)
    for _ in range(5):
        engine.add_step_time(8, 8, 14.0)
    assert engine.step_ms(8, 8) == pytest.approx(14.0) and engine.step_ms(8, 48) == pytest.approx(14.0)
    assert engine.step_ms(2, 2) == pytest.approx(11.0), "elsewhere by the same share of each sequence"
    for _ in range(9):
        engine.add_step_time(8, 8, 12.0)  # the older ones are forgotten
    assert engine.step_ms(8, 8) == pytest.approx(12.0)


def test_corrections_are_never_negative():
    engine = make_engine()
    engine.set_step_times(FLAT)
    for _ in range(40):
        for tokens in (8, 48):
            engine.add_step_time(8, tokens, 3.0)
    assert engine.step_ms(8, 8) == engine.step_ms(8, 48) == 10.0


def test_plain_steps_have_a_correction_of_their_own():
    engine = make_engine()
    engine.set_step_times(FLAT, [(1, 7.0), (8, 7.0)])
    assert engine.undrafted_step_ms(8) == 7.0
    for _ in range(5):
        engine.add_step_time(8, 8, 13.0)
    assert engine.step_ms(8, 8) == 13.0 and engine.undrafted_step_ms(8) == 10.0, "until they are seen"
    for _ in range(5):
        engine.add_step_time(8, 16, 99.0, is_drafted=False)  # not plain
        engine.add_step_time(8, 8, 3.5, is_drafted=False)
    assert engine.undrafted_step_ms(8) == 3.5 and engine.step_ms(8, 8) == 13.0
    assert engine.undrafted_step_ms(1) == 3.5, "elsewhere by as much"
    for _ in range(9):
        engine.add_step_time(1, 1, 14.0, is_drafted=False)
    assert engine.undrafted_step_ms(1) == 14.0 and engine.undrafted_step_ms(8) == 3.5
    for _ in range(9):
        engine.add_step_time(9, 9, 0.1, is_drafted=False)
    assert engine.undrafted_step_ms(8) == pytest.approx(0.7), (
        "about as many sequences, and no less than a tenth"
    )


def test_a_new_curve_forgets_the_corrections():
    engine = make_engine()
    engine.add_step_time(1, 1, 99.0)  # nothing to correct yet
    assert engine.step_ms(1, 1) == engine.undrafted_step_ms(1) == 0.0
    engine.set_step_times(FLAT)
    for _ in range(20):
        engine.add_step_time(8, 8, 14.0)
    engine.set_step_times(FLAT)
    assert engine.step_ms(8, 8) == 10.0


# --- fall-backs -------------------------------------------------------------------------------------------

STEEP = [(n, n * width, float(n * width)) for n in (1, 16) for width in (1, 6)]
EVEN = [[0.6] * 3] * 3


def test_without_a_curve_everything_is_verified():
    assert choose(EVEN, []) == [3, 3, 3]
    assert choose(EVEN, STEEP, use_draft_budget=False) == [3, 3, 3]


def test_when_speculation_does_not_pay_nothing_is_verified():
    assert choose(EVEN, STEEP) == [0, 0, 0]
    assert choose(EVEN, FLAT) == [3, 3, 3]


def test_a_small_gain_is_not_worth_choosing():
    """+0.531 % at 60 requests, +5.241 % at 96."""
    for num_seqs, drafts in ((60, 5), (96, 3)):
        lengths = choose([[0.75] * 5] * num_seqs, chart_points(num_seqs), draft_budget_min_gain=0.02)
        assert lengths == [drafts] * num_seqs
    with pytest.raises(ValueError, match="draft_budget_min_gain"):
        make_engine(draft_budget_min_gain=-0.1)


def test_never_everything_where_plain_decoding_is_faster():
    """Verifying all is 1 % slower than verifying nothing: close, but behind plain decoding."""
    points = [(1, 1, 10.0), (1, 2, 10.0 * 1.5 * 1.01)]
    assert choose([[0.5]], points, draft_budget_min_gain=0.02) == [0]


def test_no_more_drafts_than_tokens_to_come():
    for max_tokens, most in ((2, 0), (3, 1), (4, 2), (9, 3)):
        assert choose([[0.9] * 3] * 2, FLAT, fields={"max_tokens": max_tokens}.items()) == [most] * 2


def test_confidences_that_are_no_numbers():
    assert choose([[float("nan"), 1.0], [2.0, 0.5], [-1.0, 1.0], [0.0, 1.0]], padded({6: 1, 99: 9})) == [
        0,
        2,
        0,
        0,
    ]


def test_statistics_of_the_choices():
    engine = make_budget(2, 3, STEEP)
    for _ in range(2):
        engine.add(make_params(max_tokens=40), tokens_of(3))
    propose(engine, engine.schedule(), [[1.0] * 3, [0.5] * 3])
    assert engine.draft_budget_stats().num_steps == 0, "a prefill decides nothing"
    propose(engine, engine.schedule(), [[1.0] * 3, [0.5] * 3])
    stats = engine.draft_budget_stats()
    assert (stats.num_steps, stats.num_full, stats.num_cut, stats.num_none) == (1, 0, 0, 1)
    assert stats.price == pytest.approx(1.0), "a draft must be certain to be worth its time"
    engine.set_step_times([(2, 2, 1.0), (2, 5, 1.1), (2, 8, 5.0)])
    engine.schedule()
    stats = engine.draft_budget_stats()
    assert (stats.num_steps, stats.num_cut) == (2, 1) and stats.price > 0.5
    assert make_engine().draft_budget_stats().num_steps == 0
