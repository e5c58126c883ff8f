"""Which prompts a prefill step takes: scripted traces, one rule each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.harness import commit_token, core, make_engine, make_params, run_to_end, step, tokens_of

PREFILL, DECODE = core.StepKind.PREFILL, core.StepKind.DECODE


def add(engine, length: int, **fields) -> int:
    return engine.add(make_params(**fields), tokens_of(length))


def taken(plan) -> dict[int, int]:
    """Rows by sequence."""
    return dict(zip(plan.seq_ids.tolist(), plan.seqlens_q.tolist()))


def test_arrival_order_and_one_kind_per_step():
    engine = make_engine()
    ids = [add(engine, n) for n in (5, 9, 3)]
    plan = step(engine)
    assert plan.kind == PREFILL and plan.seq_ids.tolist() == ids and plan.seqlens_q.tolist() == [5, 9, 3]
    plan = step(engine)
    assert plan.kind == DECODE and plan.seq_ids.tolist() == ids and plan.seqlens_q.tolist() == [1, 1, 1]


def test_chunks_fill_the_token_budget():
    engine = make_engine(max_num_batched_tokens=20, max_num_seqs=4)
    first, second = add(engine, 12), add(engine, 40)
    assert taken(step(engine, PREFILL)) == {first: 12, second: 8}
    assert engine.num_running == 1 and engine.num_waiting == 1
    plan = engine.schedule(PREFILL)
    assert taken(plan) == {second: 20} and plan.seqlens_k.tolist() == [28]
    assert plan.num_sampled_rows.tolist() == [0] and plan.num_samples == 0
    commit_token(engine, plan)
    plan = step(engine, PREFILL)
    assert taken(plan) == {second: 12} and plan.num_sampled_rows.tolist() == [1]
    assert engine.num_output_tokens(second) == 1 and engine.num_waiting == 0


def test_without_chunking_a_prompt_is_whole_or_waits():
    engine = make_engine(chunked_prefill=False, max_num_batched_tokens=64)
    ids = [add(engine, n) for n in (40, 30, 20)]
    assert taken(step(engine, PREFILL)) == {ids[0]: 40, ids[2]: 20}
    assert taken(step(engine, PREFILL)) == {ids[1]: 30}


def test_min_prefill_chunk():
    engine = make_engine(max_num_batched_tokens=20, min_prefill_chunk=10)
    ids = [add(engine, n) for n in (12, 40, 3)]
    assert taken(step(engine, PREFILL)) == {ids[0]: 12, ids[2]: 3}, (
        "8 rows of the second would be too short a chunk"
    )
    assert taken(step(engine, PREFILL)) == {ids[1]: 20}


def test_sum_of_lengths_cap_skips_and_recovers():
    engine = make_engine(max_num_batched_tokens=400, max_sum_seqlen_k=64)
    ids = [add(engine, n) for n in (40, 30, 20)]
    assert taken(step(engine, PREFILL)) == {ids[0]: 40, ids[2]: 20}
    assert taken(step(engine, PREFILL)) == {ids[1]: 30}


@pytest.mark.parametrize("limit", [1.0, 100.0, 333.0, 1e9])
def test_flops_budget(limit):
    """A chunk is the longest prefix whose attention fits, for the first at least one block."""
    terms = [(2.0e12, 1, 0, 6), (1.0e12, 4, 0, 3), (5.0e12, 8, 7, 2)]
    engine = make_engine(
        max_num_batched_tokens=200, attention_terms=terms, max_prefill_tflops=limit, max_model_len=64
    )

    def cost(position: int) -> float:
        return sum(f * min((position + 1 + o) // d, c) for f, d, o, c in terms)

    lengths = [20, 33, 7]
    ids = [add(engine, n) for n in lengths]
    plan = engine.schedule(PREFILL)
    left = limit * 1e12
    for index, (seq_id, length) in enumerate(zip(ids, lengths)):
        rows = 0
        while rows < length and sum(map(cost, range(rows + 1))) <= left:
            rows += 1
        if index == 0:
            rows = max(rows, 8)
        assert taken(plan).get(seq_id, 0) == rows
        left = max(0.0, left - sum(map(cost, range(rows))))
    commit_token(engine, plan)
    run_to_end(engine)


def test_no_head_of_line_blocking():
    """Ten blocks: eight are taken, the next prompt needs four, the one behind it needs one."""
    engine = make_engine(num_blocks=11, max_num_batched_tokens=64)
    running = add(engine, 60, max_tokens=4)
    step(engine, PREFILL)
    big, small = add(engine, 30), add(engine, 5)
    assert taken(step(engine, PREFILL)) == {small: 5}
    assert engine.status(big) == core.SequenceStatus.WAITING
    run_to_end(engine)
    assert {engine.num_output_tokens(i) for i in (running, big, small)} == {4, 8}


@pytest.mark.parametrize("max_overtakes", [0, 3])
def test_overtaking_is_bounded(max_overtakes):
    engine = make_engine(num_blocks=11, max_num_seqs=64, num_state_slots=65, max_overtakes=max_overtakes)
    add(engine, 60, max_tokens=4)
    step(engine, PREFILL)
    big = add(engine, 30)
    small = [add(engine, 3, max_tokens=1) for _ in range(6)]
    admitted = []
    while (plan := engine.schedule(PREFILL)) is not None:
        admitted += plan.seq_ids.tolist()
        commit_token(engine, plan)
        if len(admitted) > 6:
            break
    # two blocks are free, so two short ones go per step: the bound may be passed by the rest of one step
    assert len(admitted) == {0: 0, 3: 4}[max_overtakes], admitted
    assert admitted == small[: len(admitted)]
    run_to_end(engine)
    assert engine.finish_reason(big) == core.FinishReason.LENGTH


def test_a_big_request_is_not_starved_by_small_ones():
    """Small requests arrive for ever; the big one needs almost the whole pool and still runs."""
    engine = make_engine(num_blocks=10, max_num_seqs=8, num_state_slots=9, max_overtakes=5)
    for _ in range(4):
        add(engine, 8, max_tokens=16)
    step(engine)
    big = add(engine, 60, max_tokens=2)
    steps = 0
    while engine.status(big) != core.SequenceStatus.FINISHED and steps < 400:
        steps += 1
        if engine.num_waiting < 6:
            add(engine, 8, max_tokens=16)
        step(engine)
    assert engine.finish_reason(big) == core.FinishReason.LENGTH
    assert 10 < steps < 150, steps


def test_slots_and_sequences_bound_admission():
    engine = make_engine(max_num_seqs=2)
    ids = [add(engine, 3) for _ in range(4)]
    assert taken(step(engine, PREFILL)) == {ids[0]: 3, ids[1]: 3}
    assert engine.schedule(PREFILL) is None
    engine.abort(ids[0])
    assert taken(step(engine, PREFILL)) == {ids[2]: 3}
    engine = make_engine(max_num_seqs=4, num_state_slots=3)
    ids = [add(engine, 3) for _ in range(4)]
    assert list(taken(step(engine, PREFILL))) == ids[:2]


def test_partly_prefilled_sequences_count_as_admitted():
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=10)
    first, second, third = (add(engine, 25, max_tokens=2) for _ in range(3))
    assert taken(step(engine, PREFILL)) == {first: 10}
    assert taken(step(engine, PREFILL)) == {first: 10}
    assert taken(step(engine, PREFILL)) == {first: 5, second: 5}
    assert taken(step(engine, PREFILL)) == {second: 10}
    assert taken(step(engine, PREFILL)) == {second: 10}
    assert engine.schedule(PREFILL) is None and engine.num_running == 2
    run_to_end(engine)
    assert engine.finish_reason(third) == core.FinishReason.LENGTH


@pytest.mark.parametrize("interval", [1, 3])
def test_decode_steps_between_prefill_steps(interval):
    engine = make_engine(prefill_attempt_interval=interval, max_num_seqs=64, num_state_slots=65)
    add(engine, 3, max_tokens=30)
    kinds = []
    for _ in range(3 * (interval + 1)):
        add(engine, 3, max_tokens=30)
        kinds.append(step(engine).kind)
    assert kinds == ([PREFILL] + [DECODE] * interval) * 3


def test_prefill_does_not_wait_when_nothing_decodes():
    engine = make_engine(prefill_attempt_interval=50, max_num_batched_tokens=10)
    add(engine, 35, max_tokens=1)
    assert [step(engine).kind for _ in range(4)] == [PREFILL] * 4
    add(engine, 3, max_tokens=1)
    assert step(engine).kind == PREFILL


def test_wants_prefill_changes_nothing_and_tells_the_truth(seed):
    rng = np.random.default_rng(seed)
    engine = make_engine(num_blocks=12, prefill_attempt_interval=2, max_num_batched_tokens=16)
    for _ in range(300):
        if rng.random() < 0.3:
            add(engine, int(rng.integers(1, 40)), max_tokens=int(rng.integers(1, 20)))
        before = (engine.num_free_blocks, engine.num_waiting, engine.num_running)
        wants = engine.wants_prefill()
        assert before == (engine.num_free_blocks, engine.num_waiting, engine.num_running)
        plan = step(engine)
        if wants:
            assert plan.kind == PREFILL
        elif plan is not None and plan.kind == PREFILL:
            assert len(plan.preempted_ids) == 0 or engine.num_running == 0


def test_headroom_for_running_sequences():
    """Three running sequences each grow into a new block soon: their blocks are not given away."""
    engine = make_engine(num_blocks=9, admission_headroom_tokens=4, max_num_seqs=8, num_state_slots=9)
    for _ in range(3):
        add(engine, 6, max_tokens=9)
    step(engine, PREFILL)
    late = add(engine, 17, max_tokens=2)
    assert engine.num_free_blocks == 5 and engine.schedule(PREFILL) is None, "3 of 5 blocks, 3 are spoken for"
    small = add(engine, 4, max_tokens=2)
    assert taken(step(engine, PREFILL)) == {small: 4}
    run_to_end(engine)
    assert engine.num_preemptions == 0 and engine.finish_reason(late) == core.FinishReason.LENGTH


def test_headroom_is_waived_for_an_empty_pool():
    engine = make_engine(num_blocks=9, admission_headroom_tokens=64)
    only = add(engine, 63, max_tokens=1)
    assert taken(step(engine)) == {only: 63}


def test_forced_kind_returns_none_when_impossible():
    engine = make_engine()
    assert engine.schedule() is None and engine.schedule(PREFILL) is None and engine.schedule(DECODE) is None
    add(engine, 3)
    assert engine.schedule(DECODE) is None
    assert step(engine, PREFILL).kind == PREFILL
    assert engine.schedule(PREFILL) is None
    assert step(engine, DECODE).kind == DECODE


def test_a_preempted_sequence_keeps_its_place_in_the_queue():
    engine = make_engine(max_num_seqs=2)
    ids = [add(engine, 3) for _ in range(3)]
    step(engine, PREFILL)
    assert engine.preempt(ids[1])
    assert taken(step(engine, PREFILL)) == {ids[1]: 4}, "it goes before the one that came later"


def test_a_long_queue_without_room_is_cheap_and_correct():
    """Thousands wait behind a full pool; the step looks past a bounded number of them."""
    engine = make_engine(
        num_blocks=11, max_num_seqs=300, num_state_slots=301, max_num_batched_tokens=300, max_overtakes=1000
    )
    add(engine, 60, max_tokens=4)
    step(engine, PREFILL)
    for _ in range(3000):
        add(engine, 30, max_tokens=1)
    add(engine, 3, max_tokens=1)
    assert engine.schedule(PREFILL) is None
    run_to_end(engine)
    assert engine.num_free_blocks == 10
