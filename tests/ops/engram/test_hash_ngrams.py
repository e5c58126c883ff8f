"""hash_ngrams: golden rows of two models, the release's numbers, and integers of Python."""

from __future__ import annotations

import json

import pytest
import torch

from deepinfer.models.deepseek_v41.engram_hash import engram_hash
from tests.support.compare import check_against_cpu
from tests.support.paths import GOLDEN
from tilelang_ops.engram import hash_ngrams

PAD = 2


def windows(ids: list[int], blocked: list[int] | None = None, size: int = 4) -> torch.Tensor:
    """[n, size] ids of each position and its predecessors; pad before the start and beyond a blocked one."""
    rows = []
    for position in range(len(ids)):
        row, is_open = [], True
        for place in range(position, position - size, -1):
            is_open = is_open and place >= 0 and not (blocked and blocked[place])
            row.append(ids[place] if is_open else PAD)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("model", ["tiny-quant", "tiny-bf16"])
def test_golden_rows(units, model: str) -> None:
    data = units.under(f"engram/{model}")
    folded = data["token_map"][data["example/token_ids"].long()].tolist()
    pad = int(data["token_map"][2])
    assert pad == PAD
    ids = windows(folded, data["example/blocked"].tolist())
    rows = hash_ngrams(ids, data["multipliers"], data["primes"], data["row_offsets"])
    open_rows = data["example/blocked"] == 0  # nothing is looked up at a blocked position itself
    expected = data["example/rows"].transpose(0, 1).int()
    assert torch.equal(rows[:, open_rows], expected[:, open_rows])


@pytest.mark.parametrize(
    ("table", "position", "blocked", "expected"),
    [
        (0, 0, [], [5702652, 24393184, 121476532, 131476717, 247482304, 257520185, 380066193]),
        (0, 2, [], [11874978, 20182616, 118505550, 142683531, 243801296, 262819464, 381200073]),
        (0, 4, [], [1447634, 29082309, 116659017, 137201719, 242428184, 264803230, 377102533]),
        (1, 0, [], [14361964, 29977809, 120604547, 132225184, 252505246, 261362261, 372375971]),
        (1, 2, [], [906910, 27672487, 115661803, 143526296, 240264649, 263705810, 375265015]),
        (1, 4, [], [11585697, 28820417, 112074619, 135480510, 243902903, 256679227, 375101320]),
        (0, 4, [3], [14806979, None, None, 138144573, None, 265738364, 378806720]),
    ],
)
def test_release_rows(table: int, position: int, blocked: list[int], expected: list[int | None]) -> None:
    constants = json.loads((GOLDEN / "units.json").read_text())["engram_release"]
    primes = torch.tensor([layer["primes"] for layer in constants]).flatten(1)
    offsets = primes.cumsum(1) - primes
    multipliers = torch.tensor([layer["multipliers"] for layer in constants])
    ids = windows([0, 11, 222, 3333, 44444], [int(place in blocked) for place in range(5)])
    row = hash_ngrams(ids, multipliers, primes, offsets)[table, position]
    for column, want in zip((0, 1, 7, 8, 15, 16, 23), expected, strict=True):
        assert want is None or int(row[column]) == want, f"{column=}"


@pytest.mark.parametrize(("max_ngram", "num_heads"), [(2, 1), (3, 2), (4, 8)])
def test_against_python_integers(max_ngram: int, num_heads: int) -> None:
    constants = engram_hash((3, 5), max_ngram, num_heads, 100, 3000)
    ids = torch.randint(0, 3000, (9, max_ngram), dtype=torch.int32)
    ids[0] = 2999  # the largest products
    tensors = (torch.tensor(part) for part in (constants.multipliers, constants.primes, constants.offsets))
    actual = hash_ngrams(ids, *tensors)
    for table in range(2):
        for row, gram in enumerate(ids.tolist()):
            for column, prime in enumerate(constants.primes[table]):
                roll = 0
                for back in range(2 + column // num_heads):
                    roll ^= gram[back] * constants.multipliers[table][back]
                assert roll < 2**63
                assert int(actual[table, row, column]) == roll % prime + constants.offsets[table][column]


def test_no_rows() -> None:
    constants = engram_hash((1,), 4, 2, 100, 3000)
    tensors = (torch.tensor(part) for part in (constants.multipliers, constants.primes, constants.offsets))
    assert hash_ngrams(torch.empty(0, 4, dtype=torch.int32), *tensors).shape == (1, 0, 6)


def test_on_device(device: str) -> None:
    constants = engram_hash((1, 14), 4, 8, 500, 4096)
    tensors = [torch.tensor(part) for part in (constants.multipliers, constants.primes, constants.offsets)]
    ids = torch.randint(0, 4096, (33, 4), dtype=torch.int32)
    check_against_cpu(hash_ngrams, ids, *tensors, device=device, bitwise=True)
