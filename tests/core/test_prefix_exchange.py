"""The doors of the prefix cache for a store outside: what is reported, and what comes in."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.core.harness import commit_token, core, make_engine, make_params, run_to_end, tokens_of

SIZE = 8  # tokens per block


def caching_engine(**changes):
    engine = make_engine(
        **{"prefix_caching": True, "num_state_slots": 13, "num_blocks": 65, **changes},
    )
    engine.start_reporting_prefixes()
    return engine


def add(engine, prompt, **fields) -> int:
    return engine.add(make_params(**{"max_tokens": 1, **fields}), np.asarray(prompt, np.int32))


def run(engine, prompt, **fields) -> int:
    """Run one request to its end; tokens that it found."""
    seq_id = add(engine, prompt, **fields)
    run_to_end(engine)
    found = engine.metrics(seq_id).num_cached_tokens
    engine.release(seq_id)
    engine.check_integrity()
    return found


def give(engine, seq_id: int, border: int) -> tuple[int, list[int], int] | None:
    """A prefix from outside for a waiting sequence."""
    held = engine.reserve_prefix(seq_id, border)
    if held is None:
        return None
    publication = engine.publish_prefix()
    engine.check_integrity()  # still held
    engine.settle_prefix(publication, True)
    engine.check_integrity()
    return held[0], held[1].tolist(), held[2]


def test_nothing_is_reported_unasked():
    engine = make_engine(prefix_caching=True, num_state_slots=13)
    run(engine, tokens_of(20))
    assert engine.take_published_borders() == []


def test_a_border_is_reported_with_its_blocks():
    engine = caching_engine()
    seq_id = add(engine, tokens_of(20))
    plan = engine.schedule()
    assert engine.take_published_borders() == []  # not before the commit
    table = engine.block_table(seq_id)
    commit_token(engine, plan)
    ((tokens, blocks, slot, _),) = engine.take_published_borders()
    assert tokens.tolist() == tokens_of(16).tolist() and blocks.tolist() == table[:2].tolist()
    assert slot == plan.state_copies[0, 1] and slot != engine.state_slot(seq_id)
    assert engine.take_published_borders() == []  # each once
    run_to_end(engine)
    run(engine, tokens_of(20))
    assert engine.take_published_borders() == []  # known already
    run(engine, tokens_of(36))
    ((tokens, blocks, _, _),) = engine.take_published_borders()
    assert len(tokens) == 32 and blocks.tolist()[:2] == table[:2].tolist()


def test_private_prefixes_are_not_reported():
    engine = caching_engine()
    run(engine, tokens_of(20), content_keys=[(0, 1, b"me")])
    assert engine.take_published_borders() == []
    add(engine, tokens_of(20), content_keys=[(0, 1, b"me")])
    assert engine.take_arrivals() == []


def test_discarded_steps_report_nothing():
    engine = caching_engine()
    add(engine, tokens_of(20))
    engine.schedule()
    engine.discard_in_flight()
    assert engine.take_published_borders() == []
    commit_token(engine, engine.schedule())
    engine.discard_in_flight()  # interrupted behind the commit: what is next takes blocks before it is asked
    assert engine.take_published_borders() == []


def test_arrivals_are_named_once_and_when_there_is_room():
    engine = caching_engine(num_blocks=17, max_num_seqs=3)
    ids = [add(engine, tokens_of(30, first)) for first in range(2, 8)]
    assert engine.take_arrivals() == ids[:3] and engine.take_arrivals() == []
    wide = caching_engine(num_blocks=9, max_num_seqs=3)
    ids = [add(wide, tokens_of(30, first)) for first in range(2, 8)]
    assert wide.take_arrivals() == ids[:2]  # blocks for two
    run_to_end(wide)
    assert wide.take_arrivals() == []


def test_scored_prompts_are_no_arrivals():
    engine = caching_engine()
    add(engine, tokens_of(20), num_prompt_logprobs=0)
    assert engine.take_arrivals() == []


@pytest.mark.parametrize("border", [8, 16, 24])
def test_a_prefix_from_outside_is_found(border):
    engine = caching_engine()
    seq_id = add(engine, tokens_of(30))
    assert engine.find_prefix(seq_id) == (0, 0, 0)
    num_known, blocks, slot = give(engine, seq_id, border)
    assert num_known == 0 and len(set(blocks)) == border // SIZE and slot > 0
    assert engine.find_prefix(seq_id) == (border, border, 0)
    plan = engine.schedule()
    assert plan.num_rows == 30 - border or plan.num_rows == 24 - border
    assert plan.slot_copies.tolist() == [[slot, engine.state_slot(seq_id)]]
    assert engine.block_table(seq_id)[: len(blocks)].tolist() == blocks
    commit_token(engine, plan)
    run_to_end(engine)
    assert engine.metrics(seq_id).num_cached_tokens == border
    engine.check_integrity()


def test_only_what_is_missing_is_held():
    """Known blocks are shared; a known border has no room for another state."""
    engine = caching_engine()
    run(engine, tokens_of(20))
    seq_id = add(engine, tokens_of(44))
    assert engine.find_prefix(seq_id) == (16, 16, 0)
    assert engine.reserve_prefix(seq_id, 16) is None
    num_known, blocks, _ = give(engine, seq_id, 40)
    assert num_known == 2 and len(blocks) == 3
    assert engine.find_prefix(seq_id) == (40, 40, 0)
    run_to_end(engine)
    assert engine.metrics(seq_id).num_cached_tokens == 40


def test_a_state_for_known_blocks():
    """Blocks without a state behind them: only the state comes."""
    engine = caching_engine()
    run(engine, tokens_of(44))
    seq_id = add(engine, tokens_of(30))
    assert engine.find_prefix(seq_id) == (0, 24, 0)
    assert give(engine, seq_id, 24)[:2] == (3, [])
    assert engine.find_prefix(seq_id) == (24, 24, 0)
    run_to_end(engine)
    assert engine.metrics(seq_id).num_cached_tokens == 24


def test_cancelled_reservations_leave_nothing():
    engine = caching_engine()
    run(engine, tokens_of(20))
    free = engine.num_free_blocks, engine.num_free_slots
    seq_id = add(engine, tokens_of(44))
    engine.reserve_prefix(seq_id, 40)
    assert engine.num_free_blocks == free[0] - 5 and engine.num_free_slots == free[1] - 1
    with pytest.raises(RuntimeError, match="has a reservation"):
        engine.reserve_prefix(seq_id, 40)
    engine.cancel_prefix()
    engine.cancel_prefix()
    assert (engine.num_free_blocks, engine.num_free_slots) == free
    assert engine.find_prefix(seq_id) == (16, 16, 0)
    engine.reserve_prefix(seq_id, 40)
    engine.discard_in_flight()  # as after an interrupt
    assert (engine.num_free_blocks, engine.num_free_slots) == free
    engine.check_integrity()
    with pytest.raises(RuntimeError, match="nothing is reserved"):
        engine.publish_prefix()


def test_no_room():
    engine = caching_engine(num_blocks=9, max_num_seqs=2, num_state_slots=3)
    running = [add(engine, tokens_of(20, first), max_tokens=8) for first in (2, 30)]
    plan = engine.schedule()
    seq_id = add(engine, tokens_of(44))
    assert engine.reserve_prefix(seq_id, 40) is None and engine.reserve_prefix(seq_id, 8) is None
    assert engine.reserve_prefix(running[0], 8) is None  # it runs
    commit_token(engine, plan)
    run_to_end(engine)
    engine.check_integrity()


def test_a_sequence_that_goes_meanwhile():
    engine = caching_engine()
    seq_id = add(engine, tokens_of(30))
    engine.reserve_prefix(seq_id, 24)
    engine.abort(seq_id)
    engine.release(seq_id)
    assert engine.publish_prefix() == 0
    engine.check_integrity()
    assert engine.num_free_blocks == 64 and engine.prefix_cache_stats().num_blocks == 0
    with pytest.raises(KeyError):
        engine.reserve_prefix(seq_id, 24)


def test_what_is_unsound_was_never_there():
    """Whoever has read it in the step in flight starts again: who resumed, who was forked, who continues."""
    engine = caching_engine()
    publications, seq_ids = [], []
    for first in (2, 4):
        seq_ids.append(add(engine, tokens_of(44, first), max_tokens=3))
        engine.reserve_prefix(seq_ids[-1], 40)
        publications.append(engine.publish_prefix())
    fork = add(engine, tokens_of(44), max_tokens=3, seed=1)
    plan = engine.schedule()
    assert plan.num_seqs == 2 and engine.find_prefix(seq_ids[0])[0] == 40
    for publication, is_sound in zip(publications, (False, True), strict=True):
        engine.settle_prefix(publication, is_sound)
        engine.check_integrity()
    commit_token(engine, plan)
    engine.check_integrity()
    outputs = [len(engine.output_token_ids(seq_id)) for seq_id in (*seq_ids, fork)]
    assert outputs == [0, 1, 0]
    run_to_end(engine)
    engine.check_integrity()
    assert [len(engine.output_token_ids(seq_id)) for seq_id in (*seq_ids, fork)] == [3, 3, 3]
    cached = [engine.metrics(seq_id).num_cached_tokens for seq_id in (*seq_ids, fork)]
    assert cached[:2] == [0, 40] and engine.metrics(seq_ids[0]).num_preemptions == 0
    engine.settle_prefix(publications[0], False)  # long settled


def test_an_unsound_state_behind_known_blocks():
    """The blocks stay, the state goes, and so does what was computed from it."""
    engine = caching_engine()
    run(engine, tokens_of(44, 2))
    other = [*tokens_of(24, 2), *tokens_of(10, 40)]
    seq_id = add(engine, other, max_tokens=2)
    assert engine.find_prefix(seq_id) == (0, 24, 0)
    known, missing, _ = engine.reserve_prefix(seq_id, 24)
    assert known == 3 and len(missing) == 0
    publication = engine.publish_prefix()
    plan = engine.schedule()
    engine.settle_prefix(publication, False)
    commit_token(engine, plan)
    assert len(engine.output_token_ids(seq_id)) == 0
    assert engine.find_prefix(seq_id) == (0, 24, 0)
    run_to_end(engine)
    engine.check_integrity()
    assert engine.metrics(seq_id).num_cached_tokens == 0 and len(engine.output_token_ids(seq_id)) == 2


def test_replayed_prompts_are_cut_in_front_of_their_windows():
    """A state at the last border in front of the decoder's windows, and one in front of the last token."""
    engine = caching_engine(replay_keep_tokens=13)
    seq_id = add(engine, tokens_of(44))
    assert engine.find_prefix(seq_id) == (0, 0, 31)
    borders = []
    while engine.num_unfinished:
        commit_token(engine, engine.schedule())
        borders += [(len(tokens), is_whole) for tokens, _, _, is_whole in engine.take_published_borders()]
    assert borders == [(24, False), (40, False)]
    short = add(engine, tokens_of(13))
    assert engine.find_prefix(short) == (0, 0, 0)
    while engine.num_unfinished:
        commit_token(engine, engine.schedule())
    assert [(len(tokens), is_whole) for tokens, _, _, is_whole in engine.take_published_borders()] == [
        (8, True)
    ]


def test_random_traces(seed):
    """Prefixes come in at random while others run, are evicted, aborted and discarded: nothing is lost."""
    rng = random.Random(seed)
    engine = caching_engine(num_blocks=25, max_num_seqs=3, num_state_slots=7)
    bases = [tokens_of(60, first) for first in (2, 3, 4)]
    live: list[int] = []
    given = found = num_unsound = 0
    unsettled: list[int] = []
    for _ in range(1500):
        action = rng.random()
        if action < 0.25 and len(live) < 8:
            base = rng.choice(bases)
            live.append(add(engine, base[: rng.randrange(4, 56)], max_tokens=rng.randrange(1, 6)))
        elif action < 0.5 and live:
            seq_id = rng.choice(live)
            most = (engine.num_prompt_tokens(seq_id) - 1) // SIZE
            if most > 0 and engine.status(seq_id) == core.SequenceStatus.WAITING:
                held = engine.reserve_prefix(seq_id, SIZE * rng.randrange(1, most + 1))
                if held is not None and rng.random() < 0.8:
                    unsettled.append(engine.publish_prefix())
                    given += 1
                else:
                    engine.cancel_prefix()
        elif action < 0.9:
            plan = engine.schedule()
            while unsettled:
                is_sound = rng.random() < 0.7
                num_unsound += not is_sound
                engine.settle_prefix(unsettled.pop(), is_sound)
                engine.check_integrity()
            if plan is not None:
                if rng.random() < 0.05:
                    engine.discard_in_flight()
                else:
                    commit_token(engine, plan)
        elif live:
            engine.abort(rng.choice(live))
        for seq_id in [each for each in live if engine.status(each) == core.SequenceStatus.FINISHED]:
            found += engine.metrics(seq_id).num_cached_tokens > 0
            engine.release(seq_id)
            live.remove(seq_id)
        for tokens, blocks, slot, _ in engine.take_published_borders():
            assert len(tokens) == SIZE * len(blocks) and slot > 0
            assert any(np.array_equal(tokens[:4], base[:4]) for base in bases)  # outputs may follow
        engine.check_integrity()
    assert given > 50 and found > 50 and num_unsound > 10
    for seq_id in live:
        engine.abort(seq_id)
    engine.discard_in_flight()
    engine.check_integrity()
    assert engine.num_free_blocks == 24 and engine.num_free_slots == 6
