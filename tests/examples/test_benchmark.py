"""The benchmark program over the bundled model, at its smallest: every phase, its JSON lines, its charts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import benchmark
from examples.bench import prefill
from examples.sweep import plot_pareto


@pytest.fixture(autouse=True)
def few_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "PREFILL_STEPS", 1)
    monkeypatch.setattr(prefill, "NUM_ALONE", 1)


def measured(tmp_path: Path, *arguments: str) -> list[dict]:
    file = tmp_path / "results.jsonl"
    file.unlink(missing_ok=True)
    assert benchmark.main([*arguments, "--output", str(file)]) == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_prefill_and_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    computed, plain, drafting = measured(
        tmp_path,
        *("--prefill_batch_size", "128", "--context_length", "256", "--uncached", "128"),
        *("--prefill_steps", "3", "--decode_num_requests", "2", "--speculation", "0", "2"),
        *("--warmup", "2", "--steps", "5", "--assume-acceptance", "0.5"),
    )
    assert computed["cached_tokens_per_request"] == 128
    assert computed["prefill_tokens_per_s"] == pytest.approx(128e3 / computed["step_ms_mean"])
    for result in (plain, drafting):
        assert result["phase"] == "decode" and result["context_length"] == 256
        assert result["num_steps"] + result["num_dropped_steps"] == 5
        product = result["request_steps_per_s"] * result["tokens_per_request_step"]
        assert result["tokens_per_s"] == pytest.approx(product)
        assert result["request_steps_per_s"] == pytest.approx(2e3 / result["step_ms_mean"])
        assert 0 < result["step_ms_p50"] <= result["step_ms_p90"] <= result["step_ms_p99"]
        assert result["ttft_ms_p50"] > 0 and result["tpot_ms_p50"] > 0
    assert plain["tokens_per_request_step"] == 1 and "assumed_acceptance" not in plain
    assert 1 <= drafting["tokens_per_request_step"] <= 3
    assert drafting["assumed_tokens_per_request_step"] == 1.75
    text = capsys.readouterr().out
    assert "tokens/step, measured" in text and "assumed tokens/step" in text

    assert plot_pareto.main([str(tmp_path / "results.jsonl"), "--output", str(tmp_path), "--csv-only"]) == 0
    assert (tmp_path / "decode.csv").read_text().count("\n") == 3
    assert (tmp_path / "prefill.csv").read_text().count("\n") == 2


def test_a_trace(tmp_path: Path) -> None:
    (result,) = measured(
        tmp_path,
        *("--trace", "poisson:200", "--num_arrivals", "5", "--output_tokens", "6", "--speculation", "2"),
    )
    assert (result["num_arrivals"], result["num_output_tokens"]) == (5, 30)
    assert result["queue_ms_p50"] <= result["ttft_ms_p50"] <= result["total_ms_p50"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context_length", "300", "--uncached", "128"], "no multiple of 128"),
        (["--cp", "2"], "--cp 2 does not divide"),
        (["--prompts", "no-such-set"], "no-such-set"),
    ],
)
def test_what_does_not_fit_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = "decode" if "--prompts" in arguments else "prefill"
    assert benchmark.main(["--phases", phase, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_one_rank_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    computed, computed_parts, decode, decode_parts = measured(
        tmp_path,
        *("--model", str(benchmark.BUNDLED), "--dummy", "--emulated_ep", "2", "--yoco_clip", "--roofline"),
        *("--context_length", "384", "--uncached", "128", "--prefill_batch_size", "256"),
        *("--prefill_steps", "1", "--decode_num_requests", "2", "--speculation", "2"),
        *("--warmup", "2", "--steps", "3"),
    )
    assert (computed["requests_per_step"], computed["cached_tokens_per_request"]) == (2, 256)
    for found in (computed_parts, decode_parts):
        rows = {row["component"]: row for row in found["rows"]}
        assert all(row["measured_ms"] > row["floor_ms"] > 0 for row in (rows["head"], rows["routed experts"]))
        parts = sum(row["measured_ms"] for name, row in rows.items() if name != "together")
        assert rows["together"]["measured_ms"] == pytest.approx(parts)
        assert found["cache_bytes_read"] > 0
    # Replay that keeps 140 tokens leaves out none of 128: experts of both requests' rows, in every layer.
    slots = {r["component"]: r["gflop"] for r in computed_parts["rows"]}["routed experts"]
    assert computed_parts["phase"] == "prefill roofline"
    assert slots == pytest.approx(8 * 256 * 4 * 6 * 256 * 128 / 1e9)
    assert decode["tokens_per_request_step"] == 1 and not decode["tokens_are_meaningful"]
    assert any("dispatch" in each["what"] for each in decode["skipped"])
    text = capsys.readouterr().out
    assert "one rank of 2: 8 of 16 + 0 experts" in text
    assert "| routed experts |" in text and "(random weights)" in text
