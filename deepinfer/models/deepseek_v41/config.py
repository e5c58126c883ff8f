"""Typed configuration of DeepSeek-V4.1: the proved keys of `config.json` and what follows from them.

Field names are the checkpoint's own. The rules that values must satisfy stand in `config_rules.py`.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepinfer.checkpoint.errors import ConfigError
from deepinfer.checkpoint.json_fields import read_fields, section
from deepinfer.models.deepseek_v41 import config_rules
from deepinfer.models.deepseek_v41.engram_hash import EngramHash, engram_hash


class LayerKind(enum.Enum):
    """What a layer's attention owns beside its own sliding window."""

    WINDOW = "window"  # nothing: ratio 0
    FULL = "full"  # compressor, main KV, index keys, index queries and a selection
    REINDEX = "reindex"  # index queries and a selection, over KV and index keys of an earlier layer
    REUSE = "reuse"  # KV and selection of earlier layers, unchanged


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """`rope_scaling`: frequency interpolation of layers with compression."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """`quantization_config`: the one combination that is supported, FP8 32x32 with FP4 experts."""

    quant_method: str
    fmt: str
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    expert_dtype: str
    activation_scheme: str = "dynamic"


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """`vision_config` of a checkpoint that has vision layers."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """`text_config`: a field with a default is an optional key."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str
    swiglu_limit: float
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    attention_bias: bool = False
    attention_dropout: float = 0.0
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_k_source_layer_ids: tuple[int, ...] | None = None  # null or absent: kv_source_layer_ids
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None  # null: every selection is over all visible entries
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    hc_shifted: bool = True
    use_fp4_sparse_kv: bool = True
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]  # rows of each table
    engram_max_ngram_size: int
    engram_vocab_size: int  # where the search for the tables' primes starts
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int  # raw token id
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int  # drafter layers; 0 means no drafter and makes the next keys optional
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_target_attn_input: bool = True
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    dspark_sts_temperatures: tuple[float, ...] | None = None  # [dspark_block_size]; may stand at top level


@dataclass(frozen=True, kw_only=True)
class DeepseekV41Config(TextConfig):
    """The whole configuration: the fields of `text_config`, those of the top level, and three sections.

    Attributes:
        yarn: `rope_scaling`.
        vision: None when the checkpoint has no vision layers.
        quantization: None for a bf16 checkpoint.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    tokenizer_compatibility: str = "release"
    yarn: YarnConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig | None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeepseekV41Config:
        """Read and prove the content of `config.json`.

        Raises:
            ConfigError: a key is missing, has the wrong type or a value that is not supported; the message
                names the key, the value given and what is supported.
        """
        config_rules.check_identity(data)
        text = section(data, "text_config")
        text_values = read_fields(TextConfig, text, "text_config", required=_drafter_keys(text))
        if "dspark_sts_temperatures" in data:
            top = read_fields(TextConfig, data, "", skip=_ALL_BUT_TEMPERATURES)["dspark_sts_temperatures"]
            if text_values.setdefault("dspark_sts_temperatures", top) != top:
                raise ConfigError("dspark_sts_temperatures", "differs between the top level and text_config")
        text_fields = set(TextConfig.__dataclass_fields__)
        config = cls(
            **text_values,
            **read_fields(cls, data, "", skip=text_fields | {"yarn", "vision", "quantization"}),
            yarn=_read_yarn(text),
            vision=_read_vision(data),
            quantization=_read_quantization(data),
        )
        config_rules.check(config)
        return config

    @cached_property
    def first_decoder_layer(self) -> int:
        """First layer of ratio 1: from here on layers read KV that no later layer's tokens change."""
        return self.compress_ratios.index(1)

    @property
    def draft_layer_ids(self) -> range:
        """Ids of the drafter's layers, which follow the backbone's (`mtp.i` is the i-th of them)."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    def layer_kind(self, layer_id: int) -> LayerKind:
        """Kind of a backbone or drafter layer."""
        if self.compress_ratios[layer_id] == 0:
            return LayerKind.WINDOW
        if layer_id in self.kv_source_layer_ids:
            return LayerKind.FULL
        return LayerKind.REINDEX if layer_id in self.index_source_layer_ids else LayerKind.REUSE

    def ratio(self, layer_id: int) -> int:
        """Tokens per compressed entry, 0 for a window-only layer."""
        return self.compress_ratios[layer_id]

    def kv_source(self, layer_id: int) -> int | None:
        """Layer whose compressed KV and index keys a layer reads; None for a window-only layer."""
        return self._source(layer_id, self.kv_source_layer_ids)

    def index_k_source(self, layer_id: int) -> int | None:
        """Layer whose index keys a layer's selection is made over; None for a window-only layer."""
        return self._source(layer_id, self.index_k_source_layer_ids or self.kv_source_layer_ids)

    def index_source(self, layer_id: int) -> int | None:
        """Layer whose selection a layer reads; None for a window-only layer."""
        return self._source(layer_id, self.index_source_layer_ids)

    def builds_candidates(self, layer_id: int) -> bool:
        """Whether a layer keeps the candidate blocks that later selections choose from."""
        return layer_id == self.candidate_source_layer_id

    def is_restricted(self, layer_id: int) -> bool:
        """Whether a layer makes a selection and may choose only inside the candidate blocks."""
        source = self.candidate_source_layer_id
        return source is not None and layer_id > source and layer_id in self.index_source_layer_ids

    def uses_yarn(self, layer_id: int) -> bool:
        """Whether rotations of a layer have base `compress_rope_theta` and YaRN, or plain `rope_theta`."""
        return self.compress_ratios[layer_id] > 0

    @cached_property
    def engram(self) -> EngramHash:
        """Hash constants of the Engram tables."""
        return engram_hash(
            self.engram_layer_ids,
            self.engram_max_ngram_size,
            self.engram_n_heads,
            self.engram_vocab_size,
            self.engram_compressed_vocab_size,
        )

    @property
    def scaled_widths(self) -> tuple[int, ...]:
        """Channels of the rows that matrices with scales take, but for an Engram table's."""
        heads = self.num_attention_heads * self.head_dim
        return (
            self.hidden_size,
            self.q_lora_rank,
            heads // self.o_groups,
            self.head_dim,
            self.o_groups * self.o_lora_rank,
            self.moe_intermediate_size,
        )

    @property
    def engram_num_columns(self) -> int:
        """Rows looked up for one token in one table: (n-gram sizes) * (heads)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def _source(self, layer_id: int, sources: tuple[int, ...]) -> int | None:
        if self.compress_ratios[layer_id] == 0:
            return None
        return sources[bisect_right(sources, layer_id) - 1]


_ALL_BUT_TEMPERATURES = set(TextConfig.__dataclass_fields__) - {"dspark_sts_temperatures"}
_DRAFTER_KEYS = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)


def _drafter_keys(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that a checkpoint with a drafter must have."""
    return _DRAFTER_KEYS if text.get("num_nextn_predict_layers") else ()


def _read_yarn(text: Mapping[str, Any]) -> YarnConfig:
    """`rope_scaling`, which some writers call `rope_parameters`."""
    name = "rope_parameters" if "rope_scaling" not in text and "rope_parameters" in text else "rope_scaling"
    scaling = section(text, name, "text_config")
    where = f"text_config.{name}"
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ConfigError(
            f"{where}.rope_type", f"{kind!r} is not supported; supported: 'yarn' (also spelled `type`)"
        )
    return YarnConfig(**read_fields(YarnConfig, scaling, where))


def _read_vision(data: Mapping[str, Any]) -> VisionConfig | None:
    if data.get("vision_config") is None:
        return None
    vision = section(data, "vision_config")
    if vision.get("num_hidden_layers") == 0:
        return None
    return VisionConfig(**read_fields(VisionConfig, vision, "vision_config"))


def _read_quantization(data: Mapping[str, Any]) -> QuantizationConfig | None:
    if data.get("quantization_config") is None:
        return None
    quantization = section(data, "quantization_config")
    return QuantizationConfig(**read_fields(QuantizationConfig, quantization, "quantization_config"))
