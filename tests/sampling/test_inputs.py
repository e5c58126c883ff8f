"""The inputs record: slices equal the record of the rows alone, and the host decides as the device would."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from deepinfer.sampling.inputs import SamplingInputs, TokenMasks
from tests.sampling.rows import Row, make_inputs
from tests.sampling.test_sampler import random_rows
from tests.support.compare import assert_same_bits

TENSORS = [f.name for f in dataclasses.fields(SamplingInputs) if f.name not in ("host", "masks", "packed")]


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (0, 1), (39, 40), (7, 23), (0, 0), (40, 40), (12, 12)])
def test_a_slice_is_the_record_of_its_rows(start, stop):
    rows = random_rows(40, 50)
    part = make_inputs(rows).slice(start, stop)
    alone = make_inputs(rows[start:stop])
    for name in TENSORS:
        if name == "row_offsets":
            continue
        assert_same_bits(getattr(part, name), getattr(alone, name), name)
        assert_same_bits(torch.from_numpy(part.host[name]), getattr(alone, name), name)
    assert part.num_rows == stop - start


def test_a_slice_of_a_slice():
    rows = random_rows(40, 50)
    twice = make_inputs(rows).slice(5, 35).slice(4, 20)
    alone = make_inputs(rows[9:25])
    for name in set(TENSORS) - {"row_offsets"}:
        assert_same_bits(getattr(twice, name), getattr(alone, name), name)


@pytest.mark.parametrize("chosen", [[], [0], [39], [3, 4, 11, 30], list(range(40))])
def test_taken_rows_are_the_record_of_those_rows(chosen):
    rows = random_rows(40, 50)
    taken = make_inputs(rows, [0, 40]).take(np.array(chosen, dtype=np.int64))
    alone = make_inputs([rows[i] for i in chosen])
    for name in TENSORS:
        assert_same_bits(getattr(taken, name), getattr(alone, name), name)
        assert_same_bits(torch.from_numpy(taken.host[name]), getattr(alone, name), name)


def masked(rows: dict[int, list[int]]) -> SamplingInputs:
    """Forty rows, some of them with a mask of two words."""
    masks = {row: np.array(words, dtype=np.int32) for row, words in rows.items()}
    return make_inputs(random_rows(40, 50)).with_masks(TokenMasks.of(masks, torch.device("cpu")))


def test_masks_go_with_their_rows():
    inputs = masked({3: [1, 2], 9: [3, 4], 10: [5, 6], 39: [7, 8]})
    part = inputs.slice(9, 20).masks
    assert part.rows.tolist() == part.host_rows.tolist() == [0, 1] and part.words.tolist() == [[3, 4], [5, 6]]
    assert inputs.slice(9, 20).slice(1, 11).masks.rows.tolist() == [0]
    assert inputs.slice(11, 39).masks is None and inputs.slice(0, 40).masks.rows.tolist() == [3, 9, 10, 39]
    assert inputs.take(np.array([3, 9])).masks is None
    assert masked({}).masks is None


def test_bans_of_some_rows_can_be_lifted():
    inputs = make_inputs(random_rows(40, 50))
    bans = list(zip(inputs.ban_rows.tolist(), inputs.ban_tokens.tolist()))
    lifted = {row for row, _ in bans[: len(bans) // 2]}
    assert lifted and lifted != {row for row, _ in bans}
    kept = inputs.without_bans(lifted)
    assert list(zip(kept.ban_rows.tolist(), kept.ban_tokens.tolist())) == [
        ban for ban in bans if ban[0] not in lifted
    ]
    assert_same_bits(torch.from_numpy(kept.host["ban_rows"]), kept.ban_rows)
    assert_same_bits(torch.from_numpy(kept.host["ban_tokens"]), kept.ban_tokens)


def test_row_offsets_of_a_slice():
    inputs = make_inputs([Row()] * 7, row_offsets=[0, 3, 3, 7])
    assert inputs.slice(2, 6).row_offsets.tolist() == [0, 1, 1, 4]
    assert inputs.slice(0, 3).row_offsets.tolist() == [0, 3, 3, 3]
    assert inputs.slice(2, 6).host["row_offsets"].tolist() == [0, 1, 1, 4]


def test_every_array_is_needed():
    arrays = {name: torch.from_numpy(array) for name, array in make_inputs([Row()]).host.items()}
    for name in TENSORS:
        with pytest.raises(KeyError, match=name):
            SamplingInputs.from_host({key: value for key, value in arrays.items() if key != name})
