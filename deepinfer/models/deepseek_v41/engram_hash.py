"""Hash constants of the Engram tables: multipliers, primes and row offsets (pure arithmetic, no tensors)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

_MULTIPLIER_SEED_STEP = 10007  # the generator of layer L is seeded with 10007 * L


@dataclass(frozen=True)
class EngramHash:
    """Constants of every Engram layer, in the order of `engram_layer_ids`.

    Column c of a layer belongs to n-gram size `2 + c // num_heads` and head `c % num_heads`. The row of a
    column is `roll % prime + offset` in the layer's table.

    Attributes:
        layer_ids: layers that own a table.
        multipliers: [num_layers][max_ngram] odd integers; products with a compressed id stay below 2**63.
        primes: [num_layers][num_columns], all distinct.
        offsets: [num_layers][num_columns], the sum of the primes of earlier columns of the layer.
        num_rows: [num_layers], the sum of a layer's primes: its rows in the table.
    """

    layer_ids: tuple[int, ...]
    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    num_rows: tuple[int, ...]


@functools.lru_cache(maxsize=8)
def engram_hash(
    layer_ids: tuple[int, ...], max_ngram: int, num_heads: int, vocab_size: int, compressed_vocab_size: int
) -> EngramHash:
    """Derive the constants.

    Args:
        layer_ids: layers in configured order; primes are handed out in this order.
        max_ngram: largest n-gram size; sizes start at 2.
        num_heads: hashes per n-gram size.
        vocab_size: the search for primes starts at this number (`engram_vocab_size`).
        compressed_vocab_size: number of folded token classes; bounds the multipliers.
    """
    multipliers, primes = [], []
    taken: set[int] = set()
    for layer_id in layer_ids:
        multipliers.append(_multipliers(layer_id, max_ngram, compressed_vocab_size))
        columns: list[int] = []
        for _ in range(2, max_ngram + 1):
            cursor = vocab_size - 1  # every size starts over; primes already taken are passed by
            for _ in range(num_heads):
                cursor = next(n for n in _primes_above(cursor) if n not in taken)
                taken.add(cursor)
                columns.append(cursor)
        primes.append(tuple(columns))
    offsets = tuple(tuple(sum(row[:c]) for c in range(len(row))) for row in primes)
    return EngramHash(
        layer_ids, tuple(multipliers), tuple(primes), offsets, tuple(sum(row) for row in primes)
    )


def _multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> tuple[int, ...]:
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    generator = np.random.default_rng(_MULTIPLIER_SEED_STEP * layer_id)
    draws = generator.integers(0, bound, size=max_ngram, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def _primes_above(number: int):
    """Primes greater than `number`, ascending, by trial division."""
    candidate = max(number + 1, 2)
    while True:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            yield candidate
        candidate += 1
