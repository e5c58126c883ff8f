"""A very small checkpoint with every kind of tensor, written by the test itself so that it can be damaged.

The writer knows nothing of the package's reader; tensors are bytes with a dtype and a shape.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from tests.checkpoint.configs import edited, tiny_quant_config

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}

CONFIG: dict[str, Any] = edited(
    tiny_quant_config(),
    image_token_id=14,
    text_config={
        **tiny_quant_config()["text_config"],
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "compress_ratios": [0, 2, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "index_n_heads": 2,
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [11 + 13],
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 11,
        "engram_n_heads": 1,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": 60,
        "num_nextn_predict_layers": 1,
        "dspark_noise_token_id": 15,
        "dspark_target_layer_ids": [1, 2],
        "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 2,
        "dspark_num_experts_per_tok": 1,
    },
)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def with_byte(self, place: int, value: int) -> Entry:
        data = bytearray(self.data)
        data[place] = value
        return replace(self, data=bytes(data))


Files = dict[str, dict[str, Entry]]  # file name -> tensor name -> entry


def micro_files(config: dict[str, Any] = CONFIG) -> Files:
    """Two shards of random, finite tensors: layers 0 and 1, then all the rest."""
    rng = np.random.default_rng(7)
    files: Files = {FIRST: {}, SECOND: {}}
    for name, spec in expected_tensors(DeepseekV41Config.from_dict(config)).items():
        file = FIRST if name.startswith(("layers.0.", "layers.1.")) else SECOND
        files[file][name] = Entry(spec.dtype, spec.shape, random_data(rng, spec.dtype, spec.shape))
    return files


def random_data(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> bytes:
    count = math.prod(shape)
    if dtype == "F8_E8M0":
        return rng.integers(120, 130, count, dtype=np.uint8).tobytes()
    if dtype == "F8_E4M3":
        codes = rng.integers(0, 0x7F, count, dtype=np.uint8)  # no NaN
        return (codes | rng.integers(0, 2, count, dtype=np.uint8) << 7).tobytes()
    if dtype == "I8":
        return rng.integers(0, 256, count, dtype=np.uint8).tobytes()
    values = rng.standard_normal(count).astype(np.float32)
    if dtype == "F32":
        return values.tobytes()
    assert dtype == "BF16", dtype
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def widen(entry: Entry) -> Entry:
    """A BF16 tensor as F32."""
    bits = np.frombuffer(entry.data, np.uint16).astype(np.uint32) << 16
    return Entry("F32", entry.shape, bits.tobytes())


def file_of(files: Files, name: str) -> str:
    """The file that holds a tensor."""
    return next(file for file, entries in files.items() if name in entries)


def write(
    path: Path, files: Files, weight_map: dict[str, str] | None = None, config: dict[str, Any] = CONFIG
) -> Path:
    """Write config, shards and index; the index follows from the shards unless it is given."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for file, entries in files.items():
        (path / file).write_bytes(safetensors_bytes(entries))
    if weight_map is None:
        weight_map = {name: file for file, entries in files.items() for name in entries}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def safetensors_bytes(entries: dict[str, Entry]) -> bytes:
    header, offset = {}, 0
    for name, entry in entries.items():
        end = offset + len(entry.data)
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    return with_header(json.dumps(header), b"".join(entry.data for entry in entries.values()))


def with_header(header: str, data: bytes) -> bytes:
    """A file's bytes from the header's text and the data."""
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + data


def split_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]
