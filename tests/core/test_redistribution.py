"""Rows that the device deals anew: what the host reserves for them, learns of them and forgets of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.core.fake_device import Loop
from tests.core.harness import (
    VOCAB,
    batch_inputs,
    core,
    make_config,
    make_engine,
    make_params,
    sampling_inputs,
    tokens_of,
)
from tests.core.test_whole_traces import MODEL_LEN, check_outputs, make_requests

MODEST = [(n, n * width, 10.0 + 2.0 * n * (width - 1)) for n in (1, 8) for width in (1, 6)]
SIX_ROWS = [(2, 2, 1.0), (2, 6, 1.1), (2, 8, 99.0)]  # two sequences: rows beyond the sixth cost too much
FLAT = [(n, n * width, 10.0) for n in (1, 8) for width in (1, 6)]


def make(points=FLAT, **changes):
    engine = make_engine(
        **{
            "async_scheduling": True,
            "num_draft_tokens": 3,
            "use_draft_budget": True,
            "draft_budget_min_gain": 0.0,
            **changes,
        }
    )
    engine.set_step_times(points)
    return engine


def propose(engine, plan, confidences, **results):
    confidences = np.asarray(confidences, np.float32)
    tokens = np.full(plan.num_samples, 7, np.int32)
    drafts = np.full(confidences.shape, 9, np.int32)
    result = engine.commit(plan, tokens, drafts=drafts, confidences=confidences, **results)
    engine.check_integrity()
    return result


def two_in_flight(**changes):
    """A decode step of two sequences, planned while their prefill was in flight; that is committed by now."""
    engine = make(SIX_ROWS, **changes)
    ids = [engine.add(make_params(max_tokens=30), tokens_of(5 + 2 * i)) for i in range(2)]
    prefill, plan = engine.schedule(), engine.schedule()
    arrays = batch_inputs(engine, plan)
    propose(engine, prefill, [[0.5] * 3, [0.9] * 3])
    return engine, ids, plan, arrays


def test_dealt_rows_replace_the_planned_ones():
    engine, ids, plan, arrays = two_in_flight()
    assert plan.can_redistribute and plan.seqlens_q.tolist() == [4, 2]
    assert arrays["max_seqlens_q"].tolist() == plan.max_seqlens_q.tolist() == [4, 4]
    assert arrays["confidence_odds"].tolist() == [1.0] * 3
    propose(engine, _settled(engine, plan, [3, 3]), [[0.9, 0.9, 0.9], [0.9, 0.1, 0.1]])
    plan = engine.schedule()  # everything known: chosen by the newest confidences, nothing to deal
    assert not plan.can_redistribute and plan.seqlens_q.tolist() == [4, 2]
    arrays = batch_inputs(engine, plan)
    assert arrays["max_seqlens_q"].shape == arrays["confidence_odds"].shape == (0,)
    next_plan = engine.schedule()
    assert next_plan.seqlens_q.tolist() == [4, 2] and next_plan.max_seqlens_q.tolist() == [4, 4]
    propose(engine, plan, [[0.1] * 3, [0.9] * 3])
    engine.set_seqlens_q(next_plan, np.array([2, 4], np.int32))
    assert next_plan.seqlens_q.tolist() == next_plan.num_sampled_rows.tolist() == [2, 4]
    assert (next_plan.num_rows, next_plan.num_samples, next_plan.max_seqlen_q) == (6, 6, 4)
    inputs = sampling_inputs(engine, next_plan)
    assert inputs["row_offsets"].tolist() == [0, 2, 6]
    lengths = [len(engine.prompt_token_ids(i)) + engine.num_output_tokens(i) for i in ids]
    assert inputs["token_index"].tolist() == [
        *range(lengths[0], lengths[0] + 2),
        *range(lengths[1], lengths[1] + 4),
    ]
    assert inputs["draft_ids"].tolist() == [9, -1, 9, 9, 9, -1]
    result = propose(engine, next_plan, [[0.5] * 3] * 2, num_emitted=np.array([2, 4], np.int32))
    assert result.num_new_tokens.tolist() == [2, 4] and result.verified_by_position.tolist() == [2, 1, 1]
    assert [engine.metrics(i).num_verified for i in ids] == [2 + 3 + 1, 2 + 1 + 3]


def _settled(engine, plan, seqlens_q):
    engine.set_seqlens_q(plan, np.array(seqlens_q, np.int32))
    return plan


@pytest.mark.parametrize(
    ("seqlens_q", "message"),
    [
        ([4], "has 1 elements, the plan has 2"),
        ([3, 4], "sums to 7, the plan has 6 rows"),
        ([5, 1], r"seqlens_q\[0\]=5 must be in 1..4"),
        ([6, 0], r"must be in 1..4"),
    ],
)
def test_rows_that_cannot_be(seqlens_q, message):
    engine, _, plan, _ = two_in_flight()
    with pytest.raises(ValueError, match=message):
        engine.set_seqlens_q(plan, np.array(seqlens_q, np.int32))
    with pytest.raises(ValueError, match="int32"):
        engine.set_seqlens_q(plan, np.array([4, 2], np.int64))
    with pytest.raises(RuntimeError, match="samples before set_seqlens_q"):
        engine.sampling_layout(plan)
    with pytest.raises(RuntimeError, match="waits for set_seqlens_q"):
        engine.schedule()
    engine.set_seqlens_q(plan, np.array([4, 2], np.int32))
    with pytest.raises(RuntimeError, match="stand"):
        engine.set_seqlens_q(plan, np.array([4, 2], np.int32))


def test_sequences_that_the_host_knows_keep_their_rows():
    """Behind a prefill of others, decoding sequences are not in the step in flight."""
    engine = make()
    engine.set_step_times([(1, 1, 0.2), (3, 3, 1.0), (3, 9, 1.1), (3, 13, 99.0)])
    engine.add(make_params(max_tokens=30), tokens_of(5))
    for _ in range(2):
        propose(engine, engine.schedule(), [[1.0] * 3])
    for length in (6, 7):
        engine.add(make_params(max_tokens=30), tokens_of(length))
    prefill = engine.schedule()
    plan = engine.schedule()
    assert prefill.is_prefill and plan.remap.tolist() == [-1, 0, 1] and plan.can_redistribute
    assert plan.seqlens_q.tolist() == [4, 4, 1] and plan.max_seqlens_q.tolist() == [4, 4, 4]
    propose(engine, prefill, [[0.9] * 3] * 2)
    with pytest.raises(ValueError, match=r"seqlens_q\[0\]=3 must be in 4..4"):
        engine.set_seqlens_q(plan, np.array([3, 4, 2], np.int32))


def test_block_tables_hold_every_row_that_may_come():
    """15 and 9 tokens, blocks of 8: a step of up to 4 rows behind an unknown number of accepted drafts."""
    points = [(2, 2, 1.0), (2, 3, 1.1), (2, 8, 90.0)]
    engine = make(points)
    long, short = (engine.add(make_params(max_tokens=30), tokens_of(n)) for n in (12, 8))
    prefill = engine.schedule()
    propose(engine, prefill, [[0.5] * 3, [0.9] * 3])
    first = engine.schedule()
    assert first.seqlens_q.tolist() == [1, 2]
    second = engine.schedule()  # at most 14 and 11 tokens, then up to 4 rows
    assert second.num_rows == 3 and second.max_seqlens_q.tolist() == [4, 4]
    assert second.max_seqlen_k == 13 + 4
    arrays = batch_inputs(engine, second)
    assert arrays["block_tables"].shape == (2, 3) and (arrays["block_tables"] > 0).sum(1).tolist() == [3, 2]
    propose(engine, first, [[0.99] * 3, [0.1] * 3])
    assert [len(engine.block_table(i)) for i in (long, short)] == [3, 2], "the rows in flight may need them"
    engine.set_seqlens_q(second, np.array([2, 1], np.int32))
    engine.check_integrity()
    assert [len(engine.block_table(i)) for i in (long, short)] == [2, 2], "now they are settled"


def test_scarce_blocks_limit_the_device_too():
    """Three blocks: the sequence cannot get one more for drafts, whoever would like to verify them."""
    engine = make(num_blocks=6, max_model_len=40)
    ids = [engine.add(make_params(max_tokens=12), tokens_of(n)) for n in (13, 15)]  # 2 + 2 blocks of 5
    prefill = engine.schedule()
    plan = engine.schedule()
    assert plan.seq_ids.tolist() == ids and engine.num_preemptions == 0
    assert plan.max_seqlens_q.sum() < 8, "17 and 19 tokens would need 3 + 3 blocks"
    assert (plan.seqlens_q <= plan.max_seqlens_q).all()
    for seq_id, most, start in zip(ids, plan.max_seqlens_q, (13, 15)):
        assert start + most <= 8 * len(engine.block_table(seq_id))
    propose(engine, prefill, [[0.5] * 3] * 2)
    propose(engine, plan, [[0.5] * 3] * 2)


@pytest.mark.parametrize("end", ["abort", "preempt", "stop", "fail"])
def test_sequences_that_leave_before_their_rows_are_settled(end):
    engine, ids, plan, _ = two_in_flight()
    if end == "stop":
        engine.stop(ids[0], 1)
    elif end == "fail":
        engine.fail(ids[0], core.ErrorKind.IMAGE)
    else:
        getattr(engine, end)(ids[0])
    propose(engine, _settled(engine, plan, [2, 4]), [[0.5] * 3] * 2)
    engine.check_integrity()
    assert engine.state_slot(ids[0]) == 0 and engine.num_output_tokens(ids[1]) == 2


def test_a_discarded_plan_needs_no_rows():
    engine, _, plan, _ = two_in_flight()
    assert engine.discard_in_flight() == 1
    with pytest.raises(RuntimeError, match="discarded"):
        engine.set_seqlens_q(plan, np.array([4, 4], np.int32))
    assert engine.schedule().is_prefill


# --- whole traces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [13, 40])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("points", [MODEST, FLAT], ids=["modest", "flat"])
def test_outputs_do_not_depend_on_verify_lengths(seed, points, is_async, num_blocks):
    """Every prefix is read back through tables, slots and windows, as in test_whole_traces."""
    rng = random.Random(seed)
    vocab = np.array([rng.randrange(1000) for _ in range(VOCAB)], np.int32)
    config = make_config(
        max_num_seqs=6,
        max_num_batched_tokens=30,
        max_model_len=MODEL_LEN,
        num_blocks=num_blocks,
        num_state_slots=9,
        num_draft_tokens=4,
        async_scheduling=is_async,
        use_draft_budget=True,
        draft_budget_min_gain=0.0,
    )
    loop = Loop(config, vocab=vocab, pad=7)
    loop.engine.set_step_times(points, [(1, 9.0), (8, 9.5)])
    requests = make_requests(rng, 60)
    ids = {loop.add(r.seed, r.prompt, is_ratio=rng.random() < 0.3, **r.fields): r for r in requests}
    step = 0
    while loop.step(tell_emitted=bool(step % 2)):
        step += 1
        holders = [i for i in ids if loop.engine.state_slot(i)]
        if holders and rng.random() < 0.05:
            loop.engine.preempt(rng.choice(holders))
        if points is MODEST:
            loop.engine.add_step_time(3, 7, 10.0 + rng.random())
        loop.engine.check_integrity()
        assert step < 20_000
    assert not loop.engine.has_unfinished
    check_outputs(loop, ids)
    stats = loop.engine.draft_budget_stats()
    assert loop.device.num_accepted > 0 and loop.device.num_rejected > 0 and loop.engine.num_preemptions > 0
    if points is MODEST:
        assert stats.num_cut > 20
    else:
        assert stats.num_cut + stats.num_none == 0 and stats.num_full > 20
    if is_async:
        assert loop.num_overlapped > 0 and loop.device.num_matched > 0
        assert loop.device.num_dealt > 5 or points is FLAT
