"""The attention of all layers written out densely: whole sequences, float64, no caches, no index lists.

Only weight matrices are taken from the modules. Cache rounding goes through `deepinfer.ops.quant`, which has
golden tests of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.ops.quant import round_fp4, round_fp8, round_mxfp4


def dense_outputs(
    attentions: Sequence[Attention], config: DeepseekV41Config, inputs: Tensor, rounded: bool
) -> Tensor:
    """Outputs of every layer at every position of one sequence.

    Args:
        attentions: modules by layer.
        config: the model.
        inputs: [layers, length, hidden].
        rounded: caches and index queries are rounded to their formats.

    Returns:
        [layers, length, hidden] float64.
    """
    outputs, owned, chosen, candidates = [], {}, None, None
    for layer_id, attention in enumerate(attentions):
        x = inputs[layer_id].double()
        ratio = config.ratio(layer_id)
        frequencies = _frequencies(config, yarn=ratio > 0)
        length = x.shape[0]
        positions = torch.arange(length)
        eps = config.rms_norm_eps
        latent = _norm(x @ attention.wq_a.weight.double().T, attention.q_norm.weight, eps)
        if attention.compressor is not None:
            owned[layer_id] = _entries(attention, x, ratio, frequencies, eps, rounded)
        if attention.indexer is not None:
            keys = owned[config.kv_source(layer_id)][1]
            scores = _scores(attention, x, latent, keys, positions, frequencies, rounded)
            visible = torch.arange(keys.shape[0]) < ((positions + 1) // ratio)[:, None]
            if config.builds_candidates(layer_id):
                candidates = _candidates(scores, visible, config)
            allowed = visible & candidates if config.is_restricted(layer_id) else visible
            chosen = _best(scores, allowed, config.index_topk)
        q = (latent @ attention.wq_b.weight.double().T).view(length, config.num_attention_heads, -1)
        q = _rotate(q, positions, frequencies)
        kv = _norm(x @ attention.wkv.weight.double().T, attention.kv_norm.weight, eps)
        kv = _round(_rotate(kv[:, None], positions, frequencies)[:, 0], round_fp8, rounded)
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < config.sliding_window)
        if ratio > 0:
            kv = torch.cat([kv, owned[config.kv_source(layer_id)][0]])
            seen = torch.cat([seen, chosen], dim=1)
        logits = torch.einsum("qhd,kd->qhk", q, kv) * q.shape[-1] ** -0.5
        weights = torch.where(seen[:, None], logits.exp(), 0.0)
        total = attention.sink.double().exp()[:, None] + weights.sum(-1, keepdim=True)
        out = _rotate(torch.einsum("qhk,kd->qhd", weights / total, kv), -positions, frequencies)
        grouped = out.reshape(length, config.o_groups, -1)
        wo_a = attention.wo_a.weight.double().view(config.o_groups, config.o_lora_rank, -1)
        mixed = torch.einsum("qgi,goi->qgo", grouped, wo_a).flatten(1)
        outputs.append(mixed @ attention.wo_b.weight.double().T)
    return torch.stack(outputs)


def _entries(
    attention: Attention, x: Tensor, ratio: int, frequencies: Tensor, eps: float, rounded: bool
) -> tuple[Tensor, Tensor]:
    """Compressed KV [groups, width] and index keys [groups, index width]."""
    num_groups = x.shape[0] // ratio
    project = attention.compressor.project.weight.double()
    groups = x[: num_groups * ratio].unflatten(0, (num_groups, ratio))
    if ratio == 1:
        pooled = groups[:, 0] @ project.T
    else:
        gate, value = project.chunk(2)
        pooled = ((groups @ gate.T).softmax(dim=1) * (groups @ value.T)).sum(1)
    latent = _norm(pooled, attention.compressor.norm.weight, eps)
    first = torch.arange(num_groups) * ratio
    main = _rotate(latent[:, None], first, frequencies)[:, 0]
    keys = _norm(latent @ attention.index_keys.wk.weight.double().T, attention.index_keys.norm.weight, eps)
    keys = _rotate(keys[:, None], first, frequencies)[:, 0]
    return _round(main, round_fp4, rounded), _round(keys, round_mxfp4, rounded)


def _scores(
    attention: Attention,
    x: Tensor,
    latent: Tensor,
    keys: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    rounded: bool,
) -> Tensor:
    """[length, groups] index scores."""
    indexer = attention.indexer
    weights = x @ indexer.weights_proj.weight.double().T
    queries = (latent @ indexer.wq_b.weight.double().T).view(x.shape[0], weights.shape[1], -1)
    queries = _round(_rotate(queries, positions, frequencies), round_mxfp4, rounded)
    return (torch.einsum("qhd,kd->qhk", queries, keys).relu() * weights[..., None]).sum(1)


def _candidates(scores: Tensor, visible: Tensor, config: DeepseekV41Config) -> Tensor:
    """[length, groups] bool: entries of each query's candidate blocks."""
    kept = torch.zeros_like(visible)
    size = config.candidate_block_size
    for query in range(scores.shape[0]):
        count = int(visible[query].sum())
        blocks = [
            scores[query, start : min(start + size, count)].max().item() for start in range(0, count, size)
        ]
        if blocks:
            blocks[-1] = math.inf
        order = sorted(range(len(blocks)), key=lambda block: (-blocks[block], block))
        for block in order[: config.candidate_topk_blocks]:
            kept[query, block * size : (block + 1) * size] = True
    return kept


def _best(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    """[length, groups] bool: the k best allowed entries of each query, ties to the lower one."""
    chosen = torch.zeros_like(allowed)
    for query in range(scores.shape[0]):
        entries = allowed[query].nonzero().flatten().tolist()
        best = sorted(entries, key=lambda entry: (-scores[query, entry].item(), entry))[:k]
        chosen[query, best] = True
    return chosen


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Multiply channel pairs of the tail of [n, heads, width] by exp(i * position * frequency)."""
    width = 2 * frequencies.shape[0]
    angle = (positions.float()[:, None] * frequencies.float()).double()  # the angle is a float32 product
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (width // 2, 2)).contiguous())
    return torch.cat([x[..., :-width], torch.view_as_real(pairs * turn).flatten(-2)], dim=-1)


def _round(x: Tensor, function, rounded: bool) -> Tensor:
    return function(x.float()).double() if rounded else x


def _frequencies(config: DeepseekV41Config, yarn: bool) -> Tensor:
    """Angles per position of the channel pairs."""
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if yarn else config.rope_theta
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if not yarn:
        return torch.tensor(plain)

    def corner(turns: float) -> float:
        return (
            width
            * math.log(config.yarn.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(corner(config.yarn.beta_fast)), 0)
    high = min(math.ceil(corner(config.yarn.beta_slow)), width - 1)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(width // 2)]
    return torch.tensor([f / config.yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)])
