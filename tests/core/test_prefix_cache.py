"""The prefix cache of the core: what is found, what is forgotten first, and that outputs never change."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from tests.core.fake_device import FakeDevice, Loop
from tests.core.harness import (
    commit_token,
    core,
    make_config,
    make_engine,
    make_params,
    run_to_end,
    step,
    tokens_of,
)
from tests.core.test_whole_traces import MODEL_LEN, check_outputs
from tests.core.traffic import Traffic, related_requests

PREFILL, DECODE = core.StepKind.PREFILL, core.StepKind.DECODE
SIZE = 8  # tokens per block


def caching_engine(**changes):
    """Four sequences and room for `num_snapshots` snapshots beside them."""
    slots = 1 + changes.get("max_num_seqs", 4) + changes.pop("num_snapshots", 8)
    return make_engine(**{"prefix_caching": True, "num_state_slots": slots, "num_blocks": 65, **changes})


def add(engine, prompt: Sequence[int] | np.ndarray, **fields) -> int:
    return engine.add(make_params(**{"max_tokens": 1, **fields}), np.asarray(prompt, np.int32))


def run(engine, prompt: Sequence[int] | np.ndarray, **fields) -> int:
    """Run one request; tokens that it found."""
    seq_id = add(engine, prompt, **fields)
    rows = sum(plan.num_prefill_tokens for plan in run_to_end(engine))
    found = engine.metrics(seq_id).num_cached_tokens
    assert rows == len(prompt) - found
    engine.release(seq_id)
    return found


def prompt_from(first: int, length: int) -> np.ndarray:
    """Prompts with different first numbers share no block."""
    return tokens_of(length, first)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_borders(blocks, off):
    """The last token is always computed; a state exists at the last border in front of it, and behind it."""
    length = blocks * SIZE + off
    engine = caching_engine()
    assert run(engine, tokens_of(length)) == 0
    border = (length - 1) // SIZE * SIZE
    for more in (0, 1, SIZE - 1, SIZE, SIZE + 1):
        engine.reset_prefix_cache()
        run(engine, tokens_of(length))
        ends_at_border = more > 0 and length % SIZE == 0
        assert run(engine, tokens_of(length + more)) == (length if ends_at_border else border)
    engine.reset_prefix_cache()
    run(engine, tokens_of(length))
    for shorter in range(1, length):
        engine.reset_prefix_cache()
        run(engine, tokens_of(length))
        assert run(engine, tokens_of(shorter)) == (border if border < shorter else 0)


def test_a_chunk_ends_where_a_state_is_kept():
    engine = caching_engine()
    add(engine, tokens_of(29))
    plan = step(engine)
    assert plan.seqlens_q.tolist() == [24] and plan.total_lens.tolist() == [24] and plan.num_samples == 0
    assert plan.state_copies.shape == (1, 2) and plan.slot_copies.shape == (0, 2)
    plan = step(engine)
    assert plan.seqlens_q.tolist() == [5] and plan.total_lens.tolist() == [29] and not plan.has_copies
    assert engine.prefix_cache_stats().num_snapshots == 1


def test_chunks_in_front_of_a_state_lead_up_to_it():
    """Rows that the state needs are not left out in an earlier chunk."""
    engine = caching_engine(max_num_batched_tokens=10)
    add(engine, tokens_of(29))
    plans = [step(engine) for _ in range(4)]
    assert [plan.seqlens_q.tolist() for plan in plans] == [[10], [10], [4], [5]]
    assert [plan.total_lens.tolist() for plan in plans] == [[24], [24], [24], [29]]


def test_states_at_an_interval():
    engine = caching_engine(prefix_state_interval=16)
    assert run(engine, tokens_of(45)) == 0
    assert engine.prefix_cache_stats().num_snapshots == 3, "16, 32 and 40"
    other = tokens_of(45)
    other[35] = 3
    assert run(engine, other) == 32


def test_a_state_is_kept_where_two_prompts_part():
    """The second prompt finds blocks without a state; the third one finds the state that the second left."""
    engine = caching_engine()
    prompts = [np.concatenate([tokens_of(29), tokens_of(20, first)]) for first in (2, 3, 4)]
    assert [run(engine, prompt) for prompt in prompts] == [0, 0, 24]


def test_outputs_are_found_as_far_as_a_state_reaches():
    engine = caching_engine()
    prompt = tokens_of(20)
    seq_id = add(engine, prompt, max_tokens=20)
    run_to_end(engine)
    whole = np.concatenate([prompt, engine.output_token_ids(seq_id)])
    assert run(engine, np.append(whole, 9)) >= 16
    assert run(engine, np.append(whole, 9)) == 40, "the path and its state are known now"


@pytest.mark.parametrize("bits", [128, 70, 6, 1])
@pytest.mark.parametrize("interval", [0, 8, 24])
def test_lookup_against_brute_force(seed, interval, bits):
    """Random trees of prompts, one after the other: what is found is the longest border with a state."""
    rng = random.Random(seed)
    engine = caching_engine(
        prefix_state_interval=interval, prefix_hash_bits=bits, num_snapshots=400, num_blocks=2000
    )
    paths, states = set(), set()
    num_found = 0
    for _ in range(120):
        length = rng.randint(1, 60)
        # few different blocks, so that prompts meet often
        prompt = [rng.choice((3, 9)) for _ in range(length // SIZE + 1) for _ in [0]]
        prompt = [token for token in prompt for _ in range(SIZE)][:length]
        salt = rng.choice((b"", b"", b"1"))
        keys = [(0, 1, salt)] if salt else []
        last = (length - 1) // SIZE * SIZE
        key = [(salt, *prompt[:end]) for end in range(0, last + 1, SIZE)]
        known = max(i for i in range(len(key)) if i == 0 or all(k in paths for k in key[1 : i + 1]))
        expected = max((i for i in range(known + 1) if key[i] in states), default=0) * SIZE
        found = run(engine, prompt, content_keys=keys)
        engine.check_integrity()
        if bits >= 64:
            assert found == expected, f"{prompt=} {salt=}"
        assert key[found // SIZE] in paths or found == 0, "a hash is no proof"
        num_found += found > 0
        at = found
        while at < last:
            stops = [last]
            if known * SIZE > at:
                stops.append(known * SIZE)
            if interval:
                stops.append((at // interval + 1) * interval)
            at = min(stops)
            states.add(key[at // SIZE])
        if length % SIZE == 0:
            states.add((salt, *prompt))
        paths.update((salt, *prompt[:end]) for end in range(SIZE, length + 1, SIZE))
    assert num_found > (30 if bits >= 64 else 0)


def test_least_recently_used_snapshot_goes_first():
    engine = caching_engine(num_snapshots=2, max_num_seqs=1)  # and the slot that nobody runs in
    prompts = [prompt_from(first, 17) for first in (2, 3, 4, 5)]
    for prompt in prompts[:3]:
        assert run(engine, prompt) == 0
    stats = engine.prefix_cache_stats()
    assert (stats.num_snapshots, stats.num_evicted_snapshots) == (2, 1), "one ran while two were kept"
    assert run(engine, prompts[1]) == 16, "used: the third is the oldest now"
    assert run(engine, prompts[3]) == 0
    assert run(engine, prompts[1]) == 16
    assert run(engine, prompts[2]) == 0


def test_least_recently_used_blocks_go_first():
    engine = caching_engine(num_blocks=10, admission_headroom_tokens=0)
    a, b, c = (prompt_from(first, 25) for first in (2, 3, 4))  # 3 full blocks each, 4 while it runs
    assert [run(engine, prompt) for prompt in (a, b)] == [0, 0]
    assert engine.prefix_cache_stats().num_blocks == 6
    assert run(engine, a) == 24
    assert run(engine, c) == 0
    stats = engine.prefix_cache_stats()
    assert stats.num_evicted_blocks == 1 and stats.num_blocks == 8, "the end of the longest unused path"
    assert run(engine, a) == 24
    assert run(engine, c) == 24
    assert run(engine, b) == 0, "its blocks are known up to 16, its state was at 24"


def test_what_runs_is_never_evicted():
    """A running sequence shares cached blocks; a flood of others takes all that is free."""
    engine = caching_engine(num_blocks=20, max_num_seqs=4, max_model_len=128)
    prompt = tokens_of(33)
    run(engine, prompt)
    holder = add(engine, prompt, max_tokens=80)
    step(engine)
    table = engine.block_table(holder)[:4]
    assert engine.metrics(holder).num_cached_tokens == 32
    for first in range(3, 20):
        add(engine, prompt_from(first, 30))
        while engine.num_waiting:
            step(engine)
        assert np.array_equal(engine.block_table(holder)[:4], table)
    assert engine.prefix_cache_stats().num_evicted_blocks > 20 and engine.num_preemptions == 0
    run_to_end(engine)


def test_found_blocks_need_no_room():
    """A prompt that would not fit beside a running one fits with what it shares."""
    engine = caching_engine(num_blocks=12)
    long, tail = tokens_of(60), tokens_of(8, 5)
    first = add(engine, long, max_tokens=3)
    step(engine), step(engine)
    assert engine.num_free_blocks == 3
    second = add(engine, np.concatenate([long[:56], tail[:4]]), max_tokens=1)
    plan = engine.schedule(PREFILL)
    assert plan.seq_ids.tolist() == [second] and plan.seqlens_q.tolist() == [4]
    assert engine.block_table(second)[:7].tolist() == engine.block_table(first)[:7].tolist()
    commit_token(engine, plan)
    run_to_end(engine)


def test_reset():
    engine = caching_engine(async_scheduling=True)
    prompt = tokens_of(20)
    run(engine, prompt)
    assert run(engine, prompt) == 16
    waiting = add(engine, prompt)
    assert not engine.reset_prefix_cache()
    plan = engine.schedule()
    engine.abort(waiting)
    assert not engine.reset_prefix_cache(), "a step is in flight"
    commit_token(engine, plan)
    assert run(engine, prompt) == 16, "nothing was forgotten"
    assert engine.reset_prefix_cache()
    engine.check_integrity()
    stats = engine.prefix_cache_stats()
    assert (stats.num_blocks, stats.num_snapshots) == (0, 0)
    assert run(engine, prompt) == 0
    assert run(engine, prompt) == 16


def test_a_discarded_step_publishes_nothing():
    engine = caching_engine()
    prompt = tokens_of(20)
    seq_id = add(engine, prompt)
    plan = engine.schedule()
    assert len(plan.state_copies) == 1
    engine.discard_in_flight()
    engine.check_integrity()
    assert engine.prefix_cache_stats().num_blocks == 0 and engine.prefix_cache_stats().num_snapshots == 0
    rows = sum(plan.num_rows for plan in run_to_end(engine))
    assert rows == 20 and engine.metrics(seq_id).num_cached_tokens == 0
    assert run(engine, prompt) == 16


def test_numbers_gone_wrong_are_not_kept():
    """A row with NaN logits: nobody resumes from what its sequence has computed."""
    engine = caching_engine()
    prompt = tokens_of(40)
    run(engine, prompt[:20])
    add(engine, prompt)
    step(engine)
    plan = engine.schedule()
    assert plan.num_samples == 1
    commit_token(engine, plan, faults=np.array([core.ErrorKind.NUMERICS], np.uint8))
    assert engine.prefix_cache_stats().num_blocks == 0
    assert run(engine, prompt) == 0


def test_scored_prompts_are_computed():
    engine = caching_engine()
    prompt = tokens_of(30)
    run(engine, prompt)
    assert run(engine, prompt, num_prompt_logprobs=0) == 0


def test_off_does_nothing():
    engine = make_engine()
    for _ in range(2):
        assert run(engine, tokens_of(30)) == 0
    stats = engine.prefix_cache_stats()
    assert (stats.num_queries, stats.num_blocks, stats.num_forks) == (2, 0, 0)
    ids = [add(engine, tokens_of(30)) for _ in range(2)]
    assert step(engine).seq_ids.tolist() == ids


@pytest.mark.parametrize("num_snapshots", [0, 2, 20])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_outputs_do_not_depend_on_hits(seed, num_drafts, is_async, num_snapshots):
    """Hits, forks, evictions, preemptions, aborts, discarded steps on a device that reads all of it back."""
    rng = random.Random(seed)
    config = make_config(
        max_num_seqs=6,
        max_num_batched_tokens=max(30, 6 * (1 + num_drafts)),
        max_model_len=MODEL_LEN,
        num_blocks=24,
        num_state_slots=7 + num_snapshots,
        num_draft_tokens=num_drafts,
        async_scheduling=is_async,
        prefix_caching=True,
        prefix_state_interval=rng.choice([0, 16]),
        prefix_hash_bits=rng.choice([128, 8]),
    )
    loop = Loop(config)
    traffic = Traffic(rng, loop, related_requests(rng, 120), preempted=0.05)
    num_discarded = 0
    for number in traffic.steps():
        if rng.random() < 0.02:
            plan = loop.engine.schedule()
            if plan is not None:
                loop.device.forward(plan)
            num_discarded += loop.engine.discard_in_flight()
            loop.in_flight = None
        loop.step(tell_emitted=bool(number % 2))
        loop.engine.check_integrity()
    check_outputs(loop, traffic.ids)
    stats = loop.engine.prefix_cache_stats()
    assert stats.num_forks > 1 and stats.num_evicted_blocks > 10 and num_discarded > 0
    assert stats.num_hits > 5 or num_snapshots == 0


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("name", ["slot_copies", "state_copies", "block_copies"])
def test_fake_device_notices_wrong_copies(seed, name, is_missing, monkeypatch):
    """The oracle can fail: copies from a wrong place, or left out, trip a check or change an output."""
    config = make_config(prefix_caching=True, num_state_slots=16, max_model_len=MODEL_LEN, num_draft_tokens=2)
    real = FakeDevice.copies

    def broken(self, plan, which):
        copies = real(self, plan, which).copy()
        if which != name:
            return copies
        copies[:, 0] = (copies[:, 0] + 1) % 7  # another slot or block
        return copies[:0] if is_missing else copies

    def trace():
        loop = Loop(config)
        ids = {loop.add(r.seed, r.prompt, **r.fields): r for r in related_requests(random.Random(seed), 60)}
        loop.run()
        check_outputs(loop, ids)

    trace()
    monkeypatch.setattr(FakeDevice, "copies", broken)
    with pytest.raises(AssertionError):
        trace()


def test_content_keys_are_part_of_what_is_shared():
    """A key separates the blocks that it touches and all behind them, and shares with equal keys in place."""
    engine = caching_engine(prefix_state_interval=SIZE, num_snapshots=40)
    prompt = tokens_of(41)
    assert run(engine, prompt) == 0
    picture = (10, 9, b"pixels")  # in the blocks of tokens 8..15 and 16..23
    assert run(engine, prompt, content_keys=[picture]) == 8
    assert run(engine, prompt, content_keys=[picture]) == 40
    for other in ((10, 9, b"pixel!"), (10, 8, b"pixels"), (11, 9, b"pixels"), (10, 9, b"pixels\0")):
        assert run(engine, prompt, content_keys=[other]) == 8, other
    assert run(engine, prompt, content_keys=[(24, 1, b"late")]) == 24
    assert run(engine, prompt, content_keys=[picture, (24, 1, b"late")]) == 24
    assert run(engine, prompt, content_keys=[picture, (24, 1, b"late")]) == 40
    assert run(engine, prompt) == 40
    ids = [add(engine, tokens_of(20, 9), content_keys=keys) for keys in ([], [picture], [picture])]
    run_to_end(engine)
    assert [engine.metrics(seq_id).num_cached_tokens for seq_id in ids] == [0, 8, 19]


@pytest.mark.parametrize("key", [(-1, 1, b"a"), (0, 0, b"a"), (0, 10, b"a"), (9, 1, b"a"), (0, 1, b"")])
def test_content_keys_that_mean_nothing(key):
    with pytest.raises(ValueError, match="content key"):
        add(caching_engine(), tokens_of(9), content_keys=[key])


@pytest.mark.parametrize("is_async", [False, True])
def test_borders_passed_while_decoding(is_async):
    """A step with drafts may pass a border with any of its rows; the newest border's state stays."""
    engine = caching_engine(num_draft_tokens=3, async_scheduling=is_async)
    for length in range(10, 17):
        for emitted in (1, 2, 3, 4):
            engine.reset_prefix_cache()
            seq_id = add(engine, tokens_of(length), max_tokens=18)
            drafts = np.array([[5, 6, 8]], np.int32)
            plans = []
            while engine.has_unfinished or plans:
                if len(plans) < 1 + is_async and (plan := engine.schedule()) is not None:
                    plans.append(plan)
                    if is_async:
                        continue
                plan = plans.pop(0)
                count = np.array([min(emitted, max(1, n)) for n in plan.num_sampled_rows], np.int32)
                commit_token(engine, plan, num_emitted=count, drafts=drafts)
            whole = np.concatenate([tokens_of(length), engine.output_token_ids(seq_id)])
            border = (len(whole) - 1) // SIZE * SIZE
            stats = engine.prefix_cache_stats()
            prompt_states = (length > SIZE) + (length % SIZE == 0)
            assert stats.num_snapshots == prompt_states + 1, "of all that were passed"
            assert run(engine, np.append(whole, 9)) == border > length
            engine.release(seq_id)


def test_a_common_beginning_is_computed_once():
    engine = caching_engine(max_num_batched_tokens=64)
    common = tokens_of(29)
    prompts = [np.concatenate([common, tokens_of(tail, first)]) for tail, first in ((9, 3), (20, 4), (3, 5))]
    ids = [add(engine, prompt, max_tokens=2) for prompt in prompts]
    plan = step(engine)
    assert plan.seq_ids.tolist() == ids[:1] and plan.seqlens_q.tolist() == [24]
    plan = step(engine)
    assert plan.seq_ids.tolist() == ids and plan.seqlens_k.tolist() == [32, 48, 32]
    run_to_end(engine)
    assert [engine.metrics(seq_id).num_cached_tokens for seq_id in ids] == [0, 24, 24]


def test_those_who_wait_do_not_wait_for_ever():
    """The leader goes, or its state finds no slot: the others compute for themselves."""
    for is_aborted in (False, True):
        engine = caching_engine(num_snapshots=0, max_num_seqs=2, max_num_batched_tokens=20)
        ids = [add(engine, np.append(tokens_of(29), [tail] * 5), max_tokens=3) for tail in (3, 4)]
        assert step(engine).seq_ids.tolist() == ids[:1]
        if is_aborted:
            engine.abort(ids[0])
        run_to_end(engine)
        assert engine.num_output_tokens(ids[1]) == 3
