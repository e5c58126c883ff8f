"""Growth and preemption of running sequences: scripted traces, one rule each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.harness import (
    commit_token,
    core,
    inputs,
    make_engine,
    make_params,
    run_to_end,
    step,
    tokens_of,
)

PREFILL, DECODE = core.StepKind.PREFILL, core.StepKind.DECODE


def add(engine, length: int, **fields) -> int:
    return engine.add(make_params(**{"max_tokens": 30, **fields}), tokens_of(length))


def start(engine, *lengths: int, **fields) -> list[int]:
    """Running sequences with one output token each."""
    ids = [add(engine, n, **fields) for n in lengths]
    while engine.num_waiting:
        assert step(engine, PREFILL) is not None
    return ids


def test_no_preemption_without_need():
    """Every block is taken but nobody needs one: all decode (the release preempts here)."""
    engine = make_engine(num_blocks=9)
    ids = start(engine, 20, 20, 10)  # 3 + 3 + 2 blocks of 8
    assert engine.num_free_blocks == 0
    plan = step(engine, DECODE)
    assert plan.seq_ids.tolist() == ids and len(plan.preempted_ids) == 0


def test_shortest_output_is_admitted_first():
    """Both have 25 tokens in 3 blocks of 8 and one block is free: the one with fewer outputs gets it."""
    engine = make_engine(num_blocks=8, max_model_len=50)
    (long,) = start(engine, 21)
    for _ in range(3):
        step(engine, DECODE)
    (short,) = start(engine, 24)
    assert [engine.num_output_tokens(i) for i in (long, short)] == [4, 1] and engine.num_free_blocks == 1
    plan = engine.schedule(DECODE)
    assert plan.seq_ids.tolist() == [short] and plan.preempted_ids.tolist() == [long]
    commit_token(engine, plan)
    run_to_end(engine)


def cost_per_block(length: int, terms, flops_per_token: float) -> float:
    total = sum(
        flops_per_token + sum(f * min((p + 1 + o) // d, c) for f, d, o, c in terms) for p in range(length)
    )
    return total / -(-length // 8)


def test_with_equal_outputs_the_elder_is_served_first():
    engine = make_engine(num_blocks=7, max_model_len=40)
    ids = start(engine, 24, 24)
    assert engine.num_free_blocks == 0
    plan = engine.schedule(DECODE)
    assert plan.preempted_ids.tolist() == [ids[1]] and plan.seq_ids.tolist() == [ids[0]]
    commit_token(engine, plan)
    run_to_end(engine)


@pytest.mark.parametrize("terms", [[], [(50.0, 1, 0, 1000)], [(9.0, 1, 0, 4), (3.0, 2, 1, 9)]])
def test_victim_among_longer_outputs(terms, seed):
    rng = np.random.default_rng(seed)
    checked = 0
    for _ in range(40):
        lengths = rng.integers(9, 50, 4).tolist()
        if any(n % 8 in (0, 7) for n in lengths):
            continue
        blocks = sum(-(-n // 8) for n in lengths) + 2
        engine = make_engine(
            num_blocks=blocks + 1,
            max_num_seqs=6,
            max_num_batched_tokens=400,
            attention_terms=terms,
            flops_per_token=2.0,
        )
        ids = start(engine, *lengths)
        step(engine, DECODE)  # two outputs each: they are served after the taker
        (taker,) = start(engine, 16)
        assert engine.num_free_blocks == 0
        plan = engine.schedule(DECODE)
        # computed tokens of a victim: prompt and its first output
        costs = {i: cost_per_block(n + 1, terms, 2.0) for i, n in zip(ids, lengths)}
        best = min(costs.values())
        candidates = [i for i in ids if costs[i] <= best * (1 + 1e-12)]
        assert plan.preempted_ids.tolist() == [max(candidates)]
        assert taker in plan.seq_ids.tolist()
        checked += 1
        commit_token(engine, plan)
        run_to_end(engine)
    assert checked >= 5


def test_partly_prefilled_prompt_is_a_victim():
    """It holds blocks for its whole prompt and has computed little: the cheapest to send back."""
    engine = make_engine(num_blocks=9, max_num_batched_tokens=8, max_model_len=60)
    (runner,) = start(engine, 15, max_tokens=20)  # 16 tokens in 2 blocks
    waiting = add(engine, 48, max_tokens=2)  # 6 blocks
    step(engine, PREFILL)
    step(engine, DECODE)
    assert engine.num_free_blocks == 0 and engine.num_computed_tokens(waiting) == 8
    plan = step(engine, DECODE)
    assert plan.seq_ids.tolist() == [runner] and plan.preempted_ids.tolist() == [waiting]
    assert engine.num_computed_tokens(waiting) == 0 and engine.status(waiting) == core.SequenceStatus.WAITING
    run_to_end(engine)


def test_drafts_are_cut_before_anybody_is_preempted():
    engine = make_engine(num_blocks=6, num_draft_tokens=5, max_num_batched_tokens=64)
    ids = [add(engine, n, max_tokens=10) for n in (14, 22)]
    plan = engine.schedule()
    commit_token(engine, plan, drafts=np.full((2, 5), 9, np.int32))
    assert engine.num_free_blocks == 0
    plan = engine.schedule(DECODE)
    # tokens 15 and 23 (last ones at positions 14 and 22): one more row fits into either table
    assert plan.seqlens_q.tolist() == [2, 2] and len(plan.preempted_ids) == 0
    commit_token(engine, plan)
    run_to_end(engine)
    assert all(engine.finish_reason(i) == core.FinishReason.LENGTH for i in ids)


def test_blocks_of_rejected_drafts_go_back():
    engine = make_engine(num_draft_tokens=5)
    (seq_id,) = start(engine, 6)
    for _ in range(2):
        plan = engine.schedule(DECODE)
        commit_token(engine, plan, drafts=np.full((1, 5), 9, np.int32))
    assert len(engine.block_table(seq_id)) == 2, "9 tokens after two steps"
    engine = make_engine(num_draft_tokens=5)
    seq_id = add(engine, 6)
    commit_token(engine, engine.schedule(), drafts=np.full((1, 5), 9, np.int32))
    plan = engine.schedule(DECODE)
    assert plan.seqlens_q.tolist() == [6] and len(engine.block_table(seq_id)) == 2
    commit_token(engine, plan, token=8)  # every draft is rejected: 8 tokens
    assert len(engine.block_table(seq_id)) == 1 and engine.num_output_tokens(seq_id) == 2


def test_recompute_starts_over_with_prompt_and_outputs():
    engine = make_engine()
    (seq_id,) = start(engine, 10)
    for _ in range(3):
        step(engine, DECODE)
    assert engine.preempt(seq_id) and engine.num_free_blocks == 32
    assert engine.metrics(seq_id).num_preemptions == 1
    plan = engine.schedule()
    arrays = inputs(engine, plan)
    assert plan.kind == PREFILL and arrays["input_ids"].tolist() == tokens_of(10).tolist() + [7] * 4
    assert arrays["positions"].tolist() == list(range(14)) and arrays["total_lens"].tolist() == [14]
    assert arrays["token_index"].tolist() == [14]
    commit_token(engine, plan)
    assert engine.output_token_ids(seq_id).tolist() == [7] * 5


def test_stop_preempted_request():
    engine = make_engine(num_blocks=6, stop_preempted_request=True, max_model_len=40)
    ids = start(engine, 16, 16, max_tokens=20)
    step(engine, DECODE)  # the elder takes the last block; the younger needs one and has no victim
    ended, reasons = engine.take_ended()
    assert ended.tolist() == [ids[1]] and reasons.tolist() == [int(core.FinishReason.ERROR)]
    assert engine.error_kind(ids[1]) == core.ErrorKind.PREEMPTED
    assert engine.output_token_ids(ids[1]).tolist() == [7]
    assert engine.take_ended()[0].size == 0
    run_to_end(engine)
    assert engine.finish_reason(ids[0]) == core.FinishReason.LENGTH and engine.num_free_blocks == 5


@pytest.mark.parametrize("max_preemptions", [0, 1, 2])
def test_preemption_is_bounded_and_everybody_finishes(max_preemptions):
    """Six sequences that each want most of the pool: nobody is preempted again and again."""
    engine = make_engine(
        num_blocks=9, max_num_seqs=6, num_state_slots=7, max_preemptions=max_preemptions, max_model_len=64
    )
    ids = [add(engine, 8, max_tokens=50) for _ in range(6)]
    plans = run_to_end(engine, max_steps=2000)
    assert all(engine.num_output_tokens(i) == 50 for i in ids)
    counts = [engine.metrics(i).num_preemptions for i in ids]
    # beyond the bound only elder spared sequences may preempt: at most once per elder and admission
    assert max(counts) <= max_preemptions + len(ids), counts
    assert counts[0] <= max_preemptions + 1, counts
    # the work that preemption repeats stays within a small multiple of the work itself
    rows = sum(plan.num_rows for plan in plans)
    assert rows <= 6 * (8 + 50) * 4, rows


@pytest.mark.parametrize("elder_is_spared", [False, True])
def test_who_may_take_from_a_spared_sequence(elder_is_spared):
    """Only an elder that is spared itself; anybody else makes room by leaving."""
    engine = make_engine(
        num_blocks=9,
        max_num_batched_tokens=8,
        max_model_len=60,
        max_preemptions=1,
        prefill_attempt_interval=9,
    )
    elder = add(engine, 15, max_tokens=20)  # 16 tokens in 2 blocks
    if elder_is_spared:
        step(engine, PREFILL)
        engine.preempt(elder)
    while engine.num_waiting:
        step(engine, PREFILL)
    younger = add(engine, 48, max_tokens=2)  # 6 blocks, prefilled in six steps
    step(engine, PREFILL)
    engine.preempt(younger)
    step(engine, PREFILL)
    step(engine, DECODE)
    assert engine.num_free_blocks == 0 and engine.num_computed_tokens(younger) == 8
    before = engine.metrics(younger).num_preemptions
    plan = engine.schedule()  # the elder has 17 tokens and needs a third block
    if elder_is_spared:
        assert plan.kind == DECODE and plan.preempted_ids.tolist() == [younger]
    else:
        assert plan.kind == PREFILL and plan.preempted_ids.tolist() == [elder]
        assert plan.seq_ids.tolist() == [younger] and engine.metrics(younger).num_preemptions == before
    commit_token(engine, plan)
    run_to_end(engine)


def test_spared_sequence_is_served_first():
    engine = make_engine(num_blocks=8, max_model_len=50, max_preemptions=1)
    (old,) = start(engine, 21)
    engine.preempt(old)
    step(engine, PREFILL)
    for _ in range(2):
        step(engine, DECODE)  # 25 tokens: it needs a fourth block, as the other one will
    (short,) = start(engine, 24)
    assert engine.num_free_blocks == 1
    plan = step(engine, DECODE)
    assert plan.seq_ids.tolist() == [old] and plan.preempted_ids.tolist() == [short]


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize(("prompt", "outputs"), [(1, 56), (8, 49), (24, 33), (50, 7), (56, 1)])
def test_one_sequence_may_fill_the_whole_pool(prompt, outputs, num_drafts):
    """7 blocks of 8: 56 tokens have KV, the 57th is never read."""
    engine = make_engine(num_blocks=8, num_draft_tokens=num_drafts, max_model_len=60)
    seq_id = add(engine, prompt, max_tokens=outputs)
    while engine.has_unfinished:
        plan = engine.schedule()
        commit_token(engine, plan, drafts=np.full((1, num_drafts), 7, np.int32) if num_drafts else None)
    assert engine.num_output_tokens(seq_id) == outputs and engine.num_preemptions == 0


def test_more_drafts_than_tokens_left_are_not_verified():
    engine = make_engine(num_draft_tokens=5)
    seq_id = add(engine, 3, max_tokens=4)
    commit_token(engine, engine.schedule(), drafts=np.full((1, 5), 7, np.int32))
    plan = engine.schedule()
    assert plan.seqlens_q.tolist() == [3], "three tokens are left: two drafts and the row behind them"
    result = commit_token(engine, plan)
    assert result.num_new_tokens.tolist() == [3] and engine.num_output_tokens(seq_id) == 4
