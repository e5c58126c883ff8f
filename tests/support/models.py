"""The bundled models, loaded once for each arithmetic, and their folded vocabularies."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from deepinfer.checkpoint.compressed_vocab import fold_vocabulary
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.config import ARITHMETICS
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.dspark import Drafter
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.tensors import verify
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.settings import Settings
from tests.support.draft_harness import DraftHarness
from tests.support.forward_harness import ForwardHarness
from tests.support.paths import MODELS
from tilelang_ops.common.kernels import use_library

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# Names of the golden data's modes -> presets of the engine.
ARITHMETIC_OF_MODE = {"plain": "plain", "fp32": "float32", "bf16": "bfloat16", "w8a8": "w8a8"}


@functools.cache
def load_config(name: str) -> DeepseekV41Config:
    """Configuration of "tiny-quant" or "v41-tiny"."""
    return DeepseekV41Config.from_dict(json.loads((MODELS[name] / "config.json").read_text()))


@functools.cache
def load_backbone(name: str, arithmetic: str = "float32") -> DeepseekV41Model:
    """The backbone of "tiny-quant" or "v41-tiny"; shared, so leave its tensors as they are."""
    config = load_config(name)
    with CheckpointReader(MODELS[name]) as reader:
        verify(reader, config)
        return DeepseekV41Model.load(Weights(reader), config, ARITHMETICS[arithmetic])


@functools.cache
def load_drafter(name: str, arithmetic: str = "float32") -> Drafter:
    """The drafter beside `load_backbone(name, arithmetic)`; shared likewise."""
    with CheckpointReader(MODELS[name]) as reader:
        return Drafter.load(
            Weights(reader), load_config(name), ARITHMETICS[arithmetic], load_backbone(name, arithmetic)
        )


@functools.cache
def packed_model(
    name: str, device: str = "cpu", *, takes_codes: bool = False
) -> tuple[DeepseekV41Model, Drafter]:
    """Backbone and drafter in the form of a GPU, in "w8a8"; kernels come from the prebuilt ones, if any."""
    config = load_config(name)
    arithmetic = dataclasses.replace(ARITHMETICS["w8a8"], fp8_products=takes_codes)
    if (library := Settings.from_env().kernel_library) is not None:
        use_library(Path(library))
    with CheckpointReader(MODELS[name]) as reader:
        weights = Weights(reader, device=device, is_packed=True, takes_codes=takes_codes, tables_on_host=True)
        model = DeepseekV41Model.load(weights, config, arithmetic)
        return model, Drafter.load(weights, config, arithmetic, model)


@functools.cache
def fold_map(name: str) -> Tensor:
    """[vocab] int32: token id -> folded id."""
    config = load_config(name)
    tokenizer = tokenizers.Tokenizer.from_file(str(MODELS[name] / "tokenizer.json"))
    folded = fold_vocabulary(tokenizer, config.vocab_size, config.engram_pad_token_id)
    return torch.from_numpy(folded.token_map)


def make_harness(name: str, arithmetic: str = "float32", **options) -> ForwardHarness:
    """A `ForwardHarness` over one of the models; `options` are its keyword arguments."""
    return ForwardHarness(load_backbone(name, arithmetic), fold_map(name), **options)


def make_draft_harness(name: str, arithmetic: str = "float32", **options) -> DraftHarness:
    """A `DraftHarness` over one of the models and its drafter."""
    drafter = load_drafter(name, arithmetic)
    return DraftHarness(load_backbone(name, arithmetic), drafter, fold_map(name), **options)
