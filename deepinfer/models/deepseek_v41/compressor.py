"""Compressor: one latent vector for every group of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.linear import Projection
from deepinfer.layers.norm import RMSNorm
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.device_rows import DeviceRows
from deepinfer.models.deepseek_v41.rows import Groups, RowSet
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.runtime.caches import Caches
from tilelang_ops.compressor import pool_groups


@dataclass(frozen=True)
class Compressor:
    """Ratio 1: a projection and a norm. Larger ratios: a gated mean over the group in between.

    Attributes:
        layer_id: owner of the compression ring.
        ratio: tokens per group.
        project: [width, hidden], or [2 * width, hidden] with the gate's rows first.
        norm: over the latent's channels.
        arithmetic: how products round.
    """

    layer_id: int
    ratio: int
    project: Projection
    norm: RMSNorm
    arithmetic: Arithmetic

    @classmethod
    def load(
        cls, weights: Weights, prefix: str, layer_id: int, config: DeepseekV41Config, arithmetic: Arithmetic
    ) -> Compressor:
        """Read the tensors under `prefix`, e.g. "layers.2.attn.compressor"."""
        gate = [f"{prefix}.wgate"] if config.ratio(layer_id) > 1 else []
        project = weights.linear(*gate, f"{prefix}.wkv")
        norm = RMSNorm(weights.tensor(f"{prefix}.norm.weight", torch.float32), config.rms_norm_eps)
        return cls(layer_id, config.ratio(layer_id), project, norm, arithmetic)

    def __call__(
        self, x: Tensor | Inputs, rows: RowSet | DeviceRows, groups: Groups, caches: Caches
    ) -> Tensor:
        """Latents of the groups that end among the rows, before the norm.

        Args:
            x: [n, hidden] normalised input of every row of the step.
            rows: the rows of x.
            groups: the groups that end among them.
            caches: the compression ring is read for open groups and holds the last tokens afterwards.

        Returns:
            [g, width] compute dtype.
        """
        if self.ratio == 1:
            return self.project(x, self.arithmetic)
        states = self.project(x, self.arithmetic, torch.float32).unflatten(1, (2, -1))
        return pool_groups(
            states,
            caches.compression(self.layer_id),
            groups.ends,
            rows.positions,
            rows.slots,
            rows.preceding,
            rows.following,
            self.ratio,
            getattr(torch, self.arithmetic.compute_dtype),
        )
