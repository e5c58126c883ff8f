"""Every array of the two input buffers against plain Python, over random traces."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.core.harness import (
    EOS,
    VOCAB,
    commit_token,
    core,
    inputs,
    make_config,
    make_engine,
    make_params,
    tokens_of,
)

KEEP = 13  # prompt tokens of bounded replay
IMAGE = VOCAB  # ids VOCAB and VOCAB + 1 are image tokens


def window(tokens: list[int], position: int, width: int, vocab: np.ndarray, pad: int) -> list[int]:
    """The definition: going back from `position`, pad from the first missing or image token on."""
    blocked, out = False, []
    for back in range(width):
        at = position - back
        blocked = blocked or at < 0 or tokens[at] >= IMAGE
        out.append(pad if blocked else int(vocab[tokens[at]]))
    return out


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("max_ngram", [0, 1, 4])
def test_batch_arrays(seed, max_ngram, num_drafts):
    rng = random.Random(seed)
    vocab, pad = np.array([rng.randrange(1000) for _ in range(VOCAB)], np.int32), 77
    engine = make_engine(
        max_num_batched_tokens=20,
        max_ngram=max_ngram,
        num_draft_tokens=num_drafts,
        image_token_begin=IMAGE,
        image_token_end=IMAGE + 2,
        num_blocks=16,
        replay_keep_tokens=KEEP,
    )
    engine.set_compressed_vocab(vocab, pad)
    known: dict[int, list[int]] = {}
    wants_scores: dict[int, bool] = {}
    computed: dict[int, int] = {}
    drafts: dict[int, list[int]] = {}
    seen = {"image": 0, "partial": 0, "drafts": 0, "scores": 0, "cut again": 0}
    for _ in range(400):
        if rng.random() < 0.3 and engine.num_waiting < 5:
            prompt = [
                rng.choice([IMAGE, IMAGE + 1]) if rng.random() < 0.05 else rng.randrange(2, VOCAB)
                for _ in range(rng.randint(1, 40))
            ]
            wanted = rng.random() < 0.3
            params = make_params(max_tokens=rng.randint(1, 20), num_prompt_logprobs=0 if wanted else -1)
            seq_id = engine.add(params, np.array(prompt, np.int32))
            known[seq_id], wants_scores[seq_id], computed[seq_id], drafts[seq_id] = prompt, wanted, 0, []
        plan = engine.schedule()
        if plan is None:
            continue
        for seq_id in plan.preempted_ids:
            computed[seq_id], drafts[seq_id] = 0, []
        a = inputs(engine, plan)
        row = 0
        output_rows: list[int] = []
        assert a["cu_seqlens_q"][0] == 0
        for s, seq_id in enumerate(plan.seq_ids.tolist()):
            tokens, start = known[seq_id], computed[seq_id]
            rows = int(a["seqlens_q"][s])
            line = tokens + drafts[seq_id]
            assert plan.is_prefill or start == len(tokens) - 1
            for j in range(rows):
                position = start + j
                assert a["input_ids"][row] == line[position] and a["positions"][row] == position
                assert a["row_seq"][row] == s
                assert a["ngram_ids"][row].tolist() == window(line, position, max_ngram, vocab, pad)
                seen["image"] += line[position] >= IMAGE
                row += 1
            end = start + rows
            assert a["cu_seqlens_q"][s + 1] == row and a["seqlens_k"][s] == end
            table = engine.block_table(seq_id)
            used = -(-end // 8)
            assert a["block_tables"][s].tolist() == table[:used].tolist() + [0] * (plan.max_blocks - used)
            assert a["state_slots"][s] == engine.state_slot(seq_id) > 0
            assert a["total_lens"][s] == (len(tokens) if plan.is_prefill else end)
            scored = len(engine.prompt_logprobs(seq_id))
            num_prompt = engine.num_prompt_tokens(seq_id)
            scores = [
                p
                for p in range(start, end)
                if plan.is_prefill and wants_scores[seq_id] and scored <= p < num_prompt - 1
            ]
            missing = wants_scores[seq_id] and scored < num_prompt - 1
            assert a["keep_all"][s] == (plan.is_prefill and missing)
            starts = 0 if wants_scores[seq_id] else max(0, num_prompt - KEEP)
            assert a["window_starts"][s] == starts, "it follows from the prompt alone"
            seen["cut again"] += plan.is_prefill and starts > 0 and len(tokens) > num_prompt
            samples = (
                range(start, end)
                if not plan.is_prefill
                else range(end - 1, end)
                if end == len(tokens)
                else []
            )
            output_rows += [row - rows + p - start for p in [*scores, *samples]]
            seen["partial"] += plan.is_prefill and end < len(tokens)
            seen["drafts"] += rows - 1 if not plan.is_prefill else 0
            seen["scores"] += len(scores)
            if plan.is_prefill:
                computed[seq_id] = end
        assert a["output_rows"].tolist() == output_rows
        assert a["block_tables"].shape == (plan.num_seqs, max(-(-int(k) // 8) for k in a["seqlens_k"]))
        guess = np.array(
            [[rng.randrange(2, VOCAB) for _ in range(num_drafts)] for _ in plan.seq_ids], np.int32
        )
        result = commit_token(
            engine, plan, token=rng.randrange(2, VOCAB), drafts=guess if num_drafts else None
        )
        for s, seq_id in enumerate(plan.seq_ids.tolist()):
            known[seq_id] += engine.output_token_ids(seq_id).tolist()[
                len(known[seq_id]) - engine.num_prompt_tokens(seq_id) :
            ]
            drafts[seq_id] = engine.drafts(seq_id).tolist()
            if result.num_new_tokens[s]:
                computed[seq_id] = len(known[seq_id]) - 1
    assert (
        seen["image"] > 20
        and seen["partial"] > 5
        and seen["scores"] > 20
        and seen["cut again"] > 0
        and (seen["drafts"] > 20 or not num_drafts)
    )


def rows_of(arrays: dict[str, np.ndarray], name: str, row: int) -> list:
    """What the sparse arrays `name`_* say of a row: tuples of the values behind the row column."""
    columns = [key for key in arrays if key.startswith(name + "_") and key != f"{name}_rows"]
    return sorted(
        tuple(arrays[column][i].item() for column in columns)
        for i in np.flatnonzero(arrays[f"{name}_rows"] == row)
    )


def test_sampling_rows_follow_the_parameters():
    engine = make_engine(num_draft_tokens=3)
    fields = {
        "seed": 2**64 - 5,
        "inv_temperature": 1.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "repetition": 1.5,
        "presence": 0.25,
        "frequency": -0.5,
        "num_logprobs": 2,
        "golden_token_ids": [-1, 9, -1, 11],
        "is_ratio": True,
        "max_tokens": 20,
    }
    rich = engine.add(core.SequenceParams(**fields), np.array([3, 4, 3], np.int32))
    plain = engine.add(core.SequenceParams(inv_temperature=0.0, is_ratio=True), tokens_of(5))
    plan = engine.schedule()
    a = inputs(engine, plan)
    assert a["row_offsets"].tolist() == [0, 1, 2] and a["token_index"].tolist() == [3, 5]
    assert rows_of(a, "penalty", 0) == [(3, 0), (4, 0)] and rows_of(a, "penalty", 1) == []
    commit_token(engine, plan, token=4, drafts=np.array([[9, 4, 5], [1, 2, -1]], np.int32))
    plan = engine.schedule()
    a = inputs(engine, plan)
    assert plan.seq_ids.tolist() == [rich, plain] and a["row_offsets"].tolist() == [0, 4, 7]
    assert a["seeds"].view(np.uint64).tolist() == [2**64 - 5] * 4 + [0] * 3
    assert a["token_index"].tolist() == [4, 5, 6, 7, 6, 7, 8]
    for name in (
        "inv_temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition",
        "presence",
        "frequency",
        "num_logprobs",
    ):
        assert a[name][:4].tolist() == [fields[name]] * 4, name
    assert a["inv_temperature"][4:].tolist() == [0.0] * 3 and a["top_k"][4:].tolist() == [-1] * 3
    assert a["forced"].tolist() == [9, -1, 11, -1] + [-1] * 3
    assert a["is_ratio"].tolist() == [1] * 4 + [0] * 3, "greedy is the same in both modes"
    assert a["draft_ids"].tolist() == [9, 4, 5, -1, 1, 2, -1]
    # row j sees the drafts before it
    assert rows_of(a, "penalty", 0) == [(3, 0), (4, 1)]
    assert rows_of(a, "penalty", 1) == [(3, 0), (4, 1), (9, 1)]
    assert rows_of(a, "penalty", 2) == [(3, 0), (4, 2), (9, 1)]
    assert rows_of(a, "penalty", 3) == [(3, 0), (4, 2), (5, 1), (9, 1)]
    assert (np.diff(a["penalty_rows"]) >= 0).all()


def test_repeated_unknown_drafts_are_counted_once_each():
    engine = make_engine(num_draft_tokens=4)
    engine.add(make_params(presence=1.0, max_tokens=20), np.array([3], np.int32))
    commit_token(engine, engine.schedule(), token=4, drafts=np.array([[8, 8, 3, 8]], np.int32))
    a = inputs(engine, engine.schedule())
    assert rows_of(a, "penalty", 0) == [(4, 1)], "prompt tokens matter to repetition only"
    assert rows_of(a, "penalty", 4) == [(3, 1), (4, 1), (8, 3)]


@pytest.mark.parametrize(
    ("fields", "bans"),
    [
        ({}, [[], [], [], []]),
        ({"min_tokens": 2}, [[EOS], [EOS], [], []]),
        ({"min_tokens": 2, "stop_token_ids": [5, 6]}, [[EOS, 5, 6], [EOS, 5, 6], [], []]),
        ({"min_tokens": 3, "stop_token_ids": [5], "ignore_eos": True}, [[5], [5], [5], []]),
        ({"first_n_token_no_eos": 1}, [[EOS], [], [], []]),
        ({"first_n_token_no_eos": 1, "ignore_eos": True}, [[EOS], [], [], []]),
        ({"first_n_token_no_eos": 3, "min_tokens": 1, "stop_token_ids": [5]}, [[EOS, 5], [EOS], [EOS], []]),
        ({"min_tokens": 2, "eos_token_id": -1}, [[], [], [], []]),
    ],
)
@pytest.mark.parametrize("drafted", [False, True])
def test_bans_by_output_index(fields, bans, drafted):
    """Whether a row is a step's first or verifies behind drafts, its own output index decides."""
    engine = make_engine(num_draft_tokens=3)
    engine.add(make_params(**{"eos_token_id": EOS, "max_tokens": 20, **fields}), tokens_of(3))
    got = []
    while len(got) < 4:
        plan = engine.schedule()
        a = inputs(engine, plan)
        got += [sorted(token for (token,) in rows_of(a, "ban", row)) for row in range(plan.num_samples)]
        commit_token(engine, plan, drafts=np.full((1, 3), 7, np.int32) if drafted else None)
    assert got[:4] == bans


def test_bias_and_allowed_lists():
    engine = make_engine()
    engine.add(make_params(bias_tokens=[4, 9], bias_values=[1.5, float("-inf")]), tokens_of(2))
    engine.add(make_params(), tokens_of(2))
    engine.add(make_params(allowed_token_ids=[8, 2, 5]), tokens_of(2))
    engine.add(make_params(allowed_token_ids=[6], bias_tokens=[6], bias_values=[-2.0]), tokens_of(2))
    a = inputs(engine, engine.schedule())
    assert rows_of(a, "bias", 0) == [(4, 1.5), (9, float("-inf"))] and rows_of(a, "bias", 3) == [(6, -2.0)]
    assert a["bias_rows"].tolist() == [0, 0, 3]
    assert a["allowed_rows"].tolist() == [2, 3] and a["allowed_offsets"].tolist() == [0, 3, 4]
    assert a["allowed_tokens"].tolist() == [8, 2, 5, 6]


def test_scoring_rows_have_the_distribution_without_penalties_and_bans():
    engine = make_engine()
    engine.add(
        make_params(
            num_prompt_logprobs=3,
            is_ratio=True,
            min_tokens=4,
            eos_token_id=EOS,
            presence=1.0,
            repetition=1.2,
            inv_temperature=2.0,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            seed=9,
            bias_tokens=[4],
            bias_values=[1.5],
            allowed_token_ids=[4, 6],
        ),
        np.array([5, 6, 7], np.int32),
    )
    plan = engine.schedule()
    a = inputs(engine, plan)
    assert plan.num_scoring_rows.tolist() == [2] and plan.num_sampled_rows.tolist() == [1]
    assert a["forced"].tolist() == [6, 7, -1] and a["num_logprobs"].tolist() == [3, 3, -1]
    assert a["inv_temperature"].tolist() == [2, 2, 2] and a["token_index"].tolist() == [1, 2, 3]
    assert a["top_p"].tolist() == [0.5] * 3 and a["top_k"].tolist() == [7] * 3
    assert a["min_p"].tolist() == [0.25] * 3 and a["presence"].tolist() == [0, 0, 1]
    assert a["bias_rows"].tolist() == [0, 1, 2] and a["allowed_rows"].tolist() == [0, 1, 2]
    assert set(a["penalty_rows"].tolist()) == {2} and a["repetition"].tolist() == [1, 1, np.float32(1.2)]
    assert a["is_ratio"].tolist() == [0, 0, 1], "a scored token is given, not drawn"
    assert a["ban_rows"].tolist() == [2] and plan.max_num_logprobs == 3


def test_image_tokens_are_not_scored():
    engine = make_engine(image_token_begin=IMAGE, image_token_end=IMAGE + 2)
    seq_id = engine.add(make_params(num_prompt_logprobs=0), np.array([5, IMAGE, IMAGE + 1, 6], np.int32))
    plan = engine.schedule()
    assert inputs(engine, plan)["forced"].tolist() == [-1, -1, 6, -1]
    commit_token(engine, plan, logprobs=np.full(4, -2.0, np.float32), ranks=np.full(4, 3, np.int32))
    assert engine.prompt_logprobs(seq_id).tolist() == [-9999, -9999, -2]
    assert engine.prompt_ranks(seq_id).tolist() == [0, 0, 3]


def test_rows_scored_before_a_preemption_are_kept():
    """Later rows, whose scores are missing, read the decoder layers' windows of these."""
    engine = make_engine(max_num_batched_tokens=4)
    seq_id = engine.add(make_params(num_prompt_logprobs=0, max_tokens=2), tokens_of(10))
    asked = []
    for step in range(6):
        plan = engine.schedule()
        asked.append((int(plan.num_scoring_rows[0]), int(inputs(engine, plan)["keep_all"][0])))
        commit_token(engine, plan)
        if step in (1, 4):
            assert engine.preempt(seq_id)
    assert asked == [(4, 1), (4, 1), (0, 1), (0, 1), (1, 1), (0, 0)]


def test_every_array_is_aligned_and_none_overlap():
    config = make_config(async_scheduling=True, num_draft_tokens=2)
    engine = core.EngineCore(config)
    for length in (1, 5, 9):
        engine.add(make_params(presence=1.0, num_prompt_logprobs=0), tokens_of(length))
    layout = engine.layout(engine.schedule())
    end = 0
    for name, dtype, shape, offset in layout.entries:
        assert offset % 64 == 0 and offset >= end, name
        end = offset + int(np.prod(shape)) * np.dtype(dtype).itemsize
    assert end <= layout.nbytes
    assert len({entry[0] for entry in layout.entries}) == len(layout.entries)
