"""Sequences that leave a core behind their first token, and enter another one without a prefill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.harness import EOS, VOCAB, commit_token, core, make_engine, make_params, step, tokens_of
from tests.core.test_random_traces import Trace

OPERATIONS_PER_TRACE = 15_000


def prompt_engine(**changes: Any) -> Any:
    return make_engine(role=core.Role.PROMPT, **changes)


def completion_engine(**changes: Any) -> Any:
    return make_engine(role=core.Role.COMPLETION, **changes)


def take_over(engine: Any, length: int, num_outputs: int = 1, **options: Any) -> int:
    """Adds a sequence of `length` prompt tokens that another engine has begun."""
    params = make_params(**options.pop("params", {}))
    return engine.add_computed(params, tokens_of(length + num_outputs), length, **options)


@pytest.mark.parametrize("use_async", [False, True])
def test_a_prompt_engine_never_decodes(use_async):
    engine = prompt_engine(async_scheduling=use_async, num_draft_tokens=2)
    seq_id = engine.add(make_params(), tokens_of(20))
    plan = engine.schedule()
    assert engine.schedule() is None if use_async else True
    result = commit_token(
        engine,
        plan,
        drafts=np.array([[3, 4]], np.int32),
        confidences=np.array([[0.5, 0.25]], np.float32),
    )
    assert result.finished_ids.tolist() == [seq_id]
    assert engine.finish_reason(seq_id) == core.FinishReason.HAND_OFF
    assert engine.drafts(seq_id).tolist() == [3, 4] and engine.confidences(seq_id).tolist() == [0.5, 0.25]
    assert engine.num_computed_tokens(seq_id) == 20 and engine.output_token_ids(seq_id).tolist() == [7]
    # It keeps what it has until it is released; nothing of it is to be scheduled.
    assert len(engine.block_table(seq_id)) == 3 and engine.state_slot(seq_id) != 0
    assert engine.num_free_blocks == 29 and not engine.has_unfinished and engine.schedule() is None
    assert engine.discard_in_flight() == 0 and not engine.abort(seq_id) and not engine.preempt(seq_id)
    engine.check_integrity()
    engine.release(seq_id)
    engine.check_integrity()
    assert engine.num_free_blocks == 32 and engine.num_free_slots == 6


def test_a_first_token_that_ends():
    """Nothing is left to hand off."""
    engine = prompt_engine()
    ends = engine.add(make_params(max_tokens=1), tokens_of(9))
    stops = engine.add(make_params(eos_token_id=7), tokens_of(9))
    goes_on = engine.add(make_params(), tokens_of(9))
    step(engine)
    reasons = [engine.finish_reason(seq_id) for seq_id in (ends, stops, goes_on)]
    assert reasons == [core.FinishReason.LENGTH, core.FinishReason.STOP, core.FinishReason.HAND_OFF]
    assert engine.num_free_blocks == 30
    engine.stop(goes_on, 1)  # a stop string was found in its first token
    assert engine.finish_reason(goes_on) == core.FinishReason.STOP
    engine.release(goes_on)
    engine.check_integrity()
    assert engine.num_free_blocks == 32


@pytest.mark.parametrize("use_async", [False, True])
def test_preempted_and_discarded_prompts(use_async):
    engine = prompt_engine(async_scheduling=use_async)
    seq_id = engine.add(make_params(), tokens_of(20))
    plan = engine.schedule()
    engine.preempt(seq_id)
    commit_token(engine, plan)  # the token counts, the caches are gone
    assert engine.status(seq_id) == core.SequenceStatus.WAITING
    engine.schedule()
    assert engine.discard_in_flight() == 1
    step(engine, token=8)
    assert engine.finish_reason(seq_id) == core.FinishReason.HAND_OFF
    assert engine.output_token_ids(seq_id).tolist() == [7, 8]
    assert engine.num_computed_tokens(seq_id) == 21


def test_a_computed_sequence_runs_without_prefill():
    engine = completion_engine(num_draft_tokens=3)
    seq_id = take_over(
        engine,
        16,
        2,
        params={"num_logprobs": 1, "presence": 0.5, "num_prompt_logprobs": 0},
        drafts=np.array([5, 6], np.int32),
        confidences=np.array([0.9, 0.8], np.float32),
        logprobs=(
            np.array([-1.0, -2.0], np.float32),
            np.array([1, 2], np.int32),
            np.array([[4], [5]], np.int32),
            np.array([[-0.5], [-0.6]], np.float32),
        ),
        prompt_logprobs=(
            np.zeros(15, np.float32),
            np.ones(15, np.int32),
            np.zeros((15, 0), np.int32),
            np.zeros((15, 0), np.float32),
        ),
        first_token=3.5,
        num_drafted=2,
    )
    assert engine.schedule() is None  # nobody has given it room
    assert engine.take_arrivals() == []
    ((admitted, blocks, slot),) = engine.admit_computed()
    engine.check_integrity()
    assert admitted == seq_id and len(blocks) == 3 and slot == engine.state_slot(seq_id) != 0
    assert blocks.tolist() == engine.block_table(seq_id).tolist()
    assert engine.admit_computed() == []
    plan = engine.schedule()
    assert not plan.is_prefill and plan.num_rows == 3 and plan.seqlens_k.tolist() == [20]
    commit_token(engine, plan, 5)
    assert engine.output_token_ids(seq_id).tolist()[2:] == [5, 5]
    assert engine.logprobs(seq_id).tolist() == [-1.0, -2.0, 0.0, 0.0]
    assert len(engine.prompt_logprobs(seq_id)) == 15
    metrics = engine.metrics(seq_id)
    assert metrics.first_token == 3.5 and metrics.num_drafted == 2 and metrics.num_accepted == 1


def test_room_is_given_by_the_rules_of_admission():
    engine = completion_engine(num_blocks=12, max_num_seqs=3, admission_headroom_tokens=8)
    ids = [take_over(engine, length, params={"max_tokens": 30}) for length in (20, 55, 8, 8)]
    # 3 + 1 of 11 blocks; 7 + 1 more do not fit, 1 + 2 and 1 + 2 do.
    assert [seq_id for seq_id, _, _ in engine.admit_computed()] == [ids[0], ids[2], ids[3]]
    engine.check_integrity()
    for seq_id in ids[2:]:
        engine.abort(seq_id)
    engine.abort(ids[1])
    assert engine.admit_computed() == [] and engine.num_running == 1


def test_overtaking_is_bounded():
    engine = completion_engine(num_blocks=9, max_num_seqs=8, num_state_slots=10, max_overtakes=3)
    take_over(engine, 8)
    engine.admit_computed()
    large = take_over(engine, 60, params={"max_tokens": 2})
    for num_admitted in (3, 0):
        for _ in range(3):
            take_over(engine, 2)
        assert len(engine.admit_computed()) == num_admitted
    while engine.num_running:
        step(engine)
    assert [seq_id for seq_id, _, _ in engine.admit_computed()] == [large]


def test_an_interrupted_load_is_recomputed():
    """Between admission and the next plan nobody can tell whether the bytes have arrived."""
    engine = completion_engine(async_scheduling=True)
    seq_id = take_over(engine, 16)
    engine.admit_computed()
    assert engine.discard_in_flight() == 0
    engine.check_integrity()
    assert engine.status(seq_id) == core.SequenceStatus.WAITING and engine.admit_computed() == []
    assert step(engine).is_prefill
    other = take_over(engine, 16)
    engine.admit_computed()
    engine.schedule()
    assert engine.discard_in_flight() == 1  # it was in the plan
    assert engine.status(other) == core.SequenceStatus.WAITING
    assert step(engine).is_prefill


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_is_proved_by_the_commit_behind_it(is_async):
    """Its copies are in front of the next plan, also if that is one of others."""
    engine = completion_engine(async_scheduling=is_async)
    seq_id = take_over(engine, 16)
    engine.add(make_params(max_tokens=1), tokens_of(5))
    before = engine.schedule(core.StepKind.PREFILL) if is_async else None
    engine.admit_computed()
    engine.add(make_params(max_tokens=1), tokens_of(9))
    plan = engine.schedule(core.StepKind.PREFILL)
    assert seq_id not in plan.seq_ids
    if before is not None:
        commit_token(engine, before)
    assert engine.discard_in_flight() == 1
    engine.check_integrity()
    assert engine.status(seq_id) == core.SequenceStatus.WAITING and engine.admit_computed() == []
    other = take_over(engine, 16)
    engine.admit_computed()
    commit_token(engine, engine.schedule(core.StepKind.PREFILL))
    assert engine.discard_in_flight() == 0 and engine.status(other) == core.SequenceStatus.RUNNING


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (8, {"num_outputs": 0}, "a prompt and an output are needed"),
        (8, {"num_outputs": 8}, "nothing is left"),
        (63, {}, "nothing is left"),
        (8, {"drafts": np.array([1], np.int32)}, "num_draft_tokens is 0"),
        (8, {"params": {"num_logprobs": 0}}, "logprobs has 0 elements instead of 1"),
        (8, {"params": {"num_prompt_logprobs": 0}}, "prompt_logprobs has 0 elements instead of 7"),
    ],
)
def test_what_is_refused(length, options, message):
    engine = completion_engine()
    with pytest.raises(ValueError, match=message):
        take_over(engine, length, **options)
    with pytest.raises(ValueError, match="outputs hold 64"):
        engine.add_computed(make_params(), np.array([1, VOCAB], np.int32), 1)
    assert not engine.has_unfinished


class RoleTrace(Trace):
    """Half of the requests of a COMPLETION engine were begun elsewhere; others stand for preempted ones."""

    def add(self) -> None:
        rng, k = self.rng, self.config.num_draft_tokens
        if self.config.role != core.Role.COMPLETION or rng.random() < 0.3:
            super().add()
            return
        length = rng.randint(2, self.config.max_model_len - 3)
        params = core.SequenceParams(
            max_tokens=rng.choice([5, 40, -1]), eos_token_id=EOS, presence=rng.choice([0.0, 0.5])
        )
        tokens = self.related(self.random.integers(0, VOCAB, length, np.int32))
        num_drafts = rng.randint(0, k)
        drafts = self.random.integers(0, VOCAB, num_drafts, np.int32)
        confidences = self.random.random(num_drafts, np.float32)
        if 1 < len(tokens) < self.config.max_model_len - 2:
            num_prompt = len(tokens) - rng.randint(1, min(3, len(tokens) - 1))
            self.live.append(self.engine.add_computed(params, tokens, num_prompt, drafts, confidences))
            self.counts["taken over"] += 1

    def schedule(self) -> None:
        if len(self.plans) > self.config.async_scheduling:
            self.commit()
        if self.config.role == core.Role.PROMPT:
            self.sweep()  # what is held gives room
        admitted = self.engine.admit_computed()
        self.counts["loaded"] += len(admitted)
        if admitted and self.rng.random() < 0.05:
            self.counts["discard"] += self.engine.discard_in_flight()
            self.plans.clear()
            return
        super().schedule()

    def sweep(self) -> None:
        for seq_id in self.live:
            self.counts["handed off"] += self.engine.finish_reason(seq_id) == core.FinishReason.HAND_OFF
        super().sweep()


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("role", [core.Role.PROMPT, core.Role.COMPLETION])
def test_random_traces(seed, role, prefix_caching, use_async):
    trace = RoleTrace(
        seed,
        role=role,
        num_draft_tokens=3,
        async_scheduling=use_async,
        num_blocks=16,
        max_num_seqs=8,
        num_state_slots=11,
        prefix_caching=prefix_caching,
    )
    trace.run(OPERATIONS_PER_TRACE)
    counts = trace.counts
    assert counts["discard"] > 0 and counts["abort"] > 20 and counts["preempt"] > 20, counts
    if role == core.Role.PROMPT:
        assert counts["handed off"] > 100 and counts["decode"] == 0, counts
    else:
        assert counts["loaded"] > 100 and counts["decode"] > 500, counts
        assert trace.engine.num_preemptions > counts["preempt"], counts
