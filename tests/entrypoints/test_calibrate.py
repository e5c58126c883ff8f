"""The command that fits confidence temperatures: what it records, fits, prints and writes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer.engine import parts
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.draft_outcomes import BlockRecorder, record_blocks
from deepinfer.engine.intake import Intake, Prompt
from deepinfer.entrypoints import calibrate
from deepinfer.entrypoints.calibration_text import Estimates, describe, notes_of
from deepinfer.entrypoints.prompts_file import BUNDLED_PROMPTS, TextPrompt, read_prompts
from deepinfer.sampling.calibration import (
    Blocks,
    Calibration,
    held_out_survivals,
    reliability_table,
    report,
    report_survivals,
)
from deepinfer.sampling.confidence import ConfidenceScale, read_calibration, resolve_confidence_scale
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, make_llm, prompt_of, shared_weights
from tests.support.models import load_config
from tests.support.paths import MODELS
from tilelang_ops.common.numerics import sigmoid

EOS = 7  # of the made-up engine
FIXED = dataclasses.replace(PLAIN_STEPS, num_draft_tokens=5)


@pytest.fixture(autouse=True)
def one_copy() -> Iterator[None]:
    with shared_weights():
        yield


# Which outcomes of a block are known


def step(
    recorder, seq_ids, *, q=None, emitted=None, kept=None, sampled=None, finished=(), base=0.0, drafts=None
):
    """One step of a made-up engine; a prefill where `q` is None. Logits are base + sequence id, k = 3."""
    count = len(seq_ids)
    plan = SimpleNamespace(
        seq_ids=np.array(seq_ids),
        is_prefill=q is None,
        seqlens_q=np.array(q or [7] * count),
        num_sampled_rows=np.array(sampled or q or [1] * count),
    )
    logits = base + np.array(seq_ids, dtype=np.float32)[:, None] + np.zeros((count, 3), np.float32)
    result = SimpleNamespace(
        num_emitted=None if q is None else np.array(emitted),
        confidence_logits=logits,
        drafts=np.full((count, 3), 50) if drafts is None else np.array(drafts),
    )
    commit = SimpleNamespace(
        num_new_tokens=np.array(kept or emitted or [1] * count),
        finished_ids=np.array(finished, dtype=np.int64),
    )
    recorder.add_step(plan, result, commit)


def outcomes(recorder) -> list[tuple[float, int, int]]:
    blocks = recorder.recorded(3).blocks
    return [
        (float(logits[0]), int(accepted), int(observed))
        for logits, accepted, observed in zip(blocks.logits, blocks.num_accepted, blocks.num_observed)
    ]


def test_a_block_is_tested_by_the_next_step_of_its_sequence():
    recorder = BlockRecorder(EOS)
    step(recorder, [1, 2])
    assert outcomes(recorder) == []
    step(recorder, [2, 1], q=[4, 4], emitted=[4, 1], base=10)
    assert outcomes(recorder) == [(2, 3, 3), (1, 0, 3)]
    step(recorder, [3])  # a prefill in between
    step(recorder, [1, 2, 3], q=[4, 4, 4], emitted=[2, 3, 1], base=20)
    assert outcomes(recorder)[2:] == [(11, 1, 3), (12, 2, 3), (3, 0, 3)]


def test_positions_that_were_not_verified_are_unknown():
    recorder = BlockRecorder(EOS)
    step(recorder, [1, 2, 3])
    step(recorder, [1, 2, 3], q=[3, 2, 1], emitted=[1, 2, 1])
    assert outcomes(recorder) == [(1, 0, 2), (2, 1, 1)], "also behind a refusal; nothing verified is no block"


def test_positions_behind_the_end_of_a_sequence_are_unknown():
    recorder = BlockRecorder(EOS)
    step(recorder, [1, 2, 3])
    # 1: the second accepted draft is a stop token; 2: a token that replaces a draft is; 3: the bonus token is
    step(recorder, [1, 2, 3], q=[4, 4, 4], emitted=[4, 2, 4], kept=[2, 2, 4], finished=[1, 2, 3])
    assert outcomes(recorder) == [(1, 2, 2), (2, 1, 3), (3, 3, 3)]
    step(recorder, [1], q=[4], emitted=[4])
    assert len(outcomes(recorder)) == 3, "blocks of sequences that ended are forgotten"


def test_positions_behind_a_drafted_end_are_unknown_whatever_becomes_of_it():
    """Else they would count where the end was refused, and only there."""
    recorder = BlockRecorder(EOS)
    step(recorder, [1, 2, 3, 4], drafts=[[50, EOS, 50]] * 3 + [[50, 50, EOS]])
    step(recorder, [1, 2, 3, 4], q=[4] * 4, emitted=[1, 2, 4, 2], kept=[1, 2, 2, 2], finished=[3])
    assert outcomes(recorder) == [(1, 0, 2), (2, 1, 2), (3, 2, 2), (4, 1, 3)]
    assert recorder.recorded(3).sources.tolist() == [1, 2, 3, 4]


def test_a_recomputed_sequence_gets_another_block():
    recorder = BlockRecorder(EOS)
    step(recorder, [1])
    step(recorder, [1], sampled=[0], base=50)  # a chunk of its recomputation
    step(recorder, [1], base=60)
    step(recorder, [1], q=[4], emitted=[1])
    assert outcomes(recorder) == [(61, 0, 3)]


# Against an engine


def requests(count: int, max_tokens: int) -> list:
    intake = Intake(None, load_config("v41-tiny").vocab_size, 256, "coupled")
    return [
        intake.check(
            str(row),
            Prompt.of(list(prompt_of(5 + row, row))),
            SamplingParams(
                seed=row,
                max_tokens=max_tokens + row % 3,
                ignore_eos=True,
                logit_bias={1: -100.0},  # never EOS
            ),
        )
        for row in range(count)
    ]


def test_blocks_are_what_the_engine_counts():
    """Against the engine's own counters, and its reliability table, whose outcomes come from later tokens."""
    args = EngineArgs(str(MODELS["v41-tiny"]), max_num_seqs=4, max_model_len=256)
    recorded = record_blocks(parts.build_parts(args, FIXED), work := requests(6, 14))
    blocks = recorded.blocks
    head_alone = dataclasses.replace(FIXED, confidence_temperatures=(1.0,))
    with make_llm("v41-tiny", settings=head_alone, max_num_seqs=4, max_model_len=256) as llm:
        llm.generate(
            [request.token_ids.tolist() for request in work],
            [request.params for request in work],
            use_tqdm=False,
        )
        stats, tables = llm.llm_engine.stats, llm.llm_engine.draft_reliability()
    assert [int(blocks.known(j).sum()) for j in range(5)] == stats.verified_by_position.tolist()
    accepted = [int((blocks.labels(j) & blocks.known(j)).sum()) for j in range(5)]
    assert accepted == stats.accepted_by_position.tolist() and 0 < accepted[0] < blocks.logits.shape[0]
    assert np.ptp(blocks.logits) > 1
    assert np.unique(recorded.sources).tolist() == list(range(6))
    survivals = Calibration.identity(5).survivals(blocks.logits)
    num_equal = 0
    for j in range(5):
        known = blocks.known(j)
        expected = reliability_table(survivals[known, j], blocks.labels(j)[known])
        for ours, theirs in zip(expected, tables[j]):
            # The engine also labels drafts that came too late to be verified, by the sequence's last tokens.
            more = theirs.count - ours.count
            stood = theirs.count * theirs.mean_label - ours.count * ours.mean_label
            assert 0 <= more <= 5 * len(work) and -1e-6 <= stood <= more + 1e-6
            if ours.count == theirs.count:
                assert ours.mean_score == pytest.approx(theirs.mean_score, abs=1e-6)
                num_equal += ours.count
    assert num_equal > 30


def test_confidences_are_the_scaled_logits():
    """What a runner hands to the scheduler, beside what it keeps for calibration."""
    args = EngineArgs(str(MODELS["v41-tiny"]), max_num_seqs=4, max_model_len=256)
    engine = parts.build_parts(args, FIXED)
    results = []
    sample = engine.runner.sample
    engine.runner.sample = lambda inputs: results.append(sample(inputs)) or results[-1]
    record_blocks(engine, requests(3, 6))
    scale = ConfidenceScale.of(load_config("v41-tiny").dspark_sts_temperatures)
    num_compared = 0
    for output in results:
        result = output.fetch()
        scaled = torch.from_numpy(result.confidence_logits) / scale.temperatures + scale.offsets
        expected = sigmoid(scaled.clamp(-60, 60)).numpy()
        # Behind a drafted end of sequence nothing is worth verifying.
        ends = (result.drafts == engine.tokenizer.eos_token_id).cumsum(1)
        is_open = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], 1) == 0
        is_open &= result.confidence_logits.any(1, keepdims=True)  # rows that drafted
        assert (result.confidences == np.where(is_open, expected, 0)).all()
        num_compared += int(is_open.sum())
    assert num_compared > 20


def test_results_hold_no_logits_unless_asked():
    args = EngineArgs(str(MODELS["v41-tiny"]), max_num_seqs=4, max_model_len=256)
    assert not parts.build_parts(args, FIXED).runner.keeps_confidence_logits


# The command


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.json"
    stories = ["Once upon a time there was", "One day, a"]
    path.write_text(json.dumps({"questions": ["Who are you?"], "stories": stories, "format": "words"}))
    return path


def test_prompts(tmp_path, prompts_file):
    stories = [TextPrompt("Once upon a time there was", "stories"), TextPrompt("One day, a", "stories")]
    assert read_prompts(prompts_file) == [TextPrompt("Who are you?", "questions"), *stories]
    assert read_prompts(prompts_file, ["stories"]) == stories
    assert [prompt.is_chat for prompt in read_prompts(prompts_file)] == [True, False, False]
    assert len(read_prompts(BUNDLED_PROMPTS)) == 52
    listed = tmp_path / "list.json"
    listed.write_text('["a", "b", "a"]')
    assert read_prompts(listed) == [TextPrompt("a"), TextPrompt("b")], (
        "once, or a fit would see held-out ones"
    )
    for content in ("[]", "{}", '[1, "a"]', '[""]', '"text"'):
        listed.write_text(content)
        with pytest.raises(ValueError, match=r"list\.json must be a JSON list of texts"):
            read_prompts(listed)
    with pytest.raises(ValueError, match="--prompts"):
        read_prompts(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="no group 'poems'; it has questions, stories"):
        read_prompts(prompts_file, ["stories", "poems"])


def test_tables():
    """Two groups, one of which has no outcome at the last position."""
    accepted, observed = np.array([2, 1, 0, 1, 0]), np.array([2, 2, 2, 1, 1])
    blocks = Blocks(np.log([[3.0, 1.0]] * 5), accepted, observed)
    found = Calibration(
        np.array([2.0, 0.5]), np.array([0.0, 0.25]), *np.array([[False, True], [False, True]])
    )
    estimates = [
        Estimates.of("head alone", blocks, Calibration.identity(2)),
        Estimates("fitted", np.full((5, 2), 0.5)),
    ]
    text = describe(blocks, estimates, found, ["a", "b"], np.array([0, 0, 0, 1, 1]), by_position=True)
    rows = [line.split() for line in text.splitlines()]
    assert "1 5 0.6000 head alone 1.000 0.00 0.750 0.150 0.7271 0.500".split() in rows
    assert "fitted 2.000 0.00 0.500 0.100 0.6931 0.500".split() in rows
    assert "2 3 0.3333 head alone 1.000 0.00 0.375 0.042 0.6403 0.500".split() in rows
    assert "fitted 0.500 0.25 0.500 0.167 0.6931 0.500".split() in rows
    assert "position 2 ends at an end of the grid: the head needs training" in text
    assert [row[-1] for row in rows if row[:4] == ["a", "head", "alone", "3"]] == ["0.6471"]
    assert "b too few blocks".split() in rows
    assert "0.75 - 0.80 5 0.750 0.600 0 0.000 0.000".split() in rows
    assert "0.50 - 0.55 0 0.000 0.000 8 0.500 0.500".split() in rows, "both positions"
    notes = notes_of(
        Blocks(np.zeros((1, 1)), np.ones(1, int), np.ones(1, int)), [Estimates("x", np.ones((1, 1)))]
    )
    assert notes["x"][0]["auroc"] is None and notes["x"][0]["acceptance"] == 1


@pytest.mark.parametrize("verification", ["coupled", "ratio"])
def test_the_command(tmp_path, prompts_file, capsys, verification):
    output = tmp_path / "calibration.json"
    arguments = [str(MODELS["v41-tiny"]), "--prompts", str(prompts_file), "--output", str(output)]
    arguments += ["--max-tokens", "16", "--samples", "2", "--temperature", "0", "1", "--max-model-len", "256"]
    assert calibrate.main([*arguments, "--verification", verification]) == 0
    printed = capsys.readouterr().out
    assert "9 answers to 3 prompts" in printed, "three prompts, greedy once and twice at T = 1"
    assert "fewer than 20000 blocks" in printed
    for words in ("head alone", "checkpoint", "fitted, held out", "reliability", "by group"):
        assert words in printed
    content = read_calibration(output)
    assert content["num_blocks"] > 10 and content["verification"] == verification
    assert content["sampling_temperatures"] == [0.0, 1.0]
    assert set(content["reports"]) == {"head alone", "checkpoint", "fitted, held out"}
    found = content["temperatures"], content["offsets"]
    with make_llm("v41-tiny", calibration_file=str(output)) as llm:
        scale = llm.llm_engine.model_runner._confidence_scale
        assert scale.temperatures.tolist() == pytest.approx(found[0])
        assert scale.offsets.tolist() == pytest.approx(found[1])
    override = Settings(confidence_temperatures=(2.5,))
    with make_llm("v41-tiny", calibration_file=str(output), settings=override) as llm:
        assert llm.llm_engine.model_runner._confidence_scale.temperatures.tolist() == [2.5] * 5
    again = tmp_path / "again.json"
    arguments[arguments.index(str(output))] = str(again)
    calibrate.main([*arguments, "--verification", verification])
    assert json.loads(again.read_text()) == content, "a seed fixes the data"


def test_what_is_printed_can_stand_in_a_config(tmp_path, prompts_file, capsys):
    """The file's temperatures, by way of config.json; the environment's go before both."""
    output = tmp_path / "calibration.json"
    arguments = [str(MODELS["v41-tiny"]), "--prompts", str(prompts_file), "--output", str(output)]
    arguments += ["--groups", "questions", "--max-tokens", "24", "--samples", "3", "--by-position"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(calibrate.ENVIRONMENT, "3")
        assert calibrate.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"{calibrate.ENVIRONMENT} is set" in printed
    assert "position 5\n" in printed
    assert "one prompt only" in printed and "fitted, same data" in printed and "by group" not in printed
    content = read_calibration(output)
    match = re.search(r'"dspark_sts_temperatures": (\[.*\])', printed)
    assert (match is None) == any(content["offsets"])
    if match is not None:
        in_config = resolve_confidence_scale(5, checkpoint=json.loads(match[1])).temperatures
        in_file = resolve_confidence_scale(5, calibration_file=output).temperatures
        assert in_config.tolist() == pytest.approx(in_file.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--prompts", "absent.json"], "prompts file absent.json cannot be read"),
        (["--temperature", "-1"], "temperature"),
        (["--max-model-len", "4"], "prompt"),
        (["--verification", "exact"], "invalid choice"),
        (["--samples", "0"], "invalid positive number value"),
        (["--groups", "poems"], "no group 'poems'"),
        (["--output", "absent/calibration.json"], "--output absent/calibration.json"),
        (["--output", "."], "--output ."),
        (["--max-tokens", "1"], "too little to fit: no block has a known outcome at position 1"),
    ],
)
def test_mistakes_are_said_in_one_line(prompts_file, capsys, change, words):
    arguments = [str(MODELS["v41-tiny"]), "--prompts", str(prompts_file), "--max-tokens", "2", *change]
    with pytest.raises(SystemExit) as status:
        calibrate.main(arguments)
    assert status.value.code == 2
    assert words in capsys.readouterr().err


def test_a_fit_calibrates_better_on_prompts_that_it_has_not_seen():
    """On stories the head alone is too modest; what some prompts teach holds for the others."""
    texts = read_prompts(BUNDLED_PROMPTS, ["stories"])
    engine = parts.build_parts(EngineArgs(str(MODELS["v41-tiny"]), max_num_seqs=40, max_model_len=256), FIXED)
    options = SimpleNamespace(
        temperature=[1.0], samples=3, max_tokens=40, top_p=1.0, verification="ratio", seed=0
    )
    work = list(calibrate.requests_of(engine, texts, options))
    recorded = record_blocks(engine, [request for _, request in work])
    blocks, sources = recorded.blocks, np.array([place for place, _ in work])[recorded.sources]
    assert blocks.logits.shape[0] > 400
    alone = report(blocks, Calibration.identity(5))
    fitted = report_survivals(blocks, held_out_survivals(blocks, sources, 2))
    assert all(entry.survival < entry.acceptance for entry in alone)
    assert sum(entry.ece for entry in fitted) < 0.9 * sum(entry.ece for entry in alone)
    for before, after in zip(alone, fitted):
        assert abs(after.survival - after.acceptance) < abs(before.survival - before.acceptance)
