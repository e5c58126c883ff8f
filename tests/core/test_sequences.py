"""Life of a sequence: abort, stop, fail, release, what commit reports, what accessors return."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.core.harness import EOS, commit_token, core, make_engine, make_params, run_to_end, step, tokens_of

PREFILL, DECODE = core.StepKind.PREFILL, core.StepKind.DECODE
Status, Reason = core.SequenceStatus, core.FinishReason


def add(engine, length: int = 5, **fields) -> int:
    return engine.add(make_params(**{"eos_token_id": EOS, "max_tokens": 20, **fields}), tokens_of(length))


def test_abort_from_every_queue():
    engine = make_engine(max_num_batched_tokens=10, max_num_seqs=2)
    running, partial, waiting = add(engine, 5), add(engine, 25), add(engine, 5)
    step(engine, PREFILL)
    assert engine.num_running == 1 and engine.num_free_blocks == 32 - 1 - 4
    preempted = running
    engine.preempt(preempted)
    for seq_id in (preempted, partial, waiting):
        assert engine.abort(seq_id) is True
        assert engine.abort(seq_id) is False
        engine.check_integrity()
        assert engine.finish_reason(seq_id) == Reason.ABORT and engine.metrics(seq_id).finish > 0
    assert engine.num_free_blocks == 32 and engine.num_free_slots == 6 and not engine.has_unfinished


def test_release_needs_an_end():
    engine = make_engine()
    seq_id = add(engine)
    with pytest.raises(ValueError, match="is not finished; abort it before"):
        engine.release(seq_id)
    engine.abort(seq_id)
    engine.release(seq_id)
    with pytest.raises(KeyError):
        engine.output_token_ids(seq_id)


def test_abort_and_release_in_flight():
    """The step that holds the sequence is still committed; blocks come back with it."""
    engine = make_engine()
    first, second = add(engine), add(engine)
    plan = engine.schedule()
    assert engine.abort(first)
    engine.release(first)
    with pytest.raises(KeyError):
        engine.status(first)
    engine.check_integrity()
    assert engine.num_free_blocks == 30
    result = commit_token(engine, plan)
    assert result.num_new_tokens.tolist() == [0, 1] and engine.num_free_blocks == 31
    assert engine.output_token_ids(second).tolist() == [7]


@pytest.mark.parametrize("keep", [0, 2, 4])
def test_stop_cuts_the_outputs(keep):
    engine = make_engine()
    seq_id = add(engine, num_logprobs=0)
    for token in (10, 11, 12, 13):
        step(engine, token=token)
    with pytest.raises(ValueError, match="has 4 output tokens, cannot keep 5"):
        engine.stop(seq_id, 5)
    engine.stop(seq_id, keep)
    assert engine.output_token_ids(seq_id).tolist() == [10, 11, 12, 13][:keep]
    assert engine.num_output_tokens(seq_id) == keep and len(engine.logprobs(seq_id)) == keep
    assert engine.finish_reason(seq_id) == Reason.STOP and engine.num_free_blocks == 32
    engine.check_integrity()


def test_stop_corrects_a_sequence_that_ended_by_length():
    engine = make_engine()
    seq_id = add(engine, max_tokens=2)
    run_to_end(engine)
    assert engine.finish_reason(seq_id) == Reason.LENGTH
    engine.stop(seq_id, 1)
    assert engine.finish_reason(seq_id) == Reason.STOP and engine.num_output_tokens(seq_id) == 1
    engine.stop(seq_id, 1, Reason.LENGTH)
    assert engine.finish_reason(seq_id) == Reason.LENGTH
    with pytest.raises(ValueError, match="needs a finish reason"):
        engine.stop(seq_id, 1, Reason.NONE)


def test_fail_names_a_kind():
    engine = make_engine()
    seq_id = add(engine)
    step(engine)
    assert engine.fail(seq_id, core.ErrorKind.GRAMMAR) and not engine.fail(seq_id, core.ErrorKind.IMAGE)
    assert (
        engine.finish_reason(seq_id) == Reason.ERROR and engine.error_kind(seq_id) == core.ErrorKind.GRAMMAR
    )


def test_commit_reports_text_only_where_it_is_wanted():
    engine = make_engine(num_draft_tokens=2)
    quiet, loud, other = add(engine), add(engine, needs_text=True), add(engine, needs_text=True, max_tokens=2)
    result = commit_token(engine, engine.schedule(), drafts=np.full((3, 2), 7, np.int32))
    assert result.text_ids.tolist() == [loud, other] and result.text_offsets.tolist() == [0, 1, 2]
    assert len(result.first_token_latencies) == 3 and (result.first_token_latencies >= 0).all()
    plan = engine.schedule()
    assert plan.seqlens_q.tolist() == [3, 3, 1]
    result = engine.commit(plan, np.array([7, 9, 9, 7, 7, 8, 6], np.int32))
    assert result.num_new_tokens.tolist() == [2, 3, 1] and result.num_tokens == 6
    assert result.text_ids.tolist() == [loud, other] and result.text_offsets.tolist() == [0, 3, 4]
    assert result.text_tokens.tolist() == [7, 7, 8, 6] and result.finished_ids.tolist() == [other]
    assert result.num_verified == 4 and result.num_accepted == 3
    assert result.verified_by_position.tolist() == [2, 2] and result.accepted_by_position.tolist() == [2, 1]
    assert engine.metrics(quiet).num_verified == 2 and engine.metrics(quiet).num_accepted == 1
    assert len(result.first_token_latencies) == 0


def test_drafts_are_kept_until_the_next_commit():
    engine = make_engine(num_draft_tokens=4)
    seq_id = add(engine)
    drafts = np.array([[5, 6, -1, 7]], np.int32)
    commit_token(
        engine, engine.schedule(), drafts=drafts, confidences=np.array([[0.9, 0.5, 0.3, 0.2]], np.float32)
    )
    assert engine.drafts(seq_id).tolist() == [5, 6], "-1 ends the row"
    assert engine.confidences(seq_id).tolist() == pytest.approx([0.9, 0.5])
    plan = engine.schedule()
    assert plan.seqlens_q.tolist() == [3]
    commit_token(engine, plan)
    assert engine.drafts(seq_id).size == 0


def test_logprobs_are_kept_per_token():
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=2)
    seq_id = add(engine, 7, num_logprobs=2, num_prompt_logprobs=1, max_tokens=3)
    counter = 0
    while engine.has_unfinished:
        plan = engine.schedule()
        rows = plan.num_samples
        values = np.arange(counter, counter + rows, dtype=np.float32)
        counter += rows
        engine.commit(
            plan,
            np.full(rows, 7, np.int32),
            logprobs=values,
            ranks=values.astype(np.int32) + 1,
            top_ids=np.stack([values, values + 100, values + 200], 1).astype(np.int32),
            top_logprobs=np.stack([values, -values, values * 2], 1),
        )
    assert engine.prompt_logprobs(seq_id).tolist() == [0, 1, 2, 3, 4, 5]
    assert engine.prompt_ranks(seq_id).tolist() == [1, 2, 3, 4, 5, 6]
    ids, tops = engine.prompt_top_logprobs(seq_id)
    assert ids.tolist() == [[i] for i in range(6)] and tops.shape == (6, 1)
    assert engine.logprobs(seq_id).tolist() == [6, 7, 8] and engine.ranks(seq_id).tolist() == [7, 8, 9]
    ids, tops = engine.top_logprobs(seq_id)
    assert ids.tolist() == [[6, 106], [7, 107], [8, 108]] and tops.tolist() == [[6, -6], [7, -7], [8, -8]]


def test_prompt_logprobs_survive_preemption():
    """Values that were delivered are not asked for again; missing ones are."""
    engine = make_engine(max_num_batched_tokens=4)
    seq_id = add(engine, 10, num_prompt_logprobs=0, max_tokens=4)
    asked = []
    while engine.has_unfinished:
        plan = engine.schedule()
        asked.append(int(plan.num_scoring_rows.sum()))
        values = np.full(plan.num_samples, len(asked), np.float32)
        engine.commit(plan, np.full(plan.num_samples, 7, np.int32), logprobs=values)
        if len(asked) in (2, 5):
            assert engine.preempt(seq_id)
    assert asked[:5] == [4, 4, 0, 0, 1], asked
    assert engine.prompt_logprobs(seq_id).tolist() == [1] * 4 + [2] * 4 + [5]
    assert sum(asked) == 9 and engine.num_output_tokens(seq_id) == 4


def test_unasked_arrays_are_empty():
    engine = make_engine()
    seq_id = add(engine, max_tokens=1)
    run_to_end(engine)
    assert (
        engine.logprobs(seq_id).size == engine.ranks(seq_id).size == engine.prompt_logprobs(seq_id).size == 0
    )
    assert engine.top_logprobs(seq_id)[0].shape == (0, 0)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"tokens": np.zeros(2, np.int32)}, "tokens has 2 elements, the plan has 3 output rows"),
        ({"tokens": np.zeros(3, np.int64)}, "tokens must be a C-contiguous numpy array of int32"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": np.full(3, 64, np.int32)}, "tokens holds 64, the vocabulary has 64 ids"),
        ({"tokens": np.full(3, -1, np.int32)}, "tokens holds -1"),
        ({"logprobs": None}, "asks for log-probabilities, logprobs is missing"),
        (
            {"top_ids": None, "top_logprobs": None},
            "asks for the top 2 log-probabilities, top_ids has 0 columns",
        ),
        ({"top_logprobs": np.zeros((3, 3), np.float32)}, "top_ids has 2 columns, top_logprobs 3"),
        ({"num_emitted": np.array([1, 4, 1], np.int32)}, "num_emitted has 3 elements, the plan has 1"),
        ({"num_emitted": np.array([4], np.int32)}, r"num_emitted\[0\]=4 must be in 1..3 for sequence 1"),
        ({"num_emitted": np.array([0], np.int32)}, r"num_emitted\[0\]=0 must be in 1..3"),
        ({"drafts": np.zeros((1, 3), np.int32)}, "drafts has 3 columns, num_draft_tokens is 2"),
        ({"drafts": np.full((1, 2), 99, np.int32)}, "drafts holds 99"),
        ({"faults": np.zeros(2, np.uint8)}, "faults has 2 elements"),
    ],
)
def test_commit_checks_before_it_changes_anything(results, message):
    engine = make_engine(num_draft_tokens=2)
    seq_id = add(engine, num_logprobs=2)
    commit_token(engine, engine.schedule(), drafts=np.full((1, 2), 7, np.int32))
    plan = engine.schedule()
    good = {
        "tokens": np.full(3, 7, np.int32),
        "logprobs": np.zeros(3, np.float32),
        "top_ids": np.zeros((3, 2), np.int32),
        "top_logprobs": np.zeros((3, 2), np.float32),
    }
    with pytest.raises(ValueError, match=message):
        engine.commit(plan, **{**good, **results})
    engine.check_integrity()
    assert engine.num_output_tokens(seq_id) == 1
    engine.commit(plan, **good)
    assert engine.num_output_tokens(seq_id) == 4
    with pytest.raises(RuntimeError, match="is committed"):
        engine.commit(plan, **good)


def test_buffers_are_checked():
    engine = make_engine()
    add(engine)
    plan = engine.schedule()
    nbytes = engine.batch_layout(plan).nbytes
    with pytest.raises(ValueError, match=f"the buffer has {nbytes - 1} bytes, this step needs {nbytes}"):
        engine.fill_batch(plan, np.zeros(nbytes - 1, np.uint8))
    with pytest.raises(TypeError):
        engine.fill_batch(plan, np.zeros(nbytes, np.int32))
    read_only = np.zeros(nbytes, np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        engine.fill_batch(plan, read_only)
    commit_token(engine, plan)
    with pytest.raises(RuntimeError, match="is committed"):
        engine.fill_batch(plan, np.zeros(nbytes, np.uint8))


def test_times_are_monotonic_seconds():
    engine = make_engine(max_num_seqs=1)
    before = time.monotonic()
    first, second = add(engine, max_tokens=2), add(engine, max_tokens=1, arrival_time=before - 5.0)
    metrics = engine.metrics(first)
    assert before <= metrics.arrival <= time.monotonic()
    assert metrics.first_scheduled == metrics.first_token == metrics.finish == 0.0
    run_to_end(engine)
    after = time.monotonic()
    for seq_id in (first, second):
        m = engine.metrics(seq_id)
        assert m.arrival <= m.first_scheduled <= m.first_token <= m.finish <= after
    assert engine.metrics(second).arrival == before - 5.0
    assert engine.metrics(second).num_cached_tokens == 0


def test_arrays_are_copies():
    engine = make_engine()
    seq_id = add(engine)
    step(engine)
    outputs = engine.output_token_ids(seq_id)
    outputs[0] = 50
    step(engine)
    assert engine.output_token_ids(seq_id).tolist() == [7, 7]
    plan = engine.schedule()
    ids = plan.seq_ids
    del plan, engine
    assert ids.tolist() == [seq_id]


def test_other_threads_may_add_and_abort():
    engine = make_engine(max_num_seqs=4)
    stop = threading.Event()
    failures = []

    def submit() -> None:
        rng = np.random.default_rng(threading.get_ident() % 1000)
        while not stop.is_set():
            seq_id = engine.add(make_params(max_tokens=5), tokens_of(int(rng.integers(1, 30))))
            if rng.random() < 0.5:
                engine.abort(seq_id)
            while engine.num_waiting > 50 and not stop.is_set():
                time.sleep(0.001)

    def guarded() -> None:
        try:
            submit()
        except Exception as error:  # the main thread reports it
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(3)]
    for thread in threads:
        thread.start()
    steps = 0
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        steps += step(engine) is not None
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures and steps > 50
    run_to_end(engine)
    assert engine.num_free_blocks == 32
