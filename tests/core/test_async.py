"""One step in flight: what the next plan assumes, what happens to sequences that end or leave meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.harness import (
    EOS,
    batch_inputs,
    commit_token,
    core,
    make_engine,
    make_params,
    sampling_inputs,
    tokens_of,
)

PREFILL, DECODE = core.StepKind.PREFILL, core.StepKind.DECODE


def make(**changes):
    return make_engine(**{"async_scheduling": True, **changes})


def add(engine, length: int = 5, **fields) -> int:
    return engine.add(make_params(**{"eos_token_id": EOS, "max_tokens": 20, **fields}), tokens_of(length))


def test_one_plan_may_be_in_flight():
    engine = make_engine()
    add(engine)
    plan = engine.schedule()
    with pytest.raises(RuntimeError, match="commit or discard"):
        engine.schedule()
    commit_token(engine, plan)
    engine = make()
    add(engine)
    first, second = engine.schedule(), engine.schedule()
    assert engine.num_in_flight == 2
    with pytest.raises(RuntimeError, match="commit or discard"):
        engine.schedule()
    with pytest.raises(RuntimeError, match="step 2 is committed before step 1"):
        engine.commit(second, np.zeros(second.num_samples, np.int32))
    commit_token(engine, first)
    commit_token(engine, second)


def test_decode_follows_prefill_without_a_drain():
    """The first token is only on the device: the row is marked and placed where it will be."""
    engine = make()
    a, b = add(engine, 5), add(engine, 9)
    prefill = engine.schedule()
    decode = engine.schedule()
    assert (prefill.kind, decode.kind) == (PREFILL, DECODE)
    assert decode.seq_ids.tolist() == [a, b] and decode.remap.tolist() == [0, 1] and decode.num_matched == 2
    arrays = batch_inputs(engine, decode)
    assert arrays["positions"].tolist() == [5, 9] and arrays["seqlens_k"].tolist() == [6, 10]
    assert arrays["input_ids"].tolist() == [0, 0], "unknown to the host"
    assert arrays["committed_lens"].tolist() == [5, 9]
    assert arrays["ngram_history"].tolist() == [[6, 5, 4], [10, 9, 8]], (
        "from the last committed token backwards"
    )
    assert (arrays["ngram_ids"] == 0).all()
    with pytest.raises(RuntimeError, match="samples before the step in front of it is committed"):
        engine.sampling_layout(decode)
    commit_token(engine, prefill)
    arrays = sampling_inputs(engine, decode)
    assert arrays["token_index"].tolist() == [6, 10]
    commit_token(engine, decode)
    assert engine.output_token_ids(a).tolist() == [7, 7]


def test_prefill_is_scheduled_while_decode_is_in_flight():
    engine = make()
    add(engine, 5)
    commit_token(engine, engine.schedule())
    decode = engine.schedule()
    late = add(engine, 9)
    prefill = engine.schedule()
    assert (decode.kind, prefill.kind) == (DECODE, PREFILL) and prefill.seq_ids.tolist() == [late]
    commit_token(engine, decode)
    both = engine.schedule()
    assert both.kind == DECODE and both.remap.tolist() == [-1, 0]
    arrays = batch_inputs(engine, both)
    assert arrays["input_ids"].tolist() == [7, 0] and arrays["positions"].tolist() == [6, 9]
    commit_token(engine, prefill)
    commit_token(engine, both)


def test_chunks_follow_each_other_in_flight():
    engine = make(max_num_batched_tokens=10)
    seq_id = add(engine, 25)
    plans = [engine.schedule(), engine.schedule()]
    assert [plan.seqlens_k.tolist() for plan in plans] == [[10], [20]]
    commit_token(engine, plans[0])
    assert engine.num_computed_tokens(seq_id) == 10
    plans.append(engine.schedule())
    assert plans[2].seqlens_k.tolist() == [25] and plans[2].num_sampled_rows.tolist() == [1]
    commit_token(engine, plans[1])
    commit_token(engine, plans[2])
    assert engine.output_token_ids(seq_id).tolist() == [7]


def test_lengths_are_the_most_possible_and_surplus_goes_back():
    engine = make(num_draft_tokens=4)
    seq_id = add(engine, 6)
    commit_token(engine, engine.schedule(), drafts=np.full((1, 4), 7, np.int32))
    first = engine.schedule()  # 7 tokens and 4 drafts
    assert first.seqlens_q.tolist() == [5] and first.seqlens_k.tolist() == [11]
    second = engine.schedule()  # up to 12 tokens and 4 drafts
    assert (
        second.seqlens_q.tolist() == [5]
        and second.seqlens_k.tolist() == [16]
        and second.remap.tolist() == [0]
    )
    assert len(engine.block_table(seq_id)) == 2
    commit_token(engine, first, token=8, drafts=np.full((1, 4), 9, np.int32))  # all rejected: 8 tokens
    arrays = sampling_inputs(engine, second)
    assert arrays["token_index"].tolist() == [8, 9, 10, 11, 12]
    assert arrays["draft_ids"].tolist() == [9, 9, 9, 9, -1]
    commit_token(engine, second, token=10, drafts=np.full((1, 4), -1, np.int32))
    assert engine.output_token_ids(seq_id).tolist() == [7, 8, 10] and len(engine.block_table(seq_id)) == 2
    third = engine.schedule()
    assert third.seqlens_q.tolist() == [1] and third.remap.tolist() == [-1]


def test_what_surely_ends_in_flight_is_not_scheduled():
    engine = make()
    add(engine, max_tokens=2)
    first = engine.schedule()
    second = engine.schedule()
    commit_token(engine, first)
    assert engine.schedule() is None and engine.has_unfinished
    commit_token(engine, second)
    assert not engine.has_unfinished


def test_late_eos_costs_one_slot_and_keeps_its_blocks_until_then():
    engine = make()
    short, long = add(engine), add(engine)
    commit_token(engine, engine.schedule())
    first = engine.schedule()
    second = engine.schedule()
    result = engine.commit(first, np.array([EOS, 7], np.int32))
    engine.check_integrity()
    assert result.finished_ids.tolist() == [short] and engine.finish_reason(short) == core.FinishReason.STOP
    assert second.seq_ids.tolist() == [short, long] and engine.num_free_blocks == 30
    third = engine.schedule()
    assert third.seq_ids.tolist() == [long] and third.remap.tolist() == [1]
    arrays = sampling_inputs(engine, second)
    assert arrays["inv_temperature"].tolist() == [0.0, 1.0], "the ended row is neutral"
    result = commit_token(engine, second)
    assert result.num_new_tokens.tolist() == [0, 1] and engine.num_free_blocks == 31
    assert engine.output_token_ids(short).tolist() == [7, EOS]
    commit_token(engine, third)


def test_tokens_of_a_sequence_preempted_in_flight_are_kept():
    engine = make()
    seq_id = add(engine)
    commit_token(engine, engine.schedule())
    plan = engine.schedule()
    assert engine.preempt(seq_id) and not engine.preempt(seq_id)
    engine.check_integrity()
    assert engine.num_free_blocks == 31 and engine.num_waiting == 1 and engine.num_running == 0
    assert engine.schedule() is None, "its blocks are still being written"
    commit_token(engine, plan)
    assert engine.num_free_blocks == 32 and engine.output_token_ids(seq_id).tolist() == [7, 7]
    plan = engine.schedule()
    assert plan.kind == PREFILL and plan.seqlens_k.tolist() == [7]
    commit_token(engine, plan)


@pytest.mark.parametrize("end", ["abort", "stop", "fail", "preempt"])
def test_leaving_with_two_plans_in_flight(end):
    engine = make(num_draft_tokens=2)
    seq_id, other = add(engine), add(engine)
    commit_token(engine, engine.schedule(), drafts=np.full((2, 2), 7, np.int32))
    plans = [engine.schedule(), engine.schedule()]
    slot = engine.state_slot(seq_id)
    if end == "stop":
        engine.stop(seq_id, 1)
    elif end == "fail":
        engine.fail(seq_id, core.ErrorKind.IMAGE)
    else:
        getattr(engine, end)(seq_id)
    for plan in plans:
        engine.check_integrity()
        assert engine.state_slot(seq_id) == slot and slot not in engine.free_slots()
        sampling_inputs(engine, plan)
        commit_token(engine, plan, drafts=np.full((2, 2), 7, np.int32))
    assert engine.state_slot(seq_id) == 0 and slot in engine.free_slots()
    assert engine.num_output_tokens(other) == 7
    assert engine.num_output_tokens(seq_id) == (7 if end == "preempt" else 1)


def test_victims_in_flight_give_their_blocks_at_the_commit():
    """The taker sits out until then; nobody else is preempted for the same need."""
    engine = make(num_blocks=10, max_model_len=60, max_num_batched_tokens=80)
    ids = [add(engine, 23) for _ in range(3)]  # 3 blocks each, all of the pool
    commit_token(engine, engine.schedule())  # 24 tokens: full blocks
    first = engine.schedule()
    assert first.seq_ids.tolist() == ids
    second = engine.schedule()  # everybody may need a fourth block now
    assert second is None or second.num_seqs < 3
    assert engine.num_preemptions == 1
    commit_token(engine, first)
    engine.check_integrity()
    assert engine.num_free_blocks == 3
    if second is not None:
        commit_token(engine, second)
    third = engine.schedule()
    assert third.kind == DECODE and third.num_seqs == 2 and engine.num_preemptions == 1
    commit_token(engine, third)


def test_nobody_is_preempted_for_blocks_that_are_about_to_come():
    """One sequence surely ends with the step in flight: whoever needs a block waits for its blocks."""
    engine = make(num_blocks=10, max_model_len=60, max_num_batched_tokens=80)
    ending, grower, other = add(engine, 20, max_tokens=2), add(engine, 23), add(engine, 20)
    commit_token(engine, engine.schedule())
    first = engine.schedule()
    second = engine.schedule()  # 24 + 1 tokens: the grower needs a fourth block
    assert first.num_seqs == 3 and second.seq_ids.tolist() == [other] and engine.num_preemptions == 0
    commit_token(engine, first)
    third = engine.schedule()
    assert third.seq_ids.tolist() == [grower, other]
    assert engine.finish_reason(ending) == core.FinishReason.LENGTH
    commit_token(engine, second)
    commit_token(engine, third)


def test_nobody_is_preempted_for_drafts_in_flight():
    """Only if its drafts are accepted does the sequence need a block: it waits until that is known."""
    engine = make(num_blocks=7, max_model_len=40, num_draft_tokens=2)
    first_id, second_id = add(engine, 21), add(engine, 17)  # 3 + 3 blocks: all of the pool
    commit_token(engine, engine.schedule(), drafts=np.full((2, 2), 7, np.int32))
    first = engine.schedule()  # 22 tokens and 2 drafts, 18 and 2
    assert first.seqlens_k.tolist() == [24, 20]
    second = engine.schedule()  # 25 tokens if all are accepted, 23 if none is
    assert second.seq_ids.tolist() == [second_id] and engine.num_preemptions == 0
    commit_token(engine, first, token=8, drafts=np.full((2, 2), 7, np.int32))
    third = engine.schedule()
    assert third.seq_ids.tolist() == [first_id, second_id] and engine.num_preemptions == 0
    commit_token(engine, second)
    commit_token(engine, third)


def test_a_row_behind_the_end_writes_to_the_reserved_block():
    """The pool holds exactly what one sequence needs; its wasted row in flight has no block of its own."""
    engine = make(num_blocks=3, num_draft_tokens=3, max_model_len=30)
    seq_id = add(engine, 8, max_tokens=9)  # 16 tokens with KV, the 17th is never read
    commit_token(engine, engine.schedule(), drafts=np.full((1, 3), 7, np.int32))
    first = engine.schedule()  # 9 tokens + 3 drafts
    commit_token(engine, first, drafts=np.full((1, 3), 7, np.int32))  # 13 tokens
    first = engine.schedule()  # + 3 drafts: 17 if all are accepted
    second = engine.schedule()
    assert first.seqlens_k.tolist() == [16] and second.seqlens_k.tolist() == [17]
    assert second.seqlens_q.tolist() == [1]
    arrays = batch_inputs(engine, second)
    assert arrays["block_tables"].shape == (1, 3) and arrays["block_tables"][0, 2] == 0
    result = commit_token(engine, first)
    assert result.finished_ids.tolist() == [seq_id]
    commit_token(engine, second)
    assert engine.num_output_tokens(seq_id) == 9 and engine.num_free_blocks == 2


def test_discard_forgets_both_plans():
    engine = make(num_draft_tokens=1)
    a, b, c = add(engine), add(engine), add(engine)
    commit_token(engine, engine.schedule(), drafts=np.full((3, 1), 7, np.int32))
    first, second = engine.schedule(), engine.schedule()
    engine.abort(b)
    engine.release(b)
    engine.preempt(c)
    assert engine.discard_in_flight() == 2 and engine.discard_in_flight() == 0
    engine.check_integrity()
    assert engine.num_free_blocks == 32 and engine.num_waiting == 2
    assert engine.output_token_ids(a).tolist() == [7]
    for plan in (first, second):
        assert plan.is_committed
        with pytest.raises(RuntimeError, match="discarded"):
            engine.commit(plan, np.zeros(plan.num_samples, np.int32))
    assert engine.metrics(a).num_preemptions == 0 and engine.metrics(c).num_preemptions == 1
    assert engine.schedule().kind == PREFILL
