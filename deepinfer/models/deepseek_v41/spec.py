"""The caches that DeepSeek-V4.1 needs, derived from its configuration."""

from __future__ import annotations

from deepinfer.models.base import CompressionSpec, ModelSpec, PagedSpec, WindowSpec
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.work import attention_terms, flops_per_token, values_per_row
from deepinfer.runtime.caches import SCORE_BYTES


def model_spec(config: DeepseekV41Config) -> ModelSpec:
    """Window rings of every layer, the drafter's last, and what the KV sources own.

    The drafter's rings are part of the spec whether or not it is used, so a state slot has one layout.
    """
    sources = [(layer_id, config.ratio(layer_id)) for layer_id in config.kv_source_layer_ids]
    layer_ids = [*range(config.num_hidden_layers), *config.draft_layer_ids]
    return ModelSpec(
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        first_decoder_layer=config.first_decoder_layer,
        max_ngram=config.engram_max_ngram_size if config.engram_layer_ids else 0,
        draft_block_size=config.dspark_block_size if config.num_nextn_predict_layers else 0,
        windows=tuple(WindowSpec(layer_id, config.sliding_window, config.head_dim) for layer_id in layer_ids),
        paged=tuple(
            PagedSpec(layer_id, ratio, config.head_dim, config.index_head_dim) for layer_id, ratio in sources
        ),
        compression=tuple(
            CompressionSpec(layer_id, ratio, config.head_dim) for layer_id, ratio in sources if ratio > 1
        ),
        attention_terms=attention_terms(config),
        flops_per_token=flops_per_token(config),
        values_per_row=values_per_row(config),
        scratch_bytes=SCORE_BYTES,
    )
