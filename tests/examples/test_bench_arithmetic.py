"""The benchmark's arithmetic, scale and traces, against numpy, published numbers and cases by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from deepinfer.models.deepseek_v41 import release
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.work import attention_terms, flops_per_token
from examples.bench import arithmetic, profiling, replay
from examples.bench.arithmetic import Interval
from examples.bench.components import StepShape, step_work
from examples.bench.scale import Scale
from examples.bench.setting import Setting
from examples.sweep import plot_pareto


def interval(ms: float, step: int, requests: int = 4, tokens: int = 10, prefill: int = 0) -> Interval:
    return Interval(ms, step - 1, step, requests, tokens, prefill)


@pytest.mark.parametrize("count", [1, 2, 9, 10, 1000])
def test_quantiles_are_numpys(count: int) -> None:
    values = [random.Random(count).lognormvariate(0, 2) for _ in range(count)]
    found = arithmetic.quantiles("t", [None, *values, None])
    expected = {"t_mean": np.mean(values)}
    expected |= {f"t_p{q}": np.quantile(values, q / 100) for q in (50, 90, 99)}
    assert found == pytest.approx(expected, rel=1e-12)


def test_quantiles_of_nothing_are_none() -> None:
    assert set(arithmetic.quantiles("t", [None]).values()) == {None}
    with pytest.raises(ValueError, match="at least one"):
        arithmetic.quantile([], 0.5)


def test_intervals_with_a_flush_are_dropped() -> None:
    steps = [interval(1.0, step) for step in range(95, 206)]
    kept = arithmetic.without_flushes(steps, 100)
    assert [each.last_step for each in steps if each not in kept] == [100, 200]
    assert arithmetic.without_flushes(steps, 0) == steps
    # A call of `step` that commits two steps over a flush is dropped as well.
    assert arithmetic.without_flushes([Interval(1.0, 99, 101, 8, 8, 0)], 100) == []


def test_rates_are_counted_over_all_devices() -> None:
    steps = [interval(20.0, 1, tokens=8), interval(30.0, 2, tokens=12)]
    figures = arithmetic.decode_figures(steps, num_requests=4, num_devices=5)
    assert figures == pytest.approx(
        {
            "request_steps_per_s": 8 / 0.05,
            "tokens_per_request_step": 20 / 8,
            "tokens_per_s": 20 / 0.05,
            "tokens_per_s_per_user": 20 / 0.05 / 4,
            "request_steps_per_s_per_device": 8 / 0.05 / 5,
            "tokens_per_s_per_device": 20 / 0.05 / 5,
        }
    )
    prefills = [interval(100.0, 1, 0, 0, 512), interval(300.0, 2, 0, 0, 512)]
    assert arithmetic.prefill_figures(prefills, 512, 4) == pytest.approx(
        {"prefill_tokens_per_s": 2560, "prefill_tokens_per_s_per_device": 640}
    )


def test_steps_that_lack_a_request_or_tokens_are_refused() -> None:
    with pytest.raises(RuntimeError, match="3 of 4 requests ran in step 2"):
        arithmetic.decode_figures([interval(1.0, 1), interval(1.0, 2, requests=3)], 4, 1)
    with pytest.raises(RuntimeError, match="computed 500 prompt tokens instead of 512"):
        arithmetic.prefill_figures([interval(1.0, 7, 0, 0, 500)], 512, 1)
    with pytest.raises(RuntimeError, match="no step"):
        arithmetic.decode_figures([], 4, 1)


def test_assumed_acceptance() -> None:
    chain = {1: 1.75, 2: 2.3125, 3: 2.7344, 4: 3.0508, 5: 3.2881, 7: 3.5995}
    assert {n: round(arithmetic.chain_tokens(n, 0.75), 4) for n in chain} == chain
    assert arithmetic.linear_tokens(3, 0.75) == 3.25  # the published charts' factor
    assumed = arithmetic.assumed_figures(1000.0, 8, 2, 3, 0.75)
    assert all(name.startswith("assumed_") for name in assumed)
    assert assumed["assumed_tokens_per_s_per_user"] == pytest.approx(1000 * 2.734375 / 8)
    assert assumed["assumed_linear_tokens_per_s_per_device"] == pytest.approx(1625)


def test_scale() -> None:
    assert Scale.from_env(1, {}) == Scale(1, 0, 1, 1)
    scale = Scale.from_env(4, {"WORLD_SIZE": "16", "RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert (scale.ep, scale.dp) == (64, 16)
    with pytest.raises(ValueError, match="64 devices: an engine runs on one"):
        scale.check_supported()
    Scale.from_env(1, {"CUDA_VISIBLE_DEVICES": "5"}).check_supported()
    for cp, environment in (
        (3, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (1, {"WORLD_SIZE": "two"}),
        (1, {"WORLD_SIZE": "2", "RANK": "2"}),
    ):
        with pytest.raises(ValueError, match=r"divide|whole number|expected a node"):
            Scale.from_env(cp, environment)


def test_a_poisson_trace_has_its_rate() -> None:
    arrivals = replay.trace_of(
        Setting("trace", "m", arrivals="poisson:20", num_arrivals=4000, output_tokens=7, seed=3)
    )
    times = np.array([each.at_s for each in arrivals])
    gaps = np.diff(times, prepend=0.0)
    # The mean of 4,000 exponential gaps has a standard deviation of 1 / (20 sqrt(4000)); so has none else.
    assert abs(gaps.mean() - 0.05) < 4 * 0.05 / 4000**0.5
    assert gaps.std() == pytest.approx(0.05, rel=0.1)
    assert {each.output_tokens for each in arrivals} == {7}


def test_a_trace_file(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 2, "output_tokens": 5, "prompt": "b"},
        {"arrival_s": 0.5, "output_tokens": 3, "prompt_tokens": 9},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert replay.read_arrivals(file) == [
        replay.Arrival(0.5, 3, None, 9),
        replay.Arrival(2.0, 5, "b", None),
    ]
    for text, message in (
        ('{"arrival_s": 1}', "line 1: expected"),
        ("[]", "line 1: expected"),
        ('{"arrival_s": -1, "output_tokens": 1}', "times are >= 0"),
        ("", "holds no request"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            replay.read_arrivals(file)
    for name in ("poisson:", "poisson:0", "poisson:x", str(tmp_path / "none")):
        with pytest.raises(ValueError, match="--trace"):
            replay.trace_of(Setting("trace", "m", arrivals=name))


def test_the_pareto_front() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (1.5, 4.5), (1.5, 4.0), (3.0, 1.0), (3.0, 1.0)]
    assert plot_pareto.pareto_front(points, False) == [True, True, True, False, True, True]
    assert plot_pareto.pareto_front([(10.0, 5.0), (20.0, 4.0), (5.0, 1.0)], True) == [True, False, True]


@pytest.mark.parametrize("context", [40, 300, 70_000])
def test_the_work_of_components_is_the_schedulers_estimate(context: int) -> None:
    """Sums over components against `work.py`, which the scheduler weighs steps with."""
    config = DeepseekV41Config.from_dict(release.CONFIG)
    shape = StepShape(num_requests=3, rows=4, decoder_rows=4, output_rows=4, context=context, num_drafts=0)
    flops = {name: each.flops for name, each in step_work(config, shape, lambda _, count: count).items()}
    seen = sum(
        term.flops * min((context + term.offset) // term.divisor, term.cap)
        for term in attention_terms(config)
    )
    windows = config.num_hidden_layers * 4.0 * config.num_attention_heads * config.head_dim
    seen += windows * (128 - min(context, 128))  # kernels walk whole windows
    left_out = flops.pop("head") + flops.pop("sampling") + flops.pop("mHC")
    assert left_out > 0
    assert sum(flops.values()) == pytest.approx(12 * (flops_per_token(config) + seen), rel=2e-3)


def test_the_innermost_range_owns_a_launch() -> None:
    ranges = [(10, 100, "a"), (20, 30, "b"), (30, 40, "c"), (22, 25, "d"), (200, 210, "e")]
    expected = {10: "a", 21: "b", 24: "d", 26: "b", 35: "c", 50: "a", 205: "e"}
    expected |= dict.fromkeys((5, 150, 300), "other")
    owner = profiling._Innermost(ranges)
    assert {moment: owner(moment) for moment in expected} == expected
