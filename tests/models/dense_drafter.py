"""The drafter's block from its definition: dense attention over whole sequences, in float64, without caches.

Weights are the drafter's; norms, rotation, attention, mixing and experts are written anew. For `plain`
arithmetic, whose caches do not round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.dspark import Drafter
from deepinfer.models.deepseek_v41.hyper_connection import HyperConnection
from deepinfer.models.deepseek_v41.moe import MoE


def dense_block(drafter: Drafter, config: DeepseekV41Config, features: Tensor, anchor: int) -> Tensor:
    """States of the block behind a sequence.

    Args:
        features: [tokens, targets * hidden] of every token before the anchor.
        anchor: the token at position `tokens`.

    Returns:
        float64 [block, hidden], before the last norm.
    """
    eps, start = config.rms_norm_eps, features.shape[0]
    context = _norm(
        features.double() @ drafter.main_proj.weight.double().T, drafter.main_norm.weight.double(), eps
    )
    ids = [anchor] + [config.dspark_noise_token_id] * (config.dspark_block_size - 1)
    embeddings = drafter.embed.weight[torch.tensor(ids)].double()
    streams = embeddings[:, None].expand(-1, config.hc_mult, -1)
    pre = torch.zeros(len(ids), config.hc_mult, dtype=torch.float64)
    pre[:, 0] = 1
    for stage in drafter.stages:
        sublayers = (
            (
                stage.attn_hc,
                stage.attn_norm,
                lambda x, a=stage.attention: _attend(a, config, context, x, start),
            ),
            (stage.ffn_hc, stage.ffn_norm, lambda x, moe=stage.moe: _experts(moe, config, x)),
        )
        for site, norm, sublayer in sublayers:
            next_pre, post, comb = _mixes(site, config, streams)
            x = torch.einsum("nm,nmd->nd", pre, streams)
            out = sublayer(_norm(x, norm.weight.double(), eps))
            streams = post[:, :, None] * out[:, None] + torch.einsum("nij,nid->njd", comb, streams)
            pre = next_pre
    return torch.einsum("nm,nmd->nd", pre, streams)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotated(x: Tensor, positions: Tensor, config: DeepseekV41Config, sign: float = 1.0) -> Tensor:
    """[n, ..., width]: turn adjacent pairs of the last channels."""
    width = config.qk_rope_head_dim
    frequency = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), sign * positions[:, None] * frequency)
    turn = turn.view(x.shape[0], *[1] * (x.dim() - 2), -1)
    head, tail = x[..., :-width], x[..., -width:]
    pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([head, torch.view_as_real(pairs * turn).flatten(-2)], -1)


def _attend(
    attention: Attention, config: DeepseekV41Config, context: Tensor, x: Tensor, start: int
) -> Tensor:
    """The block's rows `x` behind `context`; every query sees the window before the block and all of it."""
    eps, width = config.rms_norm_eps, config.head_dim
    positions = torch.arange(start + x.shape[0], dtype=torch.float64)
    kv = _norm(
        torch.cat([context, x]) @ attention.wkv.weight.double().T, attention.kv_norm.weight.double(), eps
    )
    keys = _rotated(kv, positions, config)[max(0, start - config.sliding_window) :]
    latent = _norm(x @ attention.wq_a.weight.double().T, attention.q_norm.weight.double(), eps)
    q = (latent @ attention.wq_b.weight.double().T).unflatten(1, (-1, width))
    scores = torch.einsum("nhd,kd->nhk", _rotated(q, positions[start:], config), keys) * width**-0.5
    sink = attention.sink.double().view(1, -1, 1).expand(x.shape[0], -1, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    out = _rotated(weights @ keys, positions[start:], config, sign=-1.0)
    grouped = out.flatten(1).unflatten(1, (config.o_groups, -1))
    wo_a = attention.wo_a.weight.double().unflatten(0, (config.o_groups, -1))
    return torch.einsum("ngi,goi->ngo", grouped, wo_a).flatten(1) @ attention.wo_b.weight.double().T


def _mixes(
    site: HyperConnection, config: DeepseekV41Config, streams: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    m, eps = config.hc_mult, config.hc_eps
    flat = streams.flatten(1)
    z = flat @ site.project.weight.double().T / (flat.square().mean(1, True) + config.rms_norm_eps).sqrt()
    z = z * site.scale.double() + site.base.double()
    comb = z[:, 2 * m :].unflatten(1, (m, m)).softmax(-1) + eps
    comb = comb / (comb.sum(1, True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, True) + eps)
        comb = comb / (comb.sum(1, True) + eps)
    return z[:, :m].sigmoid() + eps, 2 * z[:, m : 2 * m].sigmoid(), comb


def _experts(moe: MoE, config: DeepseekV41Config, x: Tensor) -> Tensor:
    score = torch.nn.functional.softplus(x @ moe.gate.weight.double().T).sqrt()
    chosen = (score + moe.bias.double()).topk(config.dspark_num_experts_per_tok).indices
    weights = score.gather(1, chosen)
    weights = weights / weights.sum(1, True) * config.routed_scaling_factor

    def expert(x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        gate, up = (x @ w13.double().T).chunk(2, -1)
        limit = config.swiglu_limit
        inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return (inner * weight) @ w2.double().T

    rows = []
    for row, ids, row_weights in zip(x, chosen.tolist(), weights, strict=True):
        parts = [
            expert(row, moe.experts.w13[e], moe.experts.w2[e], w)
            for e, w in zip(ids, row_weights, strict=True)
        ]
        rows.append(sum(parts) + expert(row, moe.shared_w13.weight, moe.shared_w2.weight))
    return torch.stack(rows)
