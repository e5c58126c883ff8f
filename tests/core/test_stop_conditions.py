"""The stop test after every token: EOS, stop tokens, min_tokens, the length limits, faults."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.harness import EOS, commit_token, core, make_engine, make_params, run_to_end, step, tokens_of

STOP, LENGTH, ERROR = core.FinishReason.STOP, core.FinishReason.LENGTH, core.FinishReason.ERROR


def feed(engine, tokens: list[int]) -> None:
    """Commits one token per step until the single sequence ends or tokens run out."""
    for token in tokens:
        if not engine.has_unfinished:
            return
        step(engine, token=token)


def add(engine, length: int = 5, **fields) -> int:
    return engine.add(make_params(**{"eos_token_id": EOS, "max_tokens": 20, **fields}), tokens_of(length))


@pytest.mark.parametrize(
    ("fields", "tokens", "outputs", "reason", "stop_token"),
    [
        ({}, [7, EOS, 8], [7, EOS], STOP, EOS),
        ({}, [EOS], [EOS], STOP, EOS),
        ({"ignore_eos": True, "max_tokens": 3}, [7, EOS, 8, 9], [7, EOS, 8], LENGTH, -1),
        ({"eos_token_id": -1, "max_tokens": 2}, [EOS, EOS], [EOS, EOS], LENGTH, -1),
        ({"stop_token_ids": [9, 11]}, [7, 11, 8], [7, 11], STOP, 11),
        ({"stop_token_ids": [9], "ignore_eos": True}, [EOS, 9], [EOS, 9], STOP, 9),
        ({"min_tokens": 2}, [EOS, EOS, EOS], [EOS, EOS, EOS], STOP, EOS),
        ({"min_tokens": 2, "stop_token_ids": [9]}, [9, 9, 9], [9, 9, 9], STOP, 9),
        ({"min_tokens": 1}, [7, EOS], [7, EOS], STOP, EOS),
        ({"max_tokens": 1}, [7], [7], LENGTH, -1),
        ({"max_tokens": 1}, [EOS], [EOS], STOP, EOS),
        ({"max_tokens": 2, "min_tokens": 2}, [EOS, EOS], [EOS, EOS], LENGTH, -1),
    ],
)
def test_stop_test(fields, tokens, outputs, reason, stop_token):
    engine = make_engine()
    seq_id = add(engine, **fields)
    feed(engine, tokens)
    assert engine.output_token_ids(seq_id).tolist() == outputs
    assert engine.finish_reason(seq_id) == reason and engine.stop_token(seq_id) == stop_token
    assert not engine.has_unfinished and engine.num_free_blocks == 32


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_max_tokens_is_exact(max_tokens, num_drafts):
    """Also when every draft is accepted."""
    engine = make_engine(num_draft_tokens=num_drafts)
    seq_id = add(engine, max_tokens=max_tokens)
    while engine.has_unfinished:
        plan = engine.schedule()
        commit_token(engine, plan, drafts=np.full((1, num_drafts), 7, np.int32) if num_drafts else None)
    assert engine.num_output_tokens(seq_id) == max_tokens and engine.finish_reason(seq_id) == LENGTH


@pytest.mark.parametrize("prompt", [1, 62, 63])
@pytest.mark.parametrize("max_tokens", [-1, 1000])
def test_max_model_len_is_inclusive(prompt, max_tokens):
    engine = make_engine(max_model_len=64, num_draft_tokens=2)
    seq_id = add(engine, prompt, max_tokens=max_tokens)
    plans = run_to_end(engine)
    assert engine.num_output_tokens(seq_id) == 64 - prompt and engine.finish_reason(seq_id) == LENGTH
    assert max(plan.max_seqlen_k for plan in plans) == 63


@pytest.mark.parametrize("where", range(4))
def test_stop_inside_an_accepted_run_drops_the_rest(where):
    engine = make_engine(num_draft_tokens=3)
    seq_id = add(engine, num_logprobs=0)
    drafts = np.array([[7, 7, 7]], np.int32)
    drafts[0, where:] = EOS
    commit_token(engine, engine.schedule(), drafts=drafts)
    plan = engine.schedule()
    tokens = np.append(drafts[0], 8).astype(np.int32)
    tokens[where] = EOS
    result = engine.commit(
        plan, tokens, logprobs=np.arange(4, dtype=np.float32), num_emitted=np.array([4], np.int32)
    )
    engine.check_integrity()
    assert result.num_new_tokens.tolist() == [where + 1]
    assert engine.output_token_ids(seq_id).tolist() == [7] + [7] * where + [EOS]
    assert engine.logprobs(seq_id).tolist() == [0.0] + list(range(where + 1))
    assert engine.finish_reason(seq_id) == STOP and result.finished_ids.tolist() == [seq_id]


def test_a_fault_ends_only_its_own_sequence():
    engine = make_engine(num_draft_tokens=2)
    ids = [add(engine) for _ in range(3)]
    commit_token(engine, engine.schedule(), drafts=np.full((3, 2), 7, np.int32))
    plan = engine.schedule()
    faults = np.zeros(9, np.uint8)
    faults[4] = int(core.ErrorKind.NUMERICS)  # the second row of the second sequence
    result = commit_token(engine, plan, faults=faults)
    assert result.finished_ids.tolist() == [ids[1]] and result.finished_reasons.tolist() == [int(ERROR)]
    assert result.num_new_tokens.tolist() == [3, 1, 3]
    assert engine.finish_reason(ids[1]) == ERROR and engine.error_kind(ids[1]) == core.ErrorKind.NUMERICS
    assert engine.output_token_ids(ids[1]).tolist() == [7, 7]
    run_to_end(engine)
    assert [engine.finish_reason(i) for i in ids] == [LENGTH, ERROR, LENGTH]


def test_a_fault_behind_the_accepted_rows_is_ignored():
    engine = make_engine(num_draft_tokens=2)
    seq_id = add(engine)
    commit_token(engine, engine.schedule(), drafts=np.full((1, 2), 7, np.int32))
    faults = np.array([0, 0, int(core.ErrorKind.MASKED)], np.uint8)
    engine.commit(engine.schedule(), np.array([7, 8, 9], np.int32), faults=faults)
    assert engine.output_token_ids(seq_id).tolist() == [7, 7, 8] and engine.has_unfinished


def test_a_fault_in_a_scoring_row_ends_the_sequence():
    engine = make_engine()
    ids = [add(engine, 5, num_prompt_logprobs=0), add(engine, 5)]
    plan = engine.schedule()
    assert plan.num_samples == 6
    faults = np.zeros(6, np.uint8)
    faults[2] = 1
    commit_token(engine, plan, faults=faults)
    assert engine.finish_reason(ids[0]) == ERROR and engine.num_output_tokens(ids[0]) == 0
    assert engine.num_output_tokens(ids[1]) == 1 and engine.has_unfinished


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 3), ("min_tokens", 2)])
def test_limits_count_outputs_across_preemption(field, value):
    engine = make_engine()
    seq_id = add(engine, **{field: value})
    step(engine, token=EOS if field == "min_tokens" else 7)
    engine.preempt(seq_id)
    feed(engine, [EOS if field == "min_tokens" else 7] * 5)
    assert engine.num_output_tokens(seq_id) == 3


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"min_tokens": 9}, {"stop_token_ids": [9]}])
def test_rows_that_end_their_sequence(fields):
    """A complete grammar ends it, whatever its own conditions say; accepted rows behind do not count."""
    engine = make_engine(num_draft_tokens=3)
    seq_id = add(engine, **fields)
    ends = np.zeros(1, np.uint8)
    commit_token(engine, engine.schedule(), ends=ends, drafts=np.array([[7, EOS, 8]], np.int32))
    plan = engine.schedule()
    tokens = np.array([7, EOS, 8, 5], np.int32)
    ends = np.array([0, 1, 0, 0], np.uint8)
    result = engine.commit(plan, tokens, num_emitted=np.array([4], np.int32), ends=ends)
    assert result.finished_ids.tolist() == [seq_id] and result.num_tokens == 2
    assert engine.output_token_ids(seq_id).tolist() == [7, 7, EOS]
    assert engine.finish_reason(seq_id) == STOP and engine.stop_token(seq_id) == EOS
    engine.check_integrity()


def test_a_last_row_may_end_at_the_length_too():
    engine = make_engine()
    seq_id = add(engine, max_tokens=1)
    commit_token(engine, engine.schedule(), token=EOS, ends=np.ones(1, np.uint8))
    assert engine.finish_reason(seq_id) == STOP


def test_ends_of_another_shape_are_refused():
    engine = make_engine()
    add(engine)
    with pytest.raises(ValueError, match="ends has 2 elements, the plan has 1"):
        commit_token(engine, engine.schedule(), ends=np.ones(2, np.uint8))
