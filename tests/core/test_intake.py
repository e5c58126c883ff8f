"""What the core refuses at the door, and how it says so."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.harness import VOCAB, core, make_config, make_engine, make_params, run_to_end, tokens_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"num_blocks": 1}, "block 0 is reserved"),
        ({"num_state_slots": 1}, "slot 0 is reserved"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3 is too small: it must be >= 4"),
        ({"max_num_batched_tokens": 15, "num_draft_tokens": 3}, "must be >= 16"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 63}, "must be >= 64"),
        ({"max_sum_seqlen_k": 63}, "max_sum_seqlen_k=63"),
        ({"max_prefill_tflops": -1.0}, "max_prefill_tflops=-1"),
        ({"max_prefill_tflops": 1.0}, "max_prefill_tflops needs attention_terms"),
        ({"prefill_attempt_interval": 0}, "prefill_attempt_interval=0"),
        ({"num_draft_tokens": core.MAX_DRAFTS + 1, "max_num_batched_tokens": 500}, "num_draft_tokens=17"),
        ({"image_token_begin": 9, "image_token_end": 8}, "image token range"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**changes)


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="CoreConfig has no field 'max_seqs'"):
        core.CoreConfig(max_seqs=3)
    with pytest.raises(TypeError, match="SequenceParams has no field 'temperature'"):
        core.SequenceParams(temperature=1.0)
    with pytest.raises(TypeError):
        core.SequenceParams(max_tokens="many")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array([], np.int32), "the prompt is empty"),
        (np.array([3, -1], np.int32), "prompt token 1 is -1; ids must be in 0..63"),
        (np.array([VOCAB], np.int32), "prompt token 0 is 64"),
        (
            tokens_of(64),
            "has 64 tokens and one must be generated, max_model_len is 64; at most 63 would work",
        ),
        (np.array([3], np.int64), "prompt must be a C-contiguous numpy array of int32"),
        (np.array([[3]], np.int32), "prompt must have 1 dimension"),
        ([3, 4], "prompt must be a C-contiguous numpy array of int32"),
        (tokens_of(9)[::2], "C-contiguous"),
    ],
)
def test_prompts_are_checked(prompt, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add(make_params(), prompt)
    assert engine.num_waiting == 0 and engine.schedule() is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": -2}, "max_tokens=-2"),
        ({"bias_tokens": [1, 2], "bias_values": [0.5]}, "bias_tokens has 2 elements, bias_values 1"),
        ({"num_logprobs": -2}, "num_logprobs=-2"),
    ],
)
def test_parameters_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        make_engine().add(make_params(**fields), tokens_of(3))


def test_what_can_never_fit_is_refused_with_numbers_that_work():
    engine = make_engine(num_blocks=5, max_model_len=64)  # 32 tokens with KV, a 33rd is never read
    with pytest.raises(
        ValueError,
        match=r"prompt of 20 tokens with up to 14 outputs needs 5 blocks of 8 tokens, the pool has 4; "
        r"max_tokens <= 13 or num_blocks >= 6 would work",
    ):
        engine.add(make_params(max_tokens=14), tokens_of(20))
    seq_id = engine.add(make_params(max_tokens=13), tokens_of(20))
    run_to_end(engine)
    assert engine.num_output_tokens(seq_id) == 13
    with pytest.raises(ValueError, match="a prompt of at most 32 tokens"):
        engine.add(make_params(max_tokens=1), tokens_of(33))
    with pytest.raises(ValueError, match=r"max_tokens <= 13"):
        engine.add(make_params(max_tokens=-1), tokens_of(20))
    bigger = make_engine(num_blocks=6, max_model_len=64)
    bigger.add(make_params(max_tokens=14), tokens_of(20))
    run_to_end(bigger)


def test_image_tokens_lie_outside_the_vocabulary():
    config = {"image_token_begin": VOCAB, "image_token_end": VOCAB + 2}
    engine = make_engine(**config)
    engine.add(make_params(), np.array([3, VOCAB, VOCAB + 1, 4], np.int32))
    with pytest.raises(ValueError, match=f"is {VOCAB + 2}"):
        engine.add(make_params(), np.array([VOCAB + 2], np.int32))
    run_to_end(engine)


def test_compressed_vocab_must_cover_the_vocabulary():
    engine = make_engine()
    with pytest.raises(ValueError, match="maps 3 ids"):
        engine.set_compressed_vocab(np.arange(3, dtype=np.int32), 0)
    engine.set_compressed_vocab(np.arange(VOCAB, dtype=np.int32), 0)


def test_ids_are_never_reused_and_unknown_ones_raise():
    engine = make_engine()
    ids = [engine.add(make_params(max_tokens=1), tokens_of(3)) for _ in range(3)]
    assert ids == [1, 2, 3]
    run_to_end(engine)
    for seq_id in ids:
        engine.release(seq_id)
    assert engine.add(make_params(), tokens_of(3)) == 4
    for call in (engine.abort, engine.release, engine.status, engine.preempt, engine.logprobs):
        with pytest.raises(KeyError, match="no sequence has id 2"):
            call(2)


def test_two_engines_share_nothing():
    first, second = make_engine(), make_engine(num_blocks=20)
    a, b = first.add(make_params(), tokens_of(9)), second.add(make_params(), tokens_of(5))
    plan_a, plan_b = first.schedule(), second.schedule()
    with pytest.raises(RuntimeError, match="another engine"):
        first.commit(plan_b, np.zeros(1, np.int32))
    second.commit(plan_b, np.full(1, 5, np.int32))
    first.commit(plan_a, np.full(1, 6, np.int32))
    assert first.output_token_ids(a).tolist() == [6] and second.output_token_ids(b).tolist() == [5]
    assert first.num_free_blocks == 30 and second.num_free_blocks == 18
    assert make_config().num_blocks == 33
