"""Engram hash constants against the specification's numbers, golden data and a slow search."""

from __future__ import annotations

import pytest

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram_hash import engram_hash
from tests.checkpoint.configs import RELEASE, tiny_quant_config


def test_release_constants() -> None:
    constants = DeepseekV41Config.from_dict(RELEASE).engram
    assert constants.num_rows == (384006168, 384016682)
    assert constants.multipliers == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )
    first, second = constants.primes
    assert first[:8] == (16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183)
    assert [prime - 16000000 for prime in first[8:]] == (
        [189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409, 447, 463]
    )
    assert [prime - 16000000 for prime in second] == (
        [477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769]
        + [781, 799, 813, 819, 841, 877, 879, 889]
    )


def test_release_constants_match_golden(units) -> None:
    constants = DeepseekV41Config.from_dict(RELEASE).engram
    for golden, multipliers, primes in zip(
        units.about["engram_release"], constants.multipliers, constants.primes, strict=True
    ):
        assert tuple(golden["multipliers"]) == multipliers
        assert tuple(prime for row in golden["primes"] for prime in row) == primes


# Rows of compressed ids 0, 11, 222, 3333, 44444 (pad 2) in columns 0, 1, 7, 8, 15, 16, 23.
RELEASE_ROWS = [
    (1, 0, (), [5702652, 24393184, 121476532, 131476717, 247482304, 257520185, 380066193]),
    (1, 2, (), [11874978, 20182616, 118505550, 142683531, 243801296, 262819464, 381200073]),
    (1, 4, (), [1447634, 29082309, 116659017, 137201719, 242428184, 264803230, 377102533]),
    (14, 0, (), [14361964, 29977809, 120604547, 132225184, 252505246, 261362261, 372375971]),
    (14, 2, (), [906910, 27672487, 115661803, 143526296, 240264649, 263705810, 375265015]),
    (14, 4, (), [11585697, 28820417, 112074619, 135480510, 243902903, 256679227, 375101320]),
    (1, 4, (3,), [14806979, None, None, 138144573, None, 265738364, 378806720]),
]


@pytest.mark.parametrize(("layer_id", "position", "images", "expected"), RELEASE_ROWS)
def test_release_rows(layer_id: int, position: int, images: tuple[int, ...], expected: list[int]) -> None:
    constants = DeepseekV41Config.from_dict(RELEASE).engram
    table = constants.layer_ids.index(layer_id)
    ids = [0, 11, 222, 3333, 44444]
    rows, roll, blocked = [], 0, False
    for shift in range(4):
        place = position - shift
        blocked = blocked or place < 0 or place in images
        roll ^= (2 if blocked else ids[place]) * constants.multipliers[table][shift]
        assert 0 <= roll < 2**63
        if shift:
            columns = range((shift - 1) * 8, shift * 8)
            rows += [roll % constants.primes[table][c] + constants.offsets[table][c] for c in columns]
    for column, row in zip((0, 1, 7, 8, 15, 16, 23), expected):
        assert row is None or rows[column] == row


@pytest.mark.parametrize("model", ["tiny-quant", "tiny-bf16"])
def test_golden_constants(units, model: str) -> None:
    start = {"tiny-quant": 300, "tiny-bf16": 500}[model]
    constants = engram_hash((1, 3), 4, 2, start, 2032)
    golden = units.under(f"engram/{model}")
    assert golden["multipliers"].tolist() == [list(row) for row in constants.multipliers]
    assert golden["primes"].tolist() == [list(row) for row in constants.primes]
    assert golden["row_offsets"].tolist() == [list(row) for row in constants.offsets]
    assert DeepseekV41Config.from_dict(tiny_quant_config()).engram.num_rows == (1916, 2148)


def test_recommended_tiny_configuration() -> None:
    constants = engram_hash((1, 3), 4, 8, 512, 4096)
    assert constants.num_rows == (14340, 18110)
    assert constants.primes[0][:3] == (521, 523, 541)
    assert constants.primes[1][:3] == (673, 677, 683)
    assert constants.multipliers == (
        (1853913003275055, 117088135214507, 869950158561757, 1789929991071049),
        (665943142243495, 1975531624133523, 263163075593545, 1700650575290549),
    )


@pytest.mark.parametrize("start", [1, 2, 3, 10, 113])
def test_primes_against_a_sieve(start: int) -> None:
    """Small starts, where the cursor of each size passes the primes of earlier sizes and layers."""
    sieve = [n for n in range(2, 4000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    pool = [p for p in sieve if p >= start]
    constants = engram_hash((5, 2), 3, 3, start, 7)
    assert sum(constants.primes, ()) == tuple(pool[:12])  # in configured order, nothing taken twice
    assert all(m % 2 == 1 and m > 0 for row in constants.multipliers for m in row)
    bound = (2**63 - 1) // 7
    assert all(m <= bound for row in constants.multipliers for m in row)
