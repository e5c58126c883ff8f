"""One layer: Engram where it has one, attention and experts, each behind its mixing site.

Backbone and drafter are made of the same layers; the drafter's have no Engram and fewer experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.norm import RMSNorm
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.hyper_connection import HyperConnection, Mixes, Streams
from deepinfer.models.deepseek_v41.moe import MoE
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.utils.aside import Aside


@dataclass(frozen=True)
class Layer:
    """The parts of one layer; the model walks through them, because rows may narrow on the way.

    Attributes:
        engram: None in most layers.
        table: place of the layer's table among the Engram tables, -1 without one.
        is_packed: weights are in the packed form, whose products take `Inputs`.
    """

    layer_id: int
    attn_hc: HyperConnection
    attn_norm: RMSNorm
    attention: Attention
    ffn_hc: HyperConnection
    ffn_norm: RMSNorm
    moe: MoE
    engram: Engram | None = None
    table: int = -1
    is_packed: bool = False

    @classmethod
    def load(
        cls, weights: Weights, layer_id: int, config: DeepseekV41Config, arithmetic: Arithmetic
    ) -> Layer:
        """Read layer `layer_id`; the drafter's layers follow the backbone's."""
        is_draft = layer_id in config.draft_layer_ids
        prefix = f"mtp.{layer_id - config.num_hidden_layers}" if is_draft else f"layers.{layer_id}"
        has_engram = layer_id in config.engram_layer_ids
        return cls(
            layer_id=layer_id,
            attn_hc=HyperConnection.load(weights, f"{prefix}.hc_attn", config, arithmetic),
            attn_norm=_norm(weights, f"{prefix}.attn_norm", config),
            attention=Attention.load(weights, f"{prefix}.attn", layer_id, config, arithmetic),
            ffn_hc=HyperConnection.load(weights, f"{prefix}.hc_ffn", config, arithmetic),
            ffn_norm=_norm(weights, f"{prefix}.ffn_norm", config),
            moe=MoE.load(
                weights,
                f"{prefix}.ffn",
                config,
                arithmetic,
                num_experts=config.dspark_n_routed_experts if is_draft else config.n_routed_experts,
                num_selected=config.dspark_num_experts_per_tok if is_draft else config.num_experts_per_tok,
            ),
            engram=Engram.load(weights, f"{prefix}.engram", config, arithmetic) if has_engram else None,
            table=config.engram_layer_ids.index(layer_id) if has_engram else -1,
            is_packed=weights.is_packed,
        )

    def enter(
        self,
        streams: Streams,
        table_rows: Tensor | None,
        is_image: Tensor | None = None,
        looked_up: Aside[Tensor] | None = None,
    ) -> tuple[Tensor | Inputs, Streams]:
        """Engram, then the attention's site and norm.

        Args:
            streams: n rows, an output pending or not.
            table_rows: [n, columns] int32 for a layer with Engram, else None.
            is_image: [n] bool, tokens of images; None when there is none.
            looked_up: what Engram finds in these rows, where that has begun.

        Returns:
            the attention's input [n, hidden] and the settled streams at its entry.
        """
        if self.engram is not None:
            settled = streams.settled()
            values = self.engram(settled.values, table_rows, is_image, looked_up)
            streams = Streams(values, Aside(Mixes(settled.mixes.pre)))
        if self.is_packed:
            return self.attn_hc.normed(streams, self.attn_norm, keeps_values=self.attention.takes_values)
        x, streams = self.attn_hc(streams)
        return self.attn_norm(x), streams

    def feed_forward(self, streams: Streams, is_image: Tensor | None = None) -> Streams:
        """The experts' site, norm and experts; their output is left pending. `is_image` as in `enter`."""
        if self.is_packed:
            inputs, streams = self.ffn_hc.normed(streams, self.ffn_norm, keeps_values=True)
            return streams.add(self.moe(inputs, is_image))
        x, streams = self.ffn_hc(streams)
        return streams.add(self.moe(self.ffn_norm(x), is_image))


def _norm(weights: Weights, prefix: str, config: DeepseekV41Config) -> RMSNorm:
    return RMSNorm(weights.tensor(f"{prefix}.weight", torch.float32), config.rms_norm_eps)
