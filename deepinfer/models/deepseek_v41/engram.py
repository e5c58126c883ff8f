"""Engram: table rows chosen by a hash of the last tokens, gated into the residual streams.

Which rows a token needs depends on token ids alone, so all tables are hashed at the start of a forward.
The only barriers of an n-gram are the start of the sequence and tokens of images; they arrive as pad ids
in `Batch.ngram_ids`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.linear import Projection
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import QuantTable, Weights
from deepinfer.utils.aside import Aside
from tilelang_ops.engram import gate_streams, hash_ngrams
from tilelang_ops.memory import gather_dequantize


@dataclass(frozen=True)
class EngramHasher:
    """The hash constants of all tables.

    Attributes:
        multipliers: [tables, max_ngram] int64.
        primes, offsets: [tables, columns] int64.
    """

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @classmethod
    def build(cls, config: DeepseekV41Config, device: torch.device | str = "cpu") -> EngramHasher:
        """Constants of `config.engram` as tensors."""
        constants = config.engram
        parts = (constants.multipliers, constants.primes, constants.offsets)
        return cls(*(torch.tensor(part, dtype=torch.int64, device=device) for part in parts))

    def __call__(self, ngram_ids: Tensor) -> Tensor:
        """[n, max_ngram] int32 -> rows [tables, n, columns] int32, in the order of `engram_layer_ids`."""
        return hash_ngrams(ngram_ids, self.multipliers, self.primes, self.offsets)


@dataclass(frozen=True)
class Engram:
    """One layer's table and gate.

    Attributes:
        table: [rows, width], as stored.
        wkv: [(m + 1) * hidden, columns * width], to one key for each stream and one value.
        weight: [m, hidden] float32, product of the norms' weights of stream and key.
    """

    table: QuantTable
    wkv: Projection
    weight: Tensor
    eps: float
    arithmetic: Arithmetic

    @classmethod
    def load(cls, weights: Weights, prefix: str, config: DeepseekV41Config, arithmetic: Arithmetic) -> Engram:
        """Read the tensors under `prefix` ("layers.1.engram")."""
        q_weight = weights.tensor(f"{prefix}.q_weight", torch.float32)
        k_weight = weights.tensor(f"{prefix}.k_weight", torch.float32)
        return cls(
            table=weights.table(f"{prefix}.embed"),
            wkv=weights.linear(f"{prefix}.wkv"),
            weight=q_weight * k_weight,
            eps=config.rms_norm_eps,
            arithmetic=arithmetic,
        )

    def look_up(self, table_rows: Tensor) -> Tensor:
        """[n, columns] int32 rows of the table -> [n, (m + 1) * hidden] keys and value, for `__call__`."""
        rows = gather_dequantize(
            self.table.rows, self.table.scales, table_rows, getattr(torch, self.arithmetic.compute_dtype)
        )
        # Stored rows are E4M3 with a scale already: the product takes them as they are in every arithmetic.
        return self.wkv(rows.flatten(1), self.arithmetic, is_rounded=True)

    def __call__(
        self,
        streams: Tensor,
        table_rows: Tensor,
        is_image: Tensor | None = None,
        looked_up: Aside[Tensor] | None = None,
    ) -> Tensor:
        """Add the gated value to every stream.

        Args:
            streams: [n, m, hidden] compute dtype.
            table_rows: [n, columns] int32, this table's part of `EngramHasher`.
            is_image: [n] bool, rows that pass through unchanged; None when there is none.
            looked_up: `look_up(table_rows)`, which may be under way; None to do it now.

        Returns:
            [n, m, hidden] compute dtype.
        """
        key_value = self.look_up(table_rows) if looked_up is None else looked_up.result()
        return gate_streams(streams, key_value, self.weight, self.eps, is_image)
