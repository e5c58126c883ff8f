"""Preempted sequences in host memory: which ones, how many bytes, and that nothing of them changes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.core.fake_device import Loop
from tests.core.harness import commit_token, core, make_config, make_engine, make_params, step, tokens_of
from tests.core.test_whole_traces import MODEL_LEN, check_outputs
from tests.core.traffic import Traffic, related_requests

Mode = core.PreemptionMode
SIZES = {"block_bytes": 100, "slot_bytes": 1000, "draft_score_bytes": 50}


def swapping(mode=Mode.SWAP, **changes):
    return {"preemption_mode": mode, "swap_limit_bytes": 1 << 20, **SIZES, **changes}


def running(engine, length: int = 20, **fields) -> int:
    """A sequence with one output."""
    seq_id = engine.add(make_params(**fields), tokens_of(length))
    while engine.num_output_tokens(seq_id) == 0:
        step(engine)
    return seq_id


def test_a_round_trip():
    engine = make_engine(num_draft_tokens=2, **swapping())
    seq_id = engine.add(make_params(), tokens_of(20))
    plan = engine.schedule()
    drafts = {"drafts": np.array([[5, 6]], np.int32), "confidences": np.array([[0.5, 0.25]], np.float32)}
    commit_token(engine, plan, **drafts)
    table, slot = engine.block_table(seq_id).tolist(), engine.state_slot(seq_id)
    assert engine.preempt(seq_id)
    engine.check_integrity()
    ((out, blocks, from_slot, num_scores),), drops = engine.take_swaps()
    assert (out, blocks.tolist(), from_slot, num_scores, drops) == (seq_id, table, slot, 0, [])
    assert engine.take_swaps() == ([], []) and engine.num_free_blocks == 32 and engine.num_free_slots == 6
    assert engine.schedule() is None, "it needs its bytes"
    assert engine.drafts(seq_id).tolist() == [5, 6] and engine.confidences(seq_id).tolist() == [0.5, 0.25]
    assert engine.admit_computed() == []
    ((back, blocks, _),) = engine.admit_swapped()
    assert back == seq_id and len(blocks) == 3 and engine.num_running == 1
    plan = step(engine)
    assert not plan.is_prefill and plan.num_rows == 3 and plan.seqlens_k.tolist() == [23]
    stats = engine.swap_stats()
    assert (stats.num_out, stats.num_in, stats.num_held, stats.held_bytes) == (1, 1, 0, 0)
    assert engine.num_recomputed_rows == 0 and engine.metrics(seq_id).num_preemptions == 1


def test_bytes_and_limit():
    """Blocks of computed tokens, a slot, and the scores of drafts that are tested by ratio."""
    engine = make_engine(num_draft_tokens=2, **swapping(swap_limit_bytes=2750))
    first = engine.add(make_params(is_ratio=True), tokens_of(20))
    commit_token(engine, engine.schedule(), drafts=np.array([[5, 6]], np.int32))
    engine.preempt(first)
    assert engine.swap_stats().held_bytes == 3 * 100 + 1000 + 2 * 50
    second, third = running(engine, 20), running(engine, 25)
    for seq_id in (second, third):
        engine.preempt(seq_id)
        engine.check_integrity()
    outs, _ = engine.take_swaps()
    assert [(out[0], len(out[1]), out[3]) for out in outs] == [(first, 3, 2), (second, 3, 0)]
    stats = engine.swap_stats()
    assert (stats.num_held, stats.num_refused, stats.held_bytes) == (2, 1, 2700)
    assert step(engine, core.StepKind.PREFILL).seq_ids.tolist() == [third], "it is recomputed"
    assert engine.num_recomputed_rows == 25


def test_the_rule():
    """A copy both ways against prefilling what a hit would not bring back."""
    flops = {"flops_per_token": 10.0, "max_num_batched_tokens": 64}
    for copy_rate, caching, swaps in (
        (None, False, False),  # nobody knows
        (2599.0, False, False),  # 2 * 1300 bytes in more than a second
        (2601.0, False, True),
        (2601.0, True, False),  # 16 of 20 rows would be found
        (13001.0, True, True),
    ):
        engine = make_engine(prefix_caching=caching, **swapping(Mode.AUTO, **flops))
        seq_id = running(engine)
        plan = engine.schedule()
        engine.add_prefill_time(plan, 1e6)  # no prefill: it does not count
        commit_token(engine, plan)
        other = engine.add(make_params(), tokens_of(30, 9))
        plan = engine.schedule(core.StepKind.PREFILL)
        assert plan.num_rows == (24 if caching else 30)
        commit_token(engine, plan)
        engine.add_prefill_time(plan, 1e3 * plan.num_rows / 21)  # 210 FLOP/s: 21 rows in a second
        engine.abort(other)
        if copy_rate is not None:
            engine.set_copy_rate(copy_rate)
        assert engine.num_computed_tokens(seq_id) == 21
        engine.preempt(seq_id)
        assert (engine.swap_stats().num_out == 1) == swaps, f"{copy_rate=} {caching=}"
        assert engine.swap_stats().num_refused == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_who_is_recomputed_all_the_same(is_async):
    """Prompts that are not done, prompt engines, and steps that never happened."""
    engine = make_engine(async_scheduling=is_async, max_num_batched_tokens=10, **swapping())
    seq_id = engine.add(make_params(), tokens_of(20))
    step(engine)
    assert engine.preempt(seq_id) and engine.take_swaps() == ([], [])
    running_id = running(engine, 5)
    plan = engine.schedule()
    engine.preempt(running_id)
    assert engine.discard_in_flight() == 1
    engine.check_integrity()
    assert plan is not None and engine.take_swaps() == ([], [])
    engine = make_engine(role=core.Role.PROMPT, **swapping())
    seq_id = engine.add(make_params(), tokens_of(20))
    plan = engine.schedule()
    engine.preempt(seq_id)
    commit_token(engine, plan)
    assert engine.take_swaps() == ([], []) and engine.status(seq_id) == core.SequenceStatus.WAITING


def test_preempted_in_flight():
    """Its bytes are whole, and its drafts known, when the step is committed."""
    engine = make_engine(async_scheduling=True, **swapping())
    seq_id = running(engine)
    plan = engine.schedule()
    engine.preempt(seq_id)
    assert engine.take_swaps() == ([], []) and engine.schedule() is None
    commit_token(engine, plan)
    ((out, blocks, _, _),), _ = engine.take_swaps()
    assert out == seq_id and len(blocks) == 3 and engine.num_output_tokens(seq_id) == 2
    # it ends while it is there
    assert engine.abort(seq_id)
    engine.check_integrity()
    assert engine.take_swaps() == ([], [seq_id]) and engine.swap_stats().held_bytes == 0
    engine.release(seq_id)


def test_lost_copies():
    engine = make_engine(**swapping())
    ids = [running(engine, 20), running(engine, 9)]
    for seq_id in ids:
        engine.preempt(seq_id)
    engine.take_swaps()
    assert engine.keep_swaps([ids[1], 99]) == [ids[1]]
    engine.check_integrity()
    assert step(engine, core.StepKind.PREFILL).seq_ids.tolist() == [ids[0]]
    assert [admitted[0] for admitted in engine.admit_swapped()] == [ids[1]]
    # the write that follows is interrupted
    engine.discard_in_flight()
    engine.check_integrity()
    assert engine.keep_swaps([ids[1]]) == [] and engine.admit_swapped() == []
    assert step(engine, core.StepKind.PREFILL).seq_ids.tolist() == [ids[1]]


def test_swapped_again_before_the_copy_is_proved():
    """What goes out has come in behind the same plan, so a failure in front of it spoils both."""
    engine = make_engine(async_scheduling=True, **swapping())
    seq_id = running(engine, 20)
    engine.preempt(seq_id)
    engine.take_swaps()
    engine.admit_swapped()
    engine.preempt(seq_id)
    assert [out[0] for out in engine.take_swaps()[0]] == [seq_id]
    engine.discard_in_flight()
    engine.check_integrity()
    assert engine.keep_swaps([seq_id]) == [] and engine.swap_stats().num_held == 0
    assert step(engine, core.StepKind.PREFILL).seq_ids.tolist() == [seq_id]


def test_copies_come_first():
    """Nobody gets room while bytes may still be overwritten."""
    engine = make_engine(**swapping())
    engine.preempt(running(engine))
    with pytest.raises(RuntimeError, match="is not copied yet"):
        engine.admit_swapped()


@pytest.mark.parametrize("limit", [2200, 1 << 20])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("caching", [False, True])
def test_outputs_do_not_depend_on_swaps(seed, caching, num_drafts, is_async, limit):
    """Preemptions, aborts and discarded steps on a device that reads all of it back."""
    rng = random.Random(seed)
    config = make_config(
        max_num_seqs=6,
        max_num_batched_tokens=max(30, 6 * (1 + num_drafts)),
        max_model_len=MODEL_LEN,
        num_blocks=20,
        num_state_slots=12,
        num_draft_tokens=num_drafts,
        async_scheduling=is_async,
        prefix_caching=caching,
        **swapping(swap_limit_bytes=limit),
    )
    loop = Loop(config)
    traffic = Traffic(rng, loop, related_requests(rng, 80), preempted=0.1)
    num_discarded = 0
    for number in traffic.steps():
        if rng.random() < 0.02:
            loop.device.copy_out()
            plan = loop.engine.schedule()
            loop.device.copy_out()
            if plan is not None:
                loop.device.forward(plan)
            num_discarded += loop.engine.discard_in_flight()
            kept = loop.engine.keep_swaps(list(loop.device.host))
            loop.device.host = {seq_id: loop.device.host[seq_id] for seq_id in kept}
            loop.in_flight = None
        loop.step(tell_emitted=bool(number % 2))
        loop.engine.check_integrity()
        assert len(loop.device.host) == loop.engine.swap_stats().num_held
    check_outputs(loop, traffic.ids)
    stats = loop.engine.swap_stats()
    assert stats.num_in > 2 and num_discarded > 0 and stats.num_held == 0
    assert stats.num_refused > 0 or limit > 2200
