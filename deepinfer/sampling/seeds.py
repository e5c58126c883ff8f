"""Seeds of requests: 64-bit numbers, one per sequence, mixed so that related seeds give unrelated draws.

SplitMix64 as used here, all arithmetic modulo 2**64:

    mix64(x):  z = x + 0x9E3779B97F4A7C15
               z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
               z = (z ^ (z >> 27)) * 0x94D049BB133111EB
               return z ^ (z >> 31)
    S_0 = seed
    S_j = mix64(mix64(seed) + j * 0x9E3779B97F4A7C15)   for j > 0

The inner mix64 keeps samples of neighbouring seeds apart: without it S_1 of one seed would be S_2 of another.
"""

from __future__ import annotations

import secrets

MASK64 = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The SplitMix64 output function after adding its increment; a bijection on 64-bit numbers."""
    z = (x + GOLDEN_GAMMA) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def sample_seed(seed: int, sample: int) -> int:
    """The seed S_j of completion `sample` of a request.

    Args:
        seed: the request's seed, 0 ... 2**64 - 1.
        sample: the completion's index j, 0 ... n - 1; sample 0 uses the seed itself.
    """
    if sample == 0:
        return seed & MASK64
    return mix64((mix64(seed) + sample * GOLDEN_GAMMA) & MASK64)


def fresh_seed() -> int:
    """A seed from the operating system's entropy, for a request that names none."""
    return secrets.randbits(64)
