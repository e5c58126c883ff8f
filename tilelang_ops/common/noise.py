"""Noise of the sampler: Gumbel variables that are a pure function of (seed, token index, token id).

    w      = Philox4x32-10( counter = (v >> 2, t_lo, t_hi, domain), key = (S_lo, S_hi) )[v & 3]
    u      = (w + 1/2) * 2**-32                                  never 0 or 1
    g      = -log(-log(1 - u))                                   between -3.130 and 22.874

Words are 32-bit numbers in int64 tensors: products wrap modulo 2**64, which keeps both halves of a 32 x 32
bit product. The value of g is defined by `log64`, which is made of additions, products and quotients in
float64 that are each rounded once, and rounded once more to float32: every device gives the same bits. No
step may be contracted to a fused multiply-add.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # a product with an exponent is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LAST, *_SERIES = (2.0 / n for n in range(23, 1, -2))  # of artanh, from the back
_SERIES = tuple(_SERIES)


def exponent_of(bits):
    """k such that a positive number is 2^k times one in [sqrt(1/2), sqrt(2)); int64 bits of a float64."""
    return (bits - _SQRT_HALF_BITS) >> 52


def log64(f, k, keep=lambda value: value):
    """log((1 + f) * 2^k) for 1 + f in [sqrt(1/2), sqrt(2)), within two units of the last place.

    Twice the series of artanh(f / (2 + f)). Float64 tensors and kernel expressions alike; `keep` puts a
    kernel's intermediate results into variables.
    """
    s = keep(f / (2.0 + f))
    z = keep(s * s)
    tail = z * _LAST
    for coefficient in _SERIES:
        tail = z * (coefficient + tail)
    return k * _LN2_HIGH + ((s * tail + k * _LN2_LOW) + 2.0 * s)


def log(x: Tensor) -> Tensor:
    """`log64` of a positive, normal float64 tensor."""
    bits = x.view(torch.int64)
    k = exponent_of(bits)
    return log64((bits - (k << 52)).view(torch.float64) - 1.0, k.double())


def gumbel(words: Tensor) -> Tensor:
    """Float32 noise of words."""
    # 1 - u has 33 bits, so it is exact, and so is its distance from 1: nothing cancels where u is small.
    return (-log(-log((2.0**32 - 0.5 - words.double()) * 2.0**-32))).float()


def uniform(words: Tensor) -> Tensor:
    """u in the open interval (0, 1) as float64, exact."""
    return (words.double() + 0.5) * 2.0**-32


def philox4x32(counter: tuple, key: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10.

    Args:
        counter: four words, int64 tensors in [0, 2**32) (or ints) that broadcast with each other.
        key: two words, likewise.

    Returns:
        Four words, int64 tensors in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        # An arithmetic shift drags the sign down; the mask after the xor removes it.
        c0 = ((product1 >> 32) ^ c1 ^ k0) & MASK32
        c1 = product1 & MASK32
        c2 = ((product0 >> 32) ^ c3 ^ k1) & MASK32
        c3 = product0 & MASK32
        k0 = (k0 + KEY_STEPS[0]) & MASK32
        k1 = (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def group_words(
    seeds: Tensor, index: Tensor, group: Tensor, domain: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of token ids 4 * group ... 4 * group + 3; all arguments int64 and broadcastable."""
    counter = (group, index & MASK32, (index >> 32) & MASK32, torch.full_like(index, int(domain)))
    return philox4x32(counter, (seeds & MASK32, (seeds >> 32) & MASK32))


def row_words(seeds: Tensor, index: Tensor, num_tokens: int, domain: int = 0) -> Tensor:
    """Words of the token ids 0 ... num_tokens - 1 for every row.

    Args:
        seeds, index: [R] int64, a row's seed (bit pattern) and token index.

    Returns:
        [R, num_tokens] int64 in [0, 2**32).
    """
    group = torch.arange((num_tokens + 3) // 4, device=seeds.device)
    words = group_words(seeds[:, None], index[:, None], group[None, :], domain)
    return torch.stack(words, dim=-1).flatten(1)[:, :num_tokens]


def pair_words(seeds: Tensor, index: Tensor, token_ids: Tensor, domain: int = 0) -> Tensor:
    """Words of single (row, token) pairs.

    Args:
        seeds, index, token_ids: [N] int64, seed and index of each pair's row, and its token.

    Returns:
        [N] int64 in [0, 2**32).
    """
    words = torch.stack(group_words(seeds, index, token_ids >> 2, domain), dim=-1)
    return words.gather(-1, (token_ids & 3)[:, None]).squeeze(-1)
