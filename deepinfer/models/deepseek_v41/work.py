"""Work of a forward in FLOPs, as the scheduler weighs it; a multiply-add counts 2.

Estimates of the mathematics, not of a kernel: norms, mixes of the residual streams and rotations are left
out, they are small beside the products.
"""

from __future__ import annotations

from collections import Counter

from deepinfer.models.base import AttentionTerm
from deepinfer.models.deepseek_v41.config import DeepseekV41Config, LayerKind


def values_per_row(config: DeepseekV41Config) -> int:
    """Activations of a row in the widest place of a layer: streams, then queries and outputs, or experts."""
    streams = 3 * config.hc_mult * config.hidden_size
    attention = (
        2 * config.num_attention_heads * config.head_dim + config.index_n_heads * config.index_head_dim
    )
    slots = config.num_experts_per_tok + config.n_shared_experts
    experts = slots * (2 * config.moe_intermediate_size + config.hidden_size)
    return streams + max(attention, experts)


def attention_terms(config: DeepseekV41Config) -> tuple[AttentionTerm, ...]:
    """Work of a query that depends on how many tokens it sees, summed over the backbone's layers.

    Per visible key, attention takes two products of `head_dim` for each head; an indexer takes one product of
    `index_head_dim` for each of its heads and entries. With t tokens visible a query sees min(t, window) of
    the window, min(t // ratio, top-k) selected entries, and scores t // ratio entries, or those of at most C
    candidate blocks of B entries.
    """
    per_key = 4.0 * config.num_attention_heads * config.head_dim
    per_score = 2.0 * config.index_n_heads * config.index_head_dim
    flops: Counter[tuple[int, int, int]] = Counter()  # (divisor, offset, cap) -> FLOPs
    for layer_id in range(config.num_hidden_layers):
        flops[1, 0, config.sliding_window] += per_key
        ratio = config.ratio(layer_id)
        if ratio == 0:
            continue
        flops[ratio, 0, config.index_topk] += per_key
        if config.layer_kind(layer_id) is LayerKind.REUSE:
            continue
        if config.is_restricted(layer_id):
            size = config.candidate_block_size
            term = (ratio * size, ratio * (size - 1), config.candidate_topk_blocks)
            flops[term] += per_score * size
        else:
            flops[ratio, 0, config.max_position_embeddings] += per_score
    return tuple(AttentionTerm(value, *term) for term, value in flops.items())


def flops_per_token(config: DeepseekV41Config) -> float:
    """Work of the products with weights that every row goes through, without the head."""
    hidden, heads_width = config.hidden_size, config.num_attention_heads * config.head_dim
    output_width = config.o_groups * config.o_lora_rank
    attention = (
        hidden * (config.q_lora_rank + config.head_dim)
        + config.q_lora_rank * heads_width
        + heads_width * config.o_lora_rank
        + output_width * hidden
    )
    num_experts = config.num_experts_per_tok + config.n_shared_experts
    experts = 3 * num_experts * hidden * config.moe_intermediate_size + hidden * config.n_routed_experts
    weights = config.num_hidden_layers * (attention + experts)
    for layer_id in config.kv_source_layer_ids:
        weights += (2 if config.ratio(layer_id) > 1 else 1) * hidden * config.head_dim
        weights += config.head_dim * config.index_head_dim
    weights += (
        len(config.index_source_layer_ids)
        * config.index_n_heads
        * (config.q_lora_rank * config.index_head_dim + hidden)
    )
    table_width = config.engram_num_columns * config.engram_head_dim
    weights += len(config.engram_layer_ids) * table_width * (config.hc_mult + 1) * hidden
    return 2.0 * weights
