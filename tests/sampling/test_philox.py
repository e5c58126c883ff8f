"""Philox4x32-10 and Gumbel noise against published vectors and a plain-integer computation."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.sampling.philox import Domain, gumbel, pair_words, philox4x32, row_words, uniform
from tests.sampling.rows import brute_noise
from tests.support.compare import assert_same_bits

SEED = 0x0123456789ABCDEF


def words_of(counter: list[int], key: list[int]) -> list[int]:
    tensors = [torch.tensor([value]) for value in (*counter, *key)]
    return [int(word) for word in philox4x32(tuple(tensors[:4]), tuple(tensors[4:]))]


def test_known_answers():
    """The vectors of the Random123 distribution."""
    ones = 0xFFFFFFFF
    assert words_of([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words_of([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words_of(counter, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_reference_noise():
    words = row_words(torch.tensor([SEED]), torch.tensor([17]), 8)
    expected = "790d429c 04fc2ffd 70b3a2a0 75c79049 5134ab51 e6e74a45 459bd375 eb7aba41"
    assert [f"{w:08x}" for w in words[0].tolist()] == expected.split()
    noise = [0.445840, 3.928906, 0.544298, 0.483977, 0.963467, -0.842622, 1.147816, -0.925745]
    torch.testing.assert_close(gumbel(words)[0], torch.tensor(noise), atol=5e-7, rtol=0)


@pytest.mark.parametrize("domain", list(Domain))
def test_rows_and_pairs_equal_plain_integers(domain):
    seeds = [0, 1, SEED, 2**63, 2**64 - 1, 2**32, 0xFFFFFFFF]
    indices = [0, 1, 17, 2**31, 2**32 - 1, 2**32 + 5, 2**40]
    as_signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    index = torch.tensor(indices)
    num_tokens = 11
    rows = gumbel(row_words(as_signed, index, num_tokens, domain))
    pair = torch.cartesian_prod(torch.arange(len(seeds)), torch.arange(num_tokens))
    pairs = gumbel(pair_words(as_signed[pair[:, 0]], index[pair[:, 0]], pair[:, 1], domain))
    assert_same_bits(pairs.view(len(seeds), num_tokens), rows)
    for r, (seed, t) in enumerate(zip(seeds, indices)):
        exact = torch.tensor(
            [brute_noise(seed, t, v, domain) for v in range(num_tokens)], dtype=torch.float64
        )
        assert_same_bits(rows[r], exact.float())


def test_large_token_ids():
    token = 129_279
    words = pair_words(torch.tensor([5]), torch.tensor([9]), torch.tensor([token]))
    assert gumbel(words).item() == pytest.approx(brute_noise(5, 9, token), rel=1e-6)
    assert row_words(torch.tensor([5]), torch.tensor([9]), token + 1)[0, -1] == words[0]


def test_noise_range_and_ends():
    words = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    noise = gumbel(words)
    assert noise.isfinite().all()
    assert (noise.diff() < 0).all() or noise.diff()[2] == 0  # falls with the word
    assert noise[0].item() == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), abs=1e-5)
    assert 22.873 < noise[0] < 22.875 and -3.131 < noise[-1] < -3.129
    u = uniform(words)
    assert (u > 0).all() and (u < 1).all()


def test_float32_noise_stays_close():
    words = torch.cat(
        [torch.randint(0, 2**32, (200_000,)), torch.arange(1000), 2**32 - 1 - torch.arange(1000)]
    )
    assert (gumbel(words, torch.float32) - gumbel(words)).abs().max() < 1e-5


def test_noise_has_the_gumbel_law():
    """Kolmogorov-Smirnov distance to exp(-exp(-x)), and no correlation between neighbours."""
    noise = gumbel(row_words(torch.arange(100), torch.arange(100), 4000)).flatten().double()
    ordered = noise.sort().values
    steps = torch.arange(1, ordered.numel() + 1) / ordered.numel()
    distance = (torch.exp(-torch.exp(-ordered)) - steps).abs().max()
    assert distance < 1.95 / math.sqrt(ordered.numel())
    centred = noise - noise.mean()
    for lag in (1, 2, 4, 4000):
        correlation = (centred[lag:] * centred[:-lag]).mean() / centred.var()
        assert correlation.abs() < 4 / math.sqrt(noise.numel())


def test_streams_are_unrelated():
    """Another seed, index or domain gives other noise."""
    one, two = torch.tensor([1]), torch.tensor([2])
    base = row_words(one, one, 64)
    for other in (row_words(two, one, 64), row_words(one, two, 64), row_words(one, one, 64, Domain.ACCEPT)):
        assert (base == other).sum() == 0
