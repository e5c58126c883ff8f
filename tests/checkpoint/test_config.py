"""Configuration: what is read, what follows from it, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.checkpoint.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import DeepseekV41Config, LayerKind
from deepinfer.models.registry import model_family
from tests.checkpoint.configs import RELEASE, REMOVED, edited, tiny_quant_config
from tests.support.paths import V41_TINY


def read(config: dict[str, Any], **edits: Any) -> DeepseekV41Config:
    return DeepseekV41Config.from_dict(edited(config, **edits))


def test_release_values() -> None:
    config = read(RELEASE)
    assert (config.vocab_size, config.hidden_size, config.rms_norm_eps) == (129280, 5120, 1e-20)
    assert config.rope_theta == 10000.0
    assert isinstance(config.rope_theta, float)
    assert config.yarn.factor == 16
    assert config.yarn.original_max_position_embeddings == 65536
    assert config.vision.min_pixels == 544**2
    assert config.quantization.weight_block_size == (32, 32)
    assert config.tokenizer_compatibility == "release"
    with pytest.raises(AttributeError):
        config.hidden_size = 1  # frozen


def test_release_layers() -> None:
    """The table of the specification: kind, KV source and selection source of the 43 layers."""
    config = read(RELEASE)
    assert config.first_decoder_layer == 20
    assert list(config.draft_layer_ids) == [40, 41, 42]
    window, full, reindex, reuse = LayerKind.WINDOW, LayerKind.FULL, LayerKind.REINDEX, LayerKind.REUSE
    runs = [
        (range(0, 2), window, None, None),
        *[(range(s, s + 1), full, s, s) for s in (2, 8, 14, 20)],
        *[(range(s + 1, s + 6), reuse, s, s) for s in (2, 8, 14)],
        (range(21, 24), reuse, 20, 20),
        *[(range(s, s + 1), reindex, 20, s) for s in (24, 28, 32, 36)],
        *[(range(s + 1, s + 4), reuse, 20, s) for s in (24, 28, 32, 36)],
        (range(40, 43), window, None, None),
    ]
    seen = set()
    for layer_ids, kind, kv_source, index_source in runs:
        for layer_id in layer_ids:
            seen.add(layer_id)
            assert config.layer_kind(layer_id) is kind, layer_id
            assert config.kv_source(layer_id) == config.index_k_source(layer_id) == kv_source, layer_id
            assert config.index_source(layer_id) == index_source, layer_id
            assert config.uses_yarn(layer_id) == (kind is not window), layer_id
            assert config.builds_candidates(layer_id) == (layer_id == 20), layer_id
            assert config.is_restricted(layer_id) == (kind is reindex), layer_id
    assert seen == set(range(43))


def test_tiny_models() -> None:
    quant = read(tiny_quant_config())
    assert [quant.layer_kind(layer_id).value for layer_id in range(10)] == (
        "window full reuse full full reuse reindex reuse window window".split()
    )
    assert quant.vision is None
    trained = DeepseekV41Config.from_dict(json.loads((V41_TINY / "config.json").read_text()))
    assert trained.tokenizer_compatibility == "native"
    assert trained.dspark_sts_temperatures == (1.5849, 1.122, 1.0, 1.2589, 1.2589)
    assert trained.engram_num_columns == 6


def test_optional_keys() -> None:
    config = edited(
        RELEASE,
        vision_config=REMOVED,
        quantization_config__activation_scheme=REMOVED,
        text_config__attention_bias=REMOVED,
        text_config__attention_dropout=REMOVED,
        text_config__made_up_key=[1, {}],
        made_up_key="x",
        tie_word_embeddings=REMOVED,
        tokenizer_compatibility="native",
        text_config__index_k_source_layer_ids=[2, 8, 14, 20],
        text_config__hc_shifted=True,
        text_config__dspark_sts_temperatures=[1, 1, 1, 2, 2],
    )
    read_config = DeepseekV41Config.from_dict(config)
    assert read_config.vision is None
    assert read_config.quantization.activation_scheme == "dynamic"
    assert read_config.tokenizer_compatibility == "native"
    assert read_config.dspark_sts_temperatures == (1.0, 1.0, 1.0, 2.0, 2.0)
    assert read(RELEASE, quantization_config=REMOVED).quantization is None
    assert read(RELEASE, vision_config={"num_hidden_layers": 0}).vision is None
    assert read(RELEASE, text_config__candidate_source_layer_id=None).is_restricted(24) is False
    assert read(RELEASE, dtype=REMOVED, torch_dtype="bfloat16").vocab_size == 129280


def test_rope_scaling_spellings() -> None:
    scaling = {k: v for k, v in RELEASE["text_config"]["rope_scaling"].items() if k != "type"}
    expected = read(RELEASE).yarn
    assert read(RELEASE, text_config__rope_scaling={**scaling, "rope_type": "yarn"}).yarn == expected
    renamed = {
        "text_config__rope_scaling": REMOVED,
        "text_config__rope_parameters": {**scaling, "type": "yarn"},
    }
    assert read(RELEASE, **renamed).yarn == expected


def test_no_drafter() -> None:
    config = edited(
        RELEASE,
        text_config__num_nextn_predict_layers=0,
        text_config__compress_ratios=[0, 0] + [2] * 18 + [1] * 20,
    )
    for key in [key for key in config["text_config"] if key.startswith("dspark")]:
        del config["text_config"][key]
    assert list(DeepseekV41Config.from_dict(config).draft_layer_ids) == []


def test_no_engram() -> None:
    config = read(RELEASE, text_config__engram_layer_ids=[], text_config__engram_num_embeddings=[])
    assert config.engram.num_rows == ()


@pytest.mark.parametrize("section", ["", "text_config", "vision_config", "quantization_config"])
def test_every_missing_key_is_named(section: str) -> None:
    optional = {
        "attention_bias", "attention_dropout", "initializer_range", "tie_word_embeddings", "max_wh_ratio",
        "vision_config", "quantization_config", "activation_scheme",
    }  # fmt: skip
    place = RELEASE[section] if section else RELEASE
    keys = [key for key in place if key not in optional]
    assert len(keys) >= 5
    for key in keys:
        name = f"{section}__{key}" if section else key
        with pytest.raises(ConfigError) as refusal:
            read(RELEASE, **{name: REMOVED})
        assert refusal.value.key.startswith(name.replace("__", ".")), (key, str(refusal.value))
        assert key in str(refusal.value)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            ["architectures", "LlamaForCausalLM", "DeepseekV41ForCausalLM"],
        ),
        ({"architectures": ["DeepseekV41ForCausalLM"] * 2}, ["architectures"]),
        ({"model_type": "llama"}, ["model_type", "'llama'", "deepseek_v41"]),
        ({"dtype": "float16"}, ["dtype", "float16", "bfloat16"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings", "True", "False"]),
        ({"tokenizer_compatibility": "other"}, ["tokenizer_compatibility", "other", "release", "native"]),
        ({"eos_token_id": 129280}, ["eos_token_id", "129280", "vocab_size"]),
        ({"image_token_id": -1}, ["image_token_id", "-1"]),
        ({"text_config": []}, ["text_config", "object"]),
        ({"text_config__num_key_value_heads": 2}, ["text_config.num_key_value_heads", "2", "supported: 1"]),
        ({"text_config__head_dim": 256}, ["head_dim", "256", "512"]),
        ({"text_config__qk_rope_head_dim": 32}, ["qk_rope_head_dim", "32", "64"]),
        ({"text_config__index_head_dim": 64}, ["index_head_dim", "64", "128"]),
        ({"text_config__hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"text_config__n_shared_experts": 2}, ["n_shared_experts", "2"]),
        ({"text_config__scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "sqrtsoftplus"]),
        ({"text_config__topk_method": "greedy"}, ["topk_method", "greedy", "noaux_tc"]),
        ({"text_config__norm_topk_prob": False}, ["norm_topk_prob", "False"]),
        ({"text_config__attention_bias": True}, ["attention_bias", "True"]),
        ({"text_config__attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({"text_config__hc_mult": 2}, ["hc_mult", "2", "4"]),
        ({"text_config__hc_shifted": False}, ["hc_shifted", "False"]),
        ({"text_config__use_fp4_sparse_kv": False}, ["use_fp4_sparse_kv"]),
        ({"text_config__dspark_target_attn_input": False}, ["dspark_target_attn_input"]),
        ({"text_config__hidden_size": 0}, ["hidden_size", "0", "positive"]),
        ({"text_config__hidden_size": 5120.0}, ["hidden_size", "integer", "5120.0"]),
        ({"text_config__hidden_size": True}, ["hidden_size", "integer"]),
        ({"text_config__hidden_size": "5120"}, ["hidden_size", "integer"]),
        ({"text_config__hidden_size": 5121}, ["hidden_size", "multiple of 32"]),
        ({"text_config__moe_intermediate_size": 2305}, ["moe_intermediate_size", "multiple of 32"]),
        ({"text_config__rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"text_config__rms_norm_eps": None}, ["rms_norm_eps", "number"]),
        ({"text_config__swiglu_limit": -1.0}, ["swiglu_limit", "-1.0"]),
        ({"text_config__o_groups": 7}, ["o_groups", "7", "num_attention_heads=64"]),
        ({"text_config__num_experts_per_tok": 385}, ["num_experts_per_tok", "385", "384"]),
        ({"text_config__sliding_window": 0}, ["sliding_window", "0"]),
        ({"text_config__rope_scaling__type": "linear"}, ["rope_type", "linear", "yarn"]),
        ({"text_config__rope_scaling__factor": 0}, ["rope_scaling.factor", "0"]),
        ({"text_config__rope_scaling__beta_fast": 0.5}, ["rope_scaling.beta_fast", "beta_slow"]),
        ({"text_config__compress_ratios": [0] * 42}, ["compress_ratios", "43 entries", "42"]),
        ({"text_config__compress_ratios": [0, 0] + [4] * 38 + [0] * 3}, ["compress_ratios", "0, 1 and 2"]),
        ({"text_config__compress_ratios": [0, 0] + [2] * 38 + [0] * 3}, ["compress_ratios", "one entry 1"]),
        ({"text_config__compress_ratios": [0, 0] + [2] * 18 + [1] * 23}, ["compress_ratios", "drafter"]),
        (
            {"text_config__compress_ratios": [0, 0] + [2] * 17 + [1] * 21 + [0] * 3},
            ["compress_ratios", "layer 19"],
        ),
        (
            {"text_config__compress_ratios": [0, 2] + [2] * 18 + [1] * 20 + [0] * 3},
            ["kv_source_layer_ids", "layer 1"],
        ),
        ({"text_config__kv_source_layer_ids": [0, 2, 8, 14, 20]}, ["kv_source_layer_ids", "layer 0"]),
        ({"text_config__kv_source_layer_ids": [2, 14, 8, 20]}, ["kv_source_layer_ids", "ascending"]),
        ({"text_config__kv_source_layer_ids": [2, 8, 14, 40]}, ["kv_source_layer_ids", "[0, 40)"]),
        ({"text_config__kv_source_layer_ids": []}, ["kv_source_layer_ids"]),
        (
            {"text_config__kv_source_layer_ids": [2, 8, 14, 20, 21]},
            ["index_source_layer_ids", "kv_source_layer_ids"],
        ),
        (
            {"text_config__kv_source_layer_ids": [2, 8, 14, 20, 24]},
            ["kv_source_layer_ids", "exactly one source"],
        ),
        ({"text_config__kv_source_layer_ids": [2, 8, 14]}, ["compress_ratios", "layer 20"]),
        (
            {"text_config__index_k_source_layer_ids": [2, 20]},
            ["index_k_source_layer_ids", "kv_source_layer_ids"],
        ),
        ({"text_config__candidate_source_layer_id": 14}, ["candidate_source_layer_id", "14", "20, 24, 28"]),
        ({"text_config__candidate_source_layer_id": 21}, ["candidate_source_layer_id", "21"]),
        ({"text_config__candidate_block_size": 4}, ["candidate_block_size", "4", "8, 16"]),
        (
            {"text_config__engram_num_embeddings": [384006168, 384016683]},
            ["engram_num_embeddings", "384016682"],
        ),
        ({"text_config__engram_layer_ids": [1, 40]}, ["engram_layer_ids", "40"]),
        ({"text_config__engram_max_ngram_size": 1}, ["engram_max_ngram_size", "1"]),
        ({"text_config__engram_compressed_vocab_size": 129281}, ["engram_compressed_vocab_size", "129281"]),
        ({"text_config__engram_pad_token_id": 129280}, ["text_config.engram_pad_token_id", "129280"]),
        ({"text_config__num_nextn_predict_layers": -1}, ["num_nextn_predict_layers", "-1"]),
        ({"text_config__dspark_block_size": 0}, ["dspark_block_size", "0"]),
        ({"text_config__dspark_num_experts_per_tok": 129}, ["dspark_num_experts_per_tok", "129", "128"]),
        ({"text_config__dspark_target_layer_ids": [37, 38, 40]}, ["dspark_target_layer_ids", "40"]),
        ({"text_config__dspark_noise_token_id": 129280}, ["text_config.dspark_noise_token_id", "129280"]),
        ({"dspark_sts_temperatures": [1.0] * 4}, ["dspark_sts_temperatures", "5 positive"]),
        ({"dspark_sts_temperatures": [1.0] * 4 + [0.0]}, ["dspark_sts_temperatures", "5 positive"]),
        (
            {"dspark_sts_temperatures": [1.0] * 5, "text_config__dspark_sts_temperatures": [2.0] * 5},
            ["dspark_sts_temperatures", "differs"],
        ),
        ({"quantization_config__quant_method": "awq"}, ["quantization_config.quant_method", "awq", "fp8"]),
        ({"quantization_config__fmt": "e5m2"}, ["quantization_config.fmt", "e5m2", "e4m3"]),
        ({"quantization_config__activation_scheme": "static"}, ["activation_scheme", "static", "dynamic"]),
        (
            {"quantization_config__weight_block_size": [128, 128]},
            ["weight_block_size", "[128, 128]", "[32, 32]"],
        ),
        ({"quantization_config__scale_fmt": "float"}, ["scale_fmt", "float", "ue8m0"]),
        ({"quantization_config__expert_dtype": "fp8"}, ["expert_dtype", "fp8", "fp4"]),
        ({"vision_config__num_attention_heads": 15}, ["vision_config.num_attention_heads", "15"]),
        ({"vision_config__patch_size": 0}, ["vision_config.patch_size", "0"]),
    ],
)
def test_refusals_name_key_value_and_support(edits: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(RELEASE, **edits)
    for word in words:
        assert word in str(refusal.value)
    assert isinstance(refusal.value, CheckpointError)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    "names", [None, [], ["Other"], "DeepseekV41ForCausalLM", ["DeepseekV41ForCausalLM"] * 2]
)
def test_registry_refuses_by_name(names: object) -> None:
    with pytest.raises(ConfigError, match=r"architectures.*DeepseekV41ForCausalLM"):
        model_family({"architectures": names})
