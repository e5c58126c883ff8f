"""Equalities of the whole: whatever is scheduled how, the outputs are those of one sequence alone.

The fake device reads every prefix back through block tables and state slots, so these tests cover builders,
pools, in-flight accounting and commit together.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.core.fake_device import Loop, reference_outputs
from tests.core.harness import EOS, VOCAB, core, make_config

MODEL_LEN = 96


@dataclass(frozen=True)
class Request:
    seed: int
    prompt: np.ndarray
    fields: dict


def make_requests(rng: random.Random, count: int) -> list[Request]:
    requests = []
    for index in range(count):
        length = rng.choice([1, 2, 7, 8, 9, rng.randint(1, 60)])
        prompt = np.array([rng.randrange(VOCAB) for _ in range(length)], np.int32)
        fields = {
            "max_tokens": rng.choice([-1, 1, 2, rng.randint(1, 30)]),
            "ignore_eos": rng.random() < 0.5,
            "min_tokens": rng.choice([0, 0, 3]),
            "stop_token_ids": rng.choice([[], [5, 9]]),
            "golden_token_ids": rng.choice([[], [], [-1, 4, 4, -1, 8]]),
            "num_logprobs": rng.choice([-1, 0, 2]),
            "num_prompt_logprobs": rng.choice([-1, -1, 0, 1]),
            "presence": rng.choice([0.0, 1.0]),
        }
        requests.append(Request(1000 + index, prompt, fields))
    return requests


def expected(request: Request) -> list[int]:
    params = core.SequenceParams(**{"eos_token_id": EOS, **request.fields})
    return reference_outputs(request.seed, request.prompt, params, MODEL_LEN)


def check_outputs(loop: Loop, ids: dict[int, Request]) -> None:
    engine = loop.engine
    for seq_id, request in ids.items():
        outputs = engine.output_token_ids(seq_id).tolist()
        assert outputs == expected(request), f"{seq_id=} {request.fields=}"
        reason = engine.finish_reason(seq_id)
        assert loop.finished[seq_id] == int(reason)
        if request.fields["num_logprobs"] >= 0:
            prefix = request.prompt.tolist()
            for token, value in zip(outputs, engine.logprobs(seq_id)):
                assert value == -float(zlib.crc32(np.array(prefix, np.int32).tobytes()) % 1000)
                prefix.append(token)
            assert engine.top_logprobs(seq_id)[0].shape == (len(outputs), request.fields["num_logprobs"])
        if request.fields["num_prompt_logprobs"] >= 0:
            values = engine.prompt_logprobs(seq_id)
            assert len(values) == len(request.prompt) - 1
            for i, value in enumerate(values):
                assert value == -float(zlib.crc32(request.prompt[: i + 1].tobytes()) % 1000), f"{i=}"
    assert engine.num_free_blocks == loop.config.num_blocks - 1
    assert engine.num_free_slots == loop.config.num_state_slots - 1


@pytest.mark.parametrize("num_blocks", [13, 40])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_outputs_do_not_depend_on_schedule(seed, num_drafts, is_async, num_blocks):
    rng = random.Random(seed)
    vocab = np.array([rng.randrange(1000) for _ in range(VOCAB)], np.int32)
    config = make_config(
        max_num_seqs=6,
        max_num_batched_tokens=max(30, 6 * (1 + num_drafts)),
        max_model_len=MODEL_LEN,
        num_blocks=num_blocks,
        num_state_slots=9,
        num_draft_tokens=num_drafts,
        async_scheduling=is_async,
        max_prefill_tflops=1.0,
        attention_terms=[(3e7, 1, 0, 1000)],
    )
    loop = Loop(config, vocab=vocab, pad=7)
    requests = make_requests(rng, 60)
    ids = {loop.add(r.seed, r.prompt, **r.fields): r for r in requests}
    step = 0
    while loop.step(tell_emitted=bool(step % 2)):
        step += 1
        holders = [i for i in ids if loop.engine.state_slot(i)]
        if holders and rng.random() < 0.05:
            loop.engine.preempt(rng.choice(holders))
        loop.engine.check_integrity()
        assert step < 20_000
    assert not loop.engine.has_unfinished
    check_outputs(loop, ids)
    assert loop.engine.num_preemptions > 0
    if num_drafts:
        assert loop.device.num_accepted > 0 and loop.device.num_rejected > 0
    if is_async:
        assert loop.num_overlapped > 0 and loop.device.num_matched > 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 8, 9, 64])
def test_chunked_equals_whole(seed, budget, is_async):
    config = make_config(
        max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=MODEL_LEN, async_scheduling=is_async
    )
    loop = Loop(config)
    requests = make_requests(random.Random(seed), 8)
    ids = {loop.add(r.seed, r.prompt, **r.fields): r for r in requests}
    loop.run()
    check_outputs(loop, ids)


@pytest.mark.parametrize("is_async", [False, True])
def test_aborts_leave_others_alone(seed, is_async):
    """Aborts from every queue, in every state of flight: survivors are unharmed and nothing leaks."""
    rng = random.Random(seed)
    config = make_config(
        max_num_seqs=5,
        max_num_batched_tokens=20,
        max_model_len=MODEL_LEN,
        num_blocks=14,
        num_draft_tokens=3,
        async_scheduling=is_async,
    )
    loop = Loop(config)
    ids = {loop.add(r.seed, r.prompt, **r.fields): r for r in make_requests(rng, 80)}

    def disturb() -> None:
        victim = rng.choice(list(ids))
        if rng.random() < 0.1 and loop.engine.abort(victim):
            assert loop.engine.finish_reason(victim) == core.FinishReason.ABORT
            del ids[victim]
        if rng.random() < 0.1:
            loop.engine.preempt(rng.choice(list(ids)))
        loop.engine.check_integrity()

    loop.on_scheduled = disturb
    while loop.step():
        disturb()
    assert 0 < len(ids) < 70 and loop.engine.num_preemptions > 0
    check_outputs(loop, ids)


@pytest.mark.parametrize("is_async", [False, True])
def test_discarded_steps_are_recomputed(seed, is_async):
    """A forward that failed or was interrupted leaves no trace in the outputs."""
    rng = random.Random(seed)
    config = make_config(
        max_num_batched_tokens=20, max_model_len=MODEL_LEN, num_draft_tokens=2, async_scheduling=is_async
    )
    loop = Loop(config)
    ids = {loop.add(r.seed, r.prompt, **r.fields): r for r in make_requests(rng, 20)}
    num_discarded = 0
    while True:
        if rng.random() < 0.1:
            plan = loop.engine.schedule()
            if plan is not None:
                loop.device.forward(plan)
            if rng.random() < 0.3:
                loop.engine.abort(rng.choice(list(ids)))
            num_discarded += loop.engine.discard_in_flight()
            loop.engine.check_integrity()
            loop.in_flight = None
        if not loop.step():
            break
    assert num_discarded > 5
    survivors = {i: r for i, r in ids.items() if loop.engine.finish_reason(i) != core.FinishReason.ABORT}
    assert len(survivors) > 5
    check_outputs(loop, survivors)


@pytest.mark.parametrize("wrong", ["slot", "table", "window", "position"])
def test_fake_device_notices_faults(wrong, monkeypatch):
    """The oracle can fail: one stale value in the inputs changes an output or trips a check."""
    from tests.core import fake_device

    real = fake_device.batch_inputs

    def broken(engine, plan):
        arrays = real(engine, plan)
        if not plan.is_prefill:
            if wrong == "slot":
                arrays["state_slots"][:] = np.roll(arrays["state_slots"], 1)
            elif wrong == "table":
                arrays["block_tables"][:] = np.roll(arrays["block_tables"], 1, axis=0)
            elif wrong == "window":
                arrays["ngram_ids"][:, 1] = 0
            else:
                arrays["positions"][:] -= 1
        return arrays

    monkeypatch.setattr(fake_device, "batch_inputs", broken)
    loop = Loop(make_config(max_model_len=MODEL_LEN))
    requests = [replace(r, fields={"max_tokens": 12}) for r in make_requests(random.Random(3), 4)]
    ids = {loop.add(r.seed, r.prompt, **r.fields): r for r in requests}

    def trace():
        loop.run()
        assert all(loop.engine.output_token_ids(i).tolist() == expected(r) for i, r in ids.items())

    with pytest.raises(AssertionError):
        trace()
