"""Sequences that begin with the same tokens at the same time: one computes, the others are copies of it."""

from __future__ import annotations

import pytest

from tests.core.fake_device import Loop
from tests.core.harness import commit_token, make_config, run_to_end, step, tokens_of
from tests.core.test_prefix_cache import SIZE, add, caching_engine
from tests.core.test_whole_traces import Request, check_outputs


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 30])
@pytest.mark.parametrize("is_async", [False, True])
def test_equal_prompts_are_prefilled_once(length, is_async):
    loop = Loop(
        make_config(prefix_caching=True, max_num_seqs=8, num_state_slots=20, async_scheduling=is_async)
    )
    prompt = tokens_of(length)
    requests = {}
    for seed in range(6):
        fields = {"max_tokens": 9, "ignore_eos": True, "num_logprobs": -1, "num_prompt_logprobs": -1}
        requests[loop.add(seed, prompt, **fields)] = Request(seed, prompt, fields)
    rows, plans = 0, []

    real = loop.engine.schedule

    class Watched:
        def __getattr__(self, name):
            return getattr(real.__self__, name)

        def schedule(self, *args):
            plan = real(*args)
            if plan is not None:
                plans.append(plan)
            return plan

    loop.engine = Watched()
    while loop.step():
        loop.engine.check_integrity()
    rows = sum(plan.num_prefill_tokens for plan in plans)
    assert rows == length + 5
    assert [plan.is_prefill for plan in plans][:3] == [True, True, length > SIZE]
    cached = [loop.engine.metrics(seq_id).num_cached_tokens for seq_id in requests]
    assert cached == [0] + [length - 1] * 5
    loop.engine = real.__self__
    check_outputs(loop, requests)
    assert loop.engine.prefix_cache_stats().num_forks == 5


def test_forks_share_all_but_the_last_block():
    engine = caching_engine()
    ids = [add(engine, tokens_of(20), max_tokens=5) for _ in range(3)]
    step(engine)
    plan = step(engine)
    assert plan.seq_ids.tolist() == ids[:1] and plan.forked_ids.tolist() == ids[1:]
    tables = [engine.block_table(seq_id).tolist() for seq_id in ids]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert plan.block_copies.tolist() == [[tables[0][2], tables[1][2]], [tables[0][2], tables[2][2]]]
    slots = [engine.state_slot(seq_id) for seq_id in ids]
    assert plan.state_copies.tolist() == [[slots[0], slots[1]], [slots[0], slots[2]]]
    plan = step(engine)
    assert plan.is_prefill and plan.seq_ids.tolist() == ids[1:] and plan.seqlens_q.tolist() == [1, 1]
    run_to_end(engine)


def test_forks_behind_a_border_copy_no_block():
    engine = caching_engine()
    [add(engine, tokens_of(17)) for _ in range(2)]
    step(engine)
    plan = step(engine)
    assert len(plan.forked_ids) == 1 and len(plan.block_copies) == 0
    run_to_end(engine)


def test_those_who_do_not_fit_are_no_forks():
    engine = caching_engine(max_num_seqs=2)
    ids = [add(engine, tokens_of(20), max_tokens=5) for _ in range(4)]
    run_to_end(engine)
    cached = [engine.metrics(seq_id).num_cached_tokens for seq_id in ids]
    assert cached == [0, 19, 16, 19], "the third found a state, the fourth was forked from the third"


def test_a_leader_that_goes_leaves_its_followers_alone():
    engine = caching_engine(max_num_batched_tokens=10)
    ids = [add(engine, tokens_of(30), max_tokens=5) for _ in range(3)]
    step(engine)
    engine.abort(ids[0])
    run_to_end(engine)
    assert [engine.num_output_tokens(seq_id) for seq_id in ids] == [0, 5, 5]


@pytest.mark.parametrize("who", ["leader", "follower", "both"])
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_forks_and_leaders_leave_in_flight(who, how):
    engine = caching_engine(async_scheduling=True)
    ids = [add(engine, tokens_of(20), max_tokens=5) for _ in range(2)]
    step(engine)
    plan = engine.schedule()
    assert plan.forked_ids.tolist() == ids[1:]
    for seq_id in {"leader": ids[:1], "follower": ids[1:], "both": ids}[who]:
        getattr(engine, how)(seq_id)
        engine.check_integrity()
    commit_token(engine, plan)
    run_to_end(engine)


@pytest.mark.parametrize("is_async", [False, True])
def test_forks_of_a_discarded_step_start_again(is_async):
    engine = caching_engine(async_scheduling=is_async)
    ids = [add(engine, tokens_of(20), max_tokens=5) for _ in range(3)]
    step(engine)
    plan = engine.schedule()
    assert plan.forked_ids.tolist() == ids[1:]
    if is_async:
        assert engine.schedule().seq_ids.tolist() == ids[1:]
    assert engine.discard_in_flight() == 1 + is_async
    engine.check_integrity()
    assert all(engine.state_slot(seq_id) == 0 for seq_id in ids)
    run_to_end(engine)
    assert [engine.num_output_tokens(seq_id) for seq_id in ids] == [5, 5, 5]
