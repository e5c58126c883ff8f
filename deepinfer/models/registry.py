"""Which module implements which architecture; a model's code loads when a checkpoint asks for it."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.checkpoint.errors import ConfigError
from deepinfer.models.base import ModelSpec


@dataclass(frozen=True)
class ModelFamily:
    """What the loader needs of a model.

    Attributes:
        read_config: content of `config.json` -> the typed, proved configuration.
        verify: (reader, config) proves names, shapes and dtypes of all tensors.
        weights: (reader, on_read, device=, tables_on_host=) -> what modules load from.
        spec: typed configuration -> `ModelSpec`.
        load: (weights, config, arithmetic) -> the model.
        load_drafter: (weights, config, arithmetic, model) -> its built-in drafter, where the spec has one.
        rank_share: (ep_size, redundant_experts, engram_size) -> what one rank of a group holds; its
            `config(config)` is the rank's configuration.
        dummy_weights: (config, share, seed, on_read, device=...) -> random weights of a rank.
        pretended: model -> the same model, which can leave out prefills (`is_on`).
    """

    read_config: Callable[[Mapping[str, Any]], Any]
    verify: Callable[[Any, Any], None]
    weights: Callable[..., Any]
    spec: Callable[[Any], ModelSpec]
    load: Callable[..., Any]
    load_drafter: Callable[..., Any]
    rank_share: Callable[..., Any]
    dummy_weights: Callable[..., Any]
    pretended: Callable[[Any], Any]


_PACKAGES = {"DeepseekV41ForCausalLM": ("deepinfer.models.deepseek_v41", "DeepseekV41")}


def model_family(config: Mapping[str, Any]) -> ModelFamily:
    """The family that the content of a `config.json` names.

    Raises:
        ConfigError: `architectures` is not one supported name.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _PACKAGES:
        raise ConfigError("architectures", f"{names!r} is not supported; supported: one of {list(_PACKAGES)}")
    package, prefix = _PACKAGES[names[0]]

    def member(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    return ModelFamily(
        read_config=member("config", f"{prefix}Config").from_dict,
        verify=member("tensors", "verify"),
        weights=member("weights", "Weights"),
        spec=member("spec", "model_spec"),
        load=lambda *args: member("model", f"{prefix}Model").load(*args),
        load_drafter=lambda *args: member("dspark", "Drafter").load(*args),
        rank_share=lambda *args: member("rank_share", "RankShare")(*args),
        dummy_weights=lambda *args, **options: member("dummy", "DummyWeights")(*args, **options),
        pretended=lambda model: member("pretended", "PretendedPrefill")(model),
    )


# Configurations that need no file: name -> module that writes a directory with `config.json` and a tokenizer.
_BUILT_IN = {"deepseek-v4.1-flash": "deepinfer.models.deepseek_v41.release"}


@functools.cache
def built_in_directory(name: str) -> Path | None:
    """A temporary directory with a built-in configuration, gone with the process; None for other names."""
    module = _BUILT_IN.get(name.lower())
    if module is None:
        return None
    directory = tempfile.TemporaryDirectory(prefix="deepinfer-")
    _directories.append(directory)
    importlib.import_module(module).write_files(Path(directory.name))
    return Path(directory.name)


_directories: list[tempfile.TemporaryDirectory[str]] = []
