"""Tensor lists: the release's counts and bytes by closed forms, and the bundled checkpoints."""

from __future__ import annotations

import math

import pytest

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.checkpoint.safetensors_header import DTYPE_BYTES
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.tensors import TensorSpec, expected_tensors, is_stray, verify
from tests.checkpoint.configs import RELEASE, REMOVED, edited, tiny_quant_config
from tests.support.paths import TINY_QUANT


@pytest.fixture(scope="module")
def release() -> dict[str, TensorSpec]:
    return expected_tensors(DeepseekV41Config.from_dict(RELEASE))


def test_release_count(release: dict[str, TensorSpec]) -> None:
    assert len(release) == 96085


def test_release_bytes(release: dict[str, TensorSpec]) -> None:
    """The stated totals: 510.29 GB, of which routed experts 296.0 GB and Engram 202.8 GB."""

    def gigabytes(part: str) -> float:
        specs = [spec for name, spec in release.items() if part in name]
        return sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in specs) / 1e9

    assert gigabytes("") == pytest.approx(510.29, abs=0.01)
    assert gigabytes(".ffn.experts.") == pytest.approx(296.0, abs=0.05)
    assert gigabytes(".engram.embed.") == pytest.approx(202.76, abs=0.01)


def test_release_parameters(release: dict[str, TensorSpec]) -> None:
    """In billions: language model without tables 551.88, tables 196.61, drafter 14.23, vision 0.49."""

    def billions(name: str) -> float:
        return math.prod(release[name].wide_shape) / 1e9

    values = [name for name, spec in release.items() if spec.scale_of is None]
    tables = [name for name in values if name.endswith("engram.embed.weight")]
    drafter = [name for name in values if name.startswith("mtp.")]
    vision = [name for name in values if name.startswith(("vision.", "aligner.", "image_"))]
    text = set(values) - set(tables) - set(drafter) - set(vision)
    assert sum(map(billions, text)) == pytest.approx(551.88, abs=0.01)
    assert sum(map(billions, tables)) == pytest.approx(196.61, abs=0.01)
    assert sum(map(billions, drafter)) == pytest.approx(14.23, abs=0.01)
    assert sum(map(billions, vision)) == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.7.hc_attn_fn", (24, 20480), "F32"),
        ("layers.7.attn.wq_b.weight", (32768, 1280), "F8_E4M3"),
        ("layers.7.attn.wq_b.scale", (1024, 40), "F8_E8M0"),
        ("layers.7.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
        ("layers.39.ffn.experts.383.w1.weight", (2304, 2560), "I8"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.14.attn.compressor.wgate.weight", (512, 5120), "BF16"),
        ("layers.36.attn.indexer.wq_b.scale", (128, 40), "F8_E8M0"),
        ("layers.20.attn.indexer.wk.weight", (128, 512), "BF16"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.1.engram.wkv.scale", (800, 192), "F8_E8M0"),
        ("mtp.0.main_proj.scale", (160, 480), "F8_E8M0"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("mtp.1.ffn.gate.bias_vl", (128,), "F32"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
        ("image_newline", (5120,), "BF16"),
    ],
)
def test_release_shapes(release, name: str, shape: tuple[int, ...], dtype: str) -> None:
    assert (release[name].shape, release[name].dtype) == (shape, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 has no gate
        "layers.24.attn.indexer.wk.weight",  # reindex layers read earlier keys
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.engram.embed.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
    ],
)
def test_release_has_no(release, name: str) -> None:
    assert name not in release


def test_recommended_small_configuration() -> None:
    """Parameter counts that the specification states for a small configuration with vision and a drafter."""
    text = {
        "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
        "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 2, "moe_intermediate_size": 128,
        "n_routed_experts": 16, "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 3, 4], "index_source_layer_ids": [1, 3, 4, 6], "index_n_heads": 8,
        "candidate_source_layer_id": 4, "engram_layer_ids": [1, 3], "engram_num_embeddings": [14340, 18110],
        "engram_vocab_size": 512, "engram_compressed_vocab_size": 4096, "dspark_noise_token_id": 4001,
        "dspark_target_layer_ids": [5, 6, 7], "dspark_markov_rank": 64, "dspark_n_routed_experts": 8,
    }  # fmt: skip
    vision = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    config = edited(
        RELEASE,
        image_token_id=4000,
        text_config={**RELEASE["text_config"], **text},
        vision_config={**RELEASE["vision_config"], **vision},
    )
    specs = expected_tensors(DeepseekV41Config.from_dict(config))
    values = {name: math.prod(spec.wide_shape) for name, spec in specs.items() if spec.scale_of is None}
    assert sum(values.values()) == 56_442_138
    assert sum(n for name, n in values.items() if name.endswith("engram.embed.weight")) == 8_307_200
    assert sum(n for name, n in values.items() if name.startswith("mtp.")) == 6_482_346
    assert sum(n for name, n in values.items() if name.startswith("vision.")) == 404_736
    assert sum(n for name, n in values.items() if name.startswith("aligner.")) == 360_960


def test_no_vision_no_tensors() -> None:
    names = expected_tensors(DeepseekV41Config.from_dict(edited(RELEASE, vision_config=REMOVED)))
    assert len(names) == 96085 - 3 - (4 + 32 * 8 - 1) - 4
    assert not any(name.startswith(("vision", "aligner", "image_")) for name in names)


def test_bf16_checkpoint_has_no_scales() -> None:
    specs = expected_tensors(DeepseekV41Config.from_dict(edited(RELEASE, quantization_config=REMOVED)))
    assert {spec.dtype for spec in specs.values()} == {"BF16", "F32"}
    assert specs["layers.0.ffn.experts.0.w1.weight"].shape == (2304, 5120)
    assert not any(name.endswith(".scale") for name in specs)


def test_bundled_checkpoints(golden_model) -> None:
    from deepinfer.checkpoint.loader import open_checkpoint

    checkpoint = open_checkpoint(golden_model.checkpoint)
    with CheckpointReader(checkpoint.path) as reader:
        verify(reader, checkpoint.config)
        assert set(reader.names) == set(expected_tensors(checkpoint.config))


def test_another_configuration_does_not_fit() -> None:
    config = DeepseekV41Config.from_dict(edited(tiny_quant_config(), text_config__n_routed_experts=11))
    with CheckpointReader(TINY_QUANT) as reader, pytest.raises(ValueError, match=r"layers\.0\.ffn\.gate"):
        verify(reader, config)


def test_stray_names() -> None:
    assert is_stray("mtp.0.embed.weight")
    assert is_stray("mtp.2.head.weight")
    assert not is_stray("mtp.2.markov_head.head.weight")
    assert not is_stray("head.weight")
    assert not is_stray("layers.1.engram.embed.weight")
