"""The command that compares bounded replay with the exact model: what it measures and prints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch

from deepinfer.entrypoints import replay_report
from deepinfer.entrypoints.replay_report import Deviation, compare, describe
from tests.support.engines import PLAIN_STEPS, greedy, make_llm, shared_weights
from tests.support.paths import MODELS


@pytest.fixture(autouse=True)
def one_copy() -> Iterator[None]:
    with shared_weights():
        yield


def test_divergence_and_best_tokens():
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]]).log()
    cut = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]]).log()
    found = compare(7, exact, cut)
    assert found.num_prompt == 7 and found.agrees == (False, True) and found.num_same == 0
    assert found.divergences == pytest.approx((0.25 * math.log(2), 0.0), abs=1e-6)
    assert compare(7, exact, exact).divergences == (0.0, 0.0)
    assert Deviation(9, (0.0,) * 3, (True, True, False)).num_same == 2


def test_the_report_counts_what_was_cut():
    found = [
        Deviation(100, (0.0, 0.0), (True, True)),
        Deviation(200, (0.1, 0.3), (True, False)),
        Deviation(300, (0.2, 0.2), (True, True)),
    ]
    text = describe(found, keep=150, by_prompt=True)
    assert text.splitlines()[0] == "1 prompts have at most 150 tokens: nothing is cut there"
    assert text.splitlines()[-1].split() == "2 prompts 4 2.0e-01 3.0e-01 75.0% 1.5".split()
    assert len(text.splitlines()) == 5
    assert "give longer ones" in describe(found, keep=300)


def run(capsys: pytest.CaptureFixture, tmp_path, texts: list[str], *options: str) -> list[str]:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(texts))
    arguments = [str(MODELS["v41-tiny"]), "--prompts", str(path), "--tokens", "6", *options]
    assert replay_report.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_measured_on_a_model(capsys, tmp_path, monkeypatch):
    """A prompt that is kept whole is the same bits; a cut one is close and not equal; so is mask mode."""
    seen = []
    monkeypatch.setattr(replay_report, "compare", lambda *args: seen.append(compare(*args)) or seen[-1])
    lines = run(capsys, tmp_path, ["Once upon a time there was a fox.", "In the beginning"], "--join", "200")
    assert lines[-1].startswith("    2 prompts") and "12" in lines[-1].split()
    cut = list(seen)
    assert all(0 < max(deviation.divergences) < 0.1 for deviation in cut)
    assert [deviation.num_prompt for deviation in cut] == [200, 200]
    run(capsys, tmp_path, ["Once upon a time there was a fox."], "--join", "140")
    assert max(seen[-1].divergences) == 0 and all(seen[-1].agrees)
    run(
        capsys,
        tmp_path,
        ["Once upon a time there was a fox.", "In the beginning"],
        "--join",
        "200",
        "--mode",
        "mask",
    )
    assert seen[-2:] == cut


def test_the_first_64_tokens_are_compared(capsys, tmp_path, monkeypatch):
    """Unless a number is given."""
    seen = []
    monkeypatch.setattr(replay_report, "compare", lambda *args: seen.append(compare(*args)) or seen[-1])
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["Once upon a time there was a fox."]))
    assert replay_report.main([str(MODELS["v41-tiny"]), "--prompts", str(path), "--join", "150"]) == 0
    assert len(seen[0].divergences) == len(seen[0].agrees) == 64
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["1", "prompts", "64"]


def test_logits_are_those_of_the_tokens():
    rows = []
    with make_llm(settings=PLAIN_STEPS, max_num_seqs=1) as llm:
        llm.llm_engine.model_runner.watch_logits(lambda logits: rows.append(logits.clone()))
        outputs = llm.generate([[5, 6, 7], [8, 9]], greedy(4), use_tqdm=False)
    best = torch.cat(rows).argmax(1).tolist()
    assert best == [token for output in outputs for token in output.outputs[0].token_ids]


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--keep", "100"), "100 is less than"), (("--join", "200", "--max-model-len", "203"), "max-model-len")],
)
def test_mistakes_are_named(capsys, tmp_path, options, message):
    with pytest.raises(SystemExit):
        run(capsys, tmp_path, ["Once upon a time there was a fox."], *options)
    assert message in capsys.readouterr().err
