"""Rules that a DeepSeek-V4.1 configuration must satisfy; a refusal names key, value and what is supported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deepinfer.checkpoint.errors import ConfigError
from deepinfer.checkpoint.json_fields import dotted

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.config import DeepseekV41Config, VisionConfig

ARCHITECTURE = "DeepseekV41ForCausalLM"

_FIXED_TEXT_VALUES: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 512,  # the cache records hold 512 channels
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,  # an index key record holds 128 channels
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hc_mult": 4,
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
}
_FIXED_QUANTIZATION_VALUES: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": (32, 32),
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_POSITIVE_TEXT_VALUES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank o_lora_rank o_groups "
    "swiglu_limit moe_intermediate_size n_routed_experts num_experts_per_tok routed_scaling_factor "
    "rms_norm_eps max_position_embeddings rope_theta compress_rope_theta sliding_window "
    "index_n_heads index_topk candidate_topk_blocks hc_sinkhorn_iters hc_eps engram_vocab_size "
    "engram_n_heads engram_head_dim engram_compressed_vocab_size"
).split()
_POSITIVE_DRAFTER_VALUES = (
    "dspark_block_size dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok"
).split()


def check_identity(data: Mapping[str, Any]) -> None:
    """Check the top-level keys that say which model this is, before anything else is read."""
    _expect("architectures", data.get("architectures"), [[ARCHITECTURE]])
    _expect("model_type", data.get("model_type"), ["deepseek_v41"])
    _expect("dtype", data.get("dtype", data.get("torch_dtype")), ["bfloat16"])
    _expect("tie_word_embeddings", data.get("tie_word_embeddings", False), [False])


def check(config: DeepseekV41Config) -> None:
    """Check every rule; ConfigError at the first that does not hold."""
    for key, value in _FIXED_TEXT_VALUES.items():
        _expect(f"text_config.{key}", getattr(config, key), [value])
    for key in _POSITIVE_TEXT_VALUES:
        _expect_positive(config, key)
    _expect("tokenizer_compatibility", config.tokenizer_compatibility, ["release", "native"])
    _check_heads_and_experts(config)
    _check_yarn(config)
    _check_layers(config)
    _check_candidates(config)
    _check_engram(config)
    _check_drafter(config)
    _check_token_ids(config)
    if config.vision is not None:
        _check_vision(config.vision)
    if config.quantization is not None:
        _check_quantization(config)


def _check_heads_and_experts(config: DeepseekV41Config) -> None:
    if config.num_attention_heads % config.o_groups:
        _refuse("o_groups", config.o_groups, f"a divisor of num_attention_heads={config.num_attention_heads}")
    if config.num_experts_per_tok > config.n_routed_experts:
        _refuse(
            "num_experts_per_tok",
            config.num_experts_per_tok,
            f"at most n_routed_experts={config.n_routed_experts}",
        )


def _check_yarn(config: DeepseekV41Config) -> None:
    yarn = config.yarn
    for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        if getattr(yarn, key) <= 0:
            _refuse(f"rope_scaling.{key}", getattr(yarn, key), "a positive number")
    if yarn.beta_fast <= yarn.beta_slow:
        _refuse("rope_scaling.beta_fast", yarn.beta_fast, f"a number above beta_slow={yarn.beta_slow}")


def _check_layers(config: DeepseekV41Config) -> None:
    """The ratios and the two source lists; every layer must find a source of its own ratio."""
    num_layers = config.num_hidden_layers
    ratios = config.compress_ratios
    if config.num_nextn_predict_layers < 0:
        _refuse("num_nextn_predict_layers", config.num_nextn_predict_layers, "0 or more")
    if len(ratios) != num_layers + config.num_nextn_predict_layers:
        _refuse(
            "compress_ratios",
            list(ratios),
            f"{num_layers + config.num_nextn_predict_layers} entries, num_hidden_layers + "
            f"num_nextn_predict_layers; got {len(ratios)}",
        )
    if not set(ratios) <= {0, 1, 2}:
        _refuse("compress_ratios", list(ratios), "entries 0, 1 and 2")
    if any(ratios[num_layers:]):
        _refuse("compress_ratios", list(ratios), "0 for every drafter layer")
    if 1 not in ratios:
        _refuse("compress_ratios", list(ratios), "at least one entry 1, where the decoder half begins")
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_layer_list(key, getattr(config, key), num_layers)
        for layer_id in getattr(config, key):
            if ratios[layer_id] == 0:
                _refuse(
                    key,
                    list(getattr(config, key)),
                    f"layers with a compress_ratio above 0; layer {layer_id} has 0",
                )
    if not set(config.kv_source_layer_ids) <= set(config.index_source_layer_ids):
        _refuse(
            "index_source_layer_ids",
            list(config.index_source_layer_ids),
            "every layer of kv_source_layer_ids",
        )
    if config.index_k_source_layer_ids not in (None, config.kv_source_layer_ids):
        _refuse(
            "index_k_source_layer_ids",
            list(config.index_k_source_layer_ids),
            "the value of kv_source_layer_ids",
        )
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        sources = getattr(config, key)
        for layer_id in range(num_layers):
            if ratios[layer_id] and layer_id < sources[0]:
                _refuse(
                    key,
                    list(sources),
                    f"a source at or before layer {layer_id}, whose compress_ratio is not 0",
                )
    for layer_id in range(num_layers):
        source = config.kv_source(layer_id)
        if source is not None and ratios[source] != ratios[layer_id]:
            _refuse(
                "compress_ratios",
                list(ratios),
                f"the same ratio in a layer and its KV source; layer {layer_id} has {ratios[layer_id]}, "
                f"its source {source} has {ratios[source]}",
            )
    # Rows of decoder layers may be skipped in a prefill only because their KV comes from one layer.
    decoder_sources = [s for s in config.kv_source_layer_ids if s >= config.first_decoder_layer]
    if decoder_sources != [config.first_decoder_layer]:
        _refuse(
            "kv_source_layer_ids",
            list(config.kv_source_layer_ids),
            f"exactly one source from layer {config.first_decoder_layer} on: the first of ratio 1 itself",
        )


def _check_candidates(config: DeepseekV41Config) -> None:
    _expect("text_config.candidate_block_size", config.candidate_block_size, [8, 16])
    source = config.candidate_source_layer_id
    if source is not None and (
        source not in config.index_source_layer_ids or source < config.first_decoder_layer
    ):
        supported = [s for s in config.index_source_layer_ids if s >= config.first_decoder_layer]
        _refuse("candidate_source_layer_id", source, f"null or one of {supported}")


def _check_engram(config: DeepseekV41Config) -> None:
    if config.engram_max_ngram_size < 2:
        _refuse("engram_max_ngram_size", config.engram_max_ngram_size, "2 or more")
    if config.engram_layer_ids:
        _check_layer_list("engram_layer_ids", config.engram_layer_ids, config.num_hidden_layers)
    if config.engram_compressed_vocab_size > config.vocab_size:
        _refuse(
            "engram_compressed_vocab_size",
            config.engram_compressed_vocab_size,
            f"<= vocab_size={config.vocab_size}",
        )
    if config.engram_num_embeddings != config.engram.num_rows:
        _refuse(
            "engram_num_embeddings",
            list(config.engram_num_embeddings),
            f"{list(config.engram.num_rows)}, the sums of the primes that engram_vocab_size, engram_n_heads, "
            "engram_max_ngram_size and engram_layer_ids give",
        )


def _check_drafter(config: DeepseekV41Config) -> None:
    if config.num_nextn_predict_layers == 0:
        return
    for key in _POSITIVE_DRAFTER_VALUES:
        _expect_positive(config, key)
    if config.dspark_num_experts_per_tok > config.dspark_n_routed_experts:
        _refuse(
            "dspark_num_experts_per_tok",
            config.dspark_num_experts_per_tok,
            f"at most dspark_n_routed_experts={config.dspark_n_routed_experts}",
        )
    _check_layer_list("dspark_target_layer_ids", config.dspark_target_layer_ids, config.num_hidden_layers)
    temperatures = config.dspark_sts_temperatures
    if temperatures is not None and (len(temperatures) != config.dspark_block_size or min(temperatures) <= 0):
        raise ConfigError(
            "dspark_sts_temperatures",
            f"{list(temperatures)} is not supported; supported: {config.dspark_block_size} positive numbers",
        )


def _check_token_ids(config: DeepseekV41Config) -> None:
    text_keys = ("engram_pad_token_id", "dspark_noise_token_id")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", *text_keys):
        if not 0 <= getattr(config, key) < config.vocab_size:
            where = "text_config" if key in text_keys else ""
            _refuse(key, getattr(config, key), f"an id in [0, vocab_size={config.vocab_size})", where)


def _check_vision(vision: VisionConfig) -> None:
    for key in (
        "num_hidden_layers hidden_size num_attention_heads intermediate_size patch_size rope_theta "
        "downsample_ratio max_image_tokens min_pixels"
    ).split():
        _expect_positive(vision, key, "vision_config")
    if vision.hidden_size % vision.num_attention_heads:
        _refuse(
            "num_attention_heads", vision.num_attention_heads, "a divisor of hidden_size", "vision_config"
        )


def _check_quantization(config: DeepseekV41Config) -> None:
    for key, value in _FIXED_QUANTIZATION_VALUES.items():
        _expect(f"quantization_config.{key}", getattr(config.quantization, key), [value])
    # Activations and FP4 weights are scaled in groups of 32 along the summed dimension.
    for key in ("hidden_size", "q_lora_rank", "moe_intermediate_size", "engram_head_dim"):
        if getattr(config, key) % 32:
            _refuse(key, getattr(config, key), "a multiple of 32 in a quantised checkpoint")
    if config.o_groups * config.o_lora_rank % 32:
        _refuse(
            "o_lora_rank",
            config.o_lora_rank,
            "o_groups * o_lora_rank a multiple of 32 in a quantised checkpoint",
        )


def _check_layer_list(key: str, layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Layer ids must be given, ascending, distinct and in range."""
    in_range = all(0 <= layer_id < num_layers for layer_id in layer_ids)
    if not layer_ids or not in_range or list(layer_ids) != sorted(set(layer_ids)):
        _refuse(key, list(layer_ids), f"one or more ascending, distinct layer ids in [0, {num_layers})")


def _expect_positive(record: Any, key: str, where: str = "text_config") -> None:
    if not getattr(record, key) > 0:
        _refuse(key, getattr(record, key), "a positive number", where)


def _expect(key: str, value: Any, supported: Iterable[Any]) -> None:
    """Refuse a value that is not one of those supported."""
    if value not in supported:
        shown = ", ".join(repr(_plain(item)) for item in supported)
        raise ConfigError(key, f"{_plain(value)!r} is not supported; supported: {shown}")


def _refuse(key: str, value: Any, supported: str, where: str = "text_config") -> None:
    raise ConfigError(dotted(where, key), f"{value!r} is not supported; supported: {supported}")


def _plain(value: Any) -> Any:
    """Tuples as the lists that stand in the JSON file."""
    return list(value) if isinstance(value, tuple) else value
