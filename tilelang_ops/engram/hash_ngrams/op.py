"""Table rows of every token's n-grams."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def hash_ngrams(ngram_ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Hash the n-grams that end at each token, for every table at once.

        roll[s] = xor over k = 0..s of ngram_ids[k] * multipliers[k]         64-bit integers
        row[c]  = roll[size(c) - 1] mod primes[c] + offsets[c]               size(c) = 2 + c // num_heads

    Args:
        ngram_ids: [n, max_ngram] int32, folded ids of a token and its predecessors, newest first; the folded
            pad id stands where there is none.
        multipliers: [tables, max_ngram] int64; every product with a folded id is below 2^63.
        primes, offsets: [tables, columns] int64; columns are size-major, head-minor.

    Returns:
        [tables, n, columns] int32.
    """
    num_tables, columns = primes.shape
    max_ngram = ngram_ids.shape[1]
    assert multipliers.shape == (num_tables, max_ngram), f"{ngram_ids.shape=} {multipliers.shape=}"
    assert offsets.shape == primes.shape and columns % (max_ngram - 1) == 0, f"{primes.shape=} {max_ngram=}"
    if ngram_ids.shape[0] == 0:
        return ngram_ids.new_empty(num_tables, 0, columns)
    assert ngram_ids.dtype == torch.int32, f"{ngram_ids.dtype=}"
    return backend(__package__, ngram_ids.device).run(ngram_ids, multipliers, primes, offsets)
