"""Which tensors a DeepSeek-V4.1 checkpoint holds, with shapes and dtypes, and the proof that one does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.checkpoint.dequantize import GROUP
from deepinfer.checkpoint.errors import CheckpointError
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.models.deepseek_v41.config import DeepseekV41Config, VisionConfig

# Dtypes wider than the release's, read as the header says. A quantised matrix stored wide has no scale.
_WIDER = {"BF16": ("F32",), "F32": (), "F8_E4M3": ("BF16", "F32"), "I8": ("BF16", "F32"), "F8_E8M0": ()}
_STRAY = re.compile(r"mtp\.\d+\.(embed|head)\.")  # the drafter shares the backbone's


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be.

    Attributes:
        shape: the stored shape.
        dtype: the release's dtype, a word of the safetensors header.
        wide_shape: the shape when a quantised matrix is stored wide; equal to `shape` but for packed FP4.
        scale_of: for a scale, the matrix it belongs to; it exists only when that matrix is quantised.
    """

    shape: tuple[int, ...]
    dtype: str
    wide_shape: tuple[int, ...]
    scale_of: str | None = None


def expected_tensors(config: DeepseekV41Config) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint that `config` describes, by name."""
    return dict(_all_tensors(config))


def verify(reader: CheckpointReader, config: DeepseekV41Config) -> None:
    """Prove from the headers that the checkpoint holds exactly the tensors that `config` asks for.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of a wrong shape or dtype.
    """
    expected = expected_tensors(config)
    absent = set()  # scales of matrices stored wide
    for name, spec in expected.items():
        if spec.scale_of in absent:
            absent.add(name)
            continue
        if name not in reader:
            raise CheckpointError("missing", tensor=name, file=str(reader.index_file))
        info = reader.info(name)
        if info.dtype != spec.dtype and info.dtype not in _WIDER[spec.dtype]:
            supported = " or ".join((spec.dtype, *_WIDER[spec.dtype]))
            raise reader.error(name, f"dtype is {info.dtype}, must be {supported}")
        is_wide = info.dtype != spec.dtype
        shape = spec.wide_shape if is_wide else spec.shape
        if info.shape != shape:
            raise reader.error(name, f"shape is {list(info.shape)}, must be {list(shape)}")
        if is_wide:
            absent.add(name)
    for name in reader.names:
        if (name not in expected or expected[name].scale_of in absent) and not _STRAY.match(name):
            raise reader.error(name, "unexpected: the configuration asks for no such tensor")


def is_stray(name: str) -> bool:
    """Whether a tensor may stand in a checkpoint and is ignored."""
    return _STRAY.match(name) is not None


def _all_tensors(config: DeepseekV41Config) -> Iterator[tuple[str, TensorSpec]]:
    hidden = config.hidden_size
    yield _plain("embed.weight", config.vocab_size, hidden)
    yield _plain("head.weight", config.vocab_size, hidden)
    yield _plain("norm.weight", hidden)
    for layer_id in range(config.num_hidden_layers):
        yield from _layer(config, f"layers.{layer_id}", config.n_routed_experts)
        yield from _selection(config, layer_id)
        if layer_id in config.engram_layer_ids:
            yield from _engram(config, layer_id)
    for stage, _ in enumerate(config.draft_layer_ids):
        yield from _layer(config, f"mtp.{stage}", config.dspark_n_routed_experts)
    if config.num_nextn_predict_layers:
        yield from _drafter_heads(config)
    if config.vision is not None:
        yield from _vision(config, config.vision)


def _layer(config: DeepseekV41Config, prefix: str, num_experts: int) -> Iterator[tuple[str, TensorSpec]]:
    """Norms, mHC, attention projections and the MoE of one layer."""
    hidden, heads, inner = config.hidden_size, config.num_attention_heads, config.moe_intermediate_size
    streams = config.hc_mult
    mixes = (2 + streams) * streams  # pre, post and the stream-to-stream matrix
    yield _plain(f"{prefix}.attn_norm.weight", hidden)
    yield _plain(f"{prefix}.ffn_norm.weight", hidden)
    for site in ("attn", "ffn"):
        yield _plain(f"{prefix}.hc_{site}_fn", mixes, streams * hidden, dtype="F32")
        yield _plain(f"{prefix}.hc_{site}_base", mixes, dtype="F32")
        yield _plain(f"{prefix}.hc_{site}_scale", 3, dtype="F32")
    attn = f"{prefix}.attn"
    yield _plain(f"{attn}.attn_sink", heads, dtype="F32")
    yield _plain(f"{attn}.q_norm.weight", config.q_lora_rank)
    yield _plain(f"{attn}.kv_norm.weight", config.head_dim)
    yield from _dense(config, f"{attn}.wq_a", config.q_lora_rank, hidden)
    yield from _dense(config, f"{attn}.wq_b", heads * config.head_dim, config.q_lora_rank)
    yield from _dense(config, f"{attn}.wkv", config.head_dim, hidden)
    group_width = heads // config.o_groups * config.head_dim
    yield from _dense(config, f"{attn}.wo_a", config.o_groups * config.o_lora_rank, group_width)
    yield from _dense(config, f"{attn}.wo_b", hidden, config.o_groups * config.o_lora_rank)
    ffn = f"{prefix}.ffn"
    yield _plain(f"{ffn}.gate.weight", num_experts, hidden)
    yield _plain(f"{ffn}.gate.bias", num_experts, dtype="F32")
    yield _plain(f"{ffn}.gate.bias_vl", num_experts, dtype="F32")
    for matrix, rows, columns in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
        yield from _dense(config, f"{ffn}.shared_experts.{matrix}", rows, columns)
        for expert in range(num_experts):
            yield from _packed(config, f"{ffn}.experts.{expert}.{matrix}", rows, columns)


def _selection(config: DeepseekV41Config, layer_id: int) -> Iterator[tuple[str, TensorSpec]]:
    """Compressor and indexer of a layer, where it owns them."""
    attn = f"layers.{layer_id}.attn"
    if layer_id in config.kv_source_layer_ids:
        yield _plain(f"{attn}.compressor.wkv.weight", config.head_dim, config.hidden_size)
        yield _plain(f"{attn}.compressor.norm.weight", config.head_dim)
        if config.ratio(layer_id) > 1:  # a group of one token needs no gate
            yield _plain(f"{attn}.compressor.wgate.weight", config.head_dim, config.hidden_size)
        yield _plain(f"{attn}.indexer.wk.weight", config.index_head_dim, config.head_dim)
        yield _plain(f"{attn}.indexer.k_norm.weight", config.index_head_dim)
    if layer_id in config.index_source_layer_ids:
        rows = config.index_n_heads * config.index_head_dim
        yield from _dense(config, f"{attn}.indexer.wq_b", rows, config.q_lora_rank)
        yield _plain(f"{attn}.indexer.weights_proj.weight", config.index_n_heads, config.hidden_size)


def _engram(config: DeepseekV41Config, layer_id: int) -> Iterator[tuple[str, TensorSpec]]:
    """One Engram table and its projection to a key per stream and one value."""
    prefix = f"layers.{layer_id}.engram"
    num_rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer_id)]
    width = config.engram_head_dim
    yield from _quantized(config, f"{prefix}.embed", (num_rows, width), "F8_E4M3", (num_rows, _groups(width)))
    rows = (config.hc_mult + 1) * config.hidden_size
    yield from _dense(config, f"{prefix}.wkv", rows, config.engram_num_columns * width)
    yield _plain(f"{prefix}.q_weight", config.hc_mult, config.hidden_size)
    yield _plain(f"{prefix}.k_weight", config.hc_mult, config.hidden_size)


def _drafter_heads(config: DeepseekV41Config) -> Iterator[tuple[str, TensorSpec]]:
    """Entry of the first drafter stage and heads of the last."""
    hidden, rank = config.hidden_size, config.dspark_markov_rank
    yield from _dense(config, "mtp.0.main_proj", hidden, len(config.dspark_target_layer_ids) * hidden)
    yield _plain("mtp.0.main_norm.weight", hidden)
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    yield _plain(f"{last}.norm.weight", hidden)
    yield _plain(f"{last}.markov_head.embed.weight", config.vocab_size, rank)
    yield _plain(f"{last}.markov_head.head.weight", config.vocab_size, rank)
    yield _plain(f"{last}.confidence_head.proj.weight", 1, hidden + rank)


def _vision(config: DeepseekV41Config, vision: VisionConfig) -> Iterator[tuple[str, TensorSpec]]:
    """Encoder, aligner and the three span vectors; every tensor bf16."""
    width, inner, hidden = vision.hidden_size, vision.intermediate_size, config.hidden_size
    for name in ("image_start", "image_end", "image_newline"):
        yield _plain(name, hidden)
    yield _plain("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield _plain("vision.patch_embed.proj.bias", width)
    for block_id in range(vision.num_hidden_layers):
        block = f"vision.blocks.{block_id}"
        yield _plain(f"{block}.norm1.weight", width)
        yield _plain(f"{block}.norm2.weight", width)
        yield _plain(f"{block}.attn.wqkv.weight", 3 * width, width)
        yield _plain(f"{block}.attn.wqkv.bias", 3 * width)
        yield _plain(f"{block}.attn.wo.weight", width, width)
        yield _plain(f"{block}.attn.wo.bias", width)
        yield _plain(f"{block}.mlp.w1.weight", 2 * inner, width)
        yield _plain(f"{block}.mlp.w2.weight", width, inner)
    yield _plain("vision.norm.weight", width)
    yield _plain("aligner.w1.weight", hidden, vision.downsample_ratio**2 * width)
    yield _plain("aligner.w1.bias", hidden)
    yield _plain("aligner.w2.weight", hidden, hidden)
    yield _plain("aligner.w2.bias", hidden)


def _plain(name: str, *shape: int, dtype: str = "BF16") -> tuple[str, TensorSpec]:
    return name, TensorSpec(shape, dtype, shape)


def _dense(
    config: DeepseekV41Config, prefix: str, rows: int, columns: int
) -> Iterator[tuple[str, TensorSpec]]:
    """A matrix that the release stores in FP8 with a scale for each 32 x 32 block."""
    yield from _quantized(config, prefix, (rows, columns), "F8_E4M3", (_groups(rows), _groups(columns)))


def _packed(
    config: DeepseekV41Config, prefix: str, rows: int, columns: int
) -> Iterator[tuple[str, TensorSpec]]:
    """A matrix that the release stores as two FP4 values a byte with a scale for each row and 32 columns."""
    stored = TensorSpec((rows, columns // 2), "I8", (rows, columns))
    yield from _quantized(config, prefix, (rows, columns), "I8", (rows, _groups(columns)), stored)


def _quantized(
    config: DeepseekV41Config,
    prefix: str,
    shape: tuple[int, int],
    dtype: str,
    scale_shape: tuple[int, int],
    stored: TensorSpec | None = None,
) -> Iterator[tuple[str, TensorSpec]]:
    """Weight, then scale; in a bf16 checkpoint the weight alone, in bf16."""
    name = f"{prefix}.weight"
    if config.quantization is None:
        yield _plain(name, *shape)
        return
    yield name, stored or TensorSpec(shape, dtype, shape)
    yield f"{prefix}.scale", TensorSpec(scale_shape, "F8_E8M0", scale_shape, scale_of=name)


def _groups(size: int) -> int:
    return -(-size // GROUP)
