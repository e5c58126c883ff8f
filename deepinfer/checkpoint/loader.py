"""Loader: finds a checkpoint, reads its configuration, proves it, and builds the model as weights stream."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.checkpoint.errors import CheckpointError
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.models.registry import ModelFamily, built_in_directory, model_family

if TYPE_CHECKING:
    import torch

    from deepinfer.checkpoint.tokenizer import Tokenizer
    from deepinfer.config import Arithmetic
    from deepinfer.models.base import Drafter, Model

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]
_HUB_TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory whose configuration has been read and proved.

    Attributes:
        path: the directory.
        config: the model's typed configuration.
        family: the code that implements it.
        share: of random weights, the part of the model that `config` describes; None for a real checkpoint.
    """

    path: Path
    config: Any
    family: ModelFamily
    share: Any = None


def resolve_model(model: str | Path, revision: str | None = None, *, tokenizer_only: bool = False) -> Path:
    """The directory of a checkpoint: `model` itself, or a download of that Hub id.

    Args:
        model: local directory, or an id such as "owner/name".
        revision: Hub branch, tag or commit; only for a Hub id.
        tokenizer_only: fetch no weights.

    Raises:
        CheckpointError: neither a directory nor something that the Hub or its local cache gives.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if path.exists():
        raise CheckpointError(
            "is a file; a checkpoint is a directory with config.json and tensors", file=name
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError("there is no such directory", file=name)
    import huggingface_hub  # not needed for local directories

    wanted = _HUB_TOKENIZER_FILES if tokenizer_only else _HUB_FILES + _HUB_TOKENIZER_FILES
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError, huggingface_hub.errors.EntryNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"model {name!r} is no local directory, and the Hugging Face Hub (revision {revision or 'main'}) "
            f"did not give it: {type(error).__name__}: {reason} Give a local checkpoint directory "
            "(the examples take it from DEEPINFER_HF_MODEL_DIR), or make the Hub or its cache reachable."
        ) from error


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint and read its `config.json`; no tensor is touched.

    Args:
        model: local directory or Hub id.
        revision: Hub revision.

    Raises:
        CheckpointError: it cannot be found; ConfigError: its configuration is not supported.
    """
    path = resolve_model(model, revision)
    config = _read_config(path / "config.json")
    family = model_family(config)
    return Checkpoint(path, family.read_config(config), family)


def load_model(
    checkpoint: Checkpoint,
    arithmetic: Arithmetic,
    *,
    with_drafter: bool = False,
    use_tqdm: bool = True,
    sha256: Mapping[str, str] | str | Path | None = None,
    device: torch.device | str = "cpu",
    tables_on_host: bool = False,
) -> tuple[Model, Drafter | None]:
    """Prove every tensor of a checkpoint and build its model, and its built-in drafter when it is wanted.

    Headers are proved before the first byte of data is read, values while the data streams by. Beside the
    weights themselves only slices of `reader.CHUNK_BYTES` are held. Tensors that the model does not read are
    checked as well.

    Args:
        checkpoint: from `open_checkpoint`.
        arithmetic: how the model computes.
        with_drafter: load the drafter as well; without it its tensors are checked and dropped.
        use_tqdm: draw a progress bar on stderr.
        sha256: digests of the files, as `CheckpointReader.verify_sha256` takes them; None for no such check.
        device: where the weights go, slice by slice.
        tables_on_host: keep large tables in pinned host memory, where a device reads the rows that it needs.

    Returns:
        the model; the drafter, None when it was not asked for.

    Raises:
        CheckpointError: names the tensor and the file at fault; or a drafter is wanted and there is none.
    """
    from tqdm import tqdm

    if with_drafter and checkpoint.family.spec(checkpoint.config).draft_block_size == 0:
        raise CheckpointError(
            "has no drafter, so there are no draft tokens to be had: set DEEPINFER_USE_NEXTN_DECODE=0, or "
            "give a checkpoint with drafter layers (num_nextn_predict_layers > 0)",
            file=str(checkpoint.path),
        )
    with CheckpointReader(checkpoint.path) as reader:
        checkpoint.family.verify(reader, checkpoint.config)
        if sha256 is not None:
            reader.verify_sha256(sha256)
        total = sum(reader.info(name).nbytes for name in reader.names)
        bar = tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=not use_tqdm)
        with bar:
            weights = checkpoint.family.weights(
                reader,
                bar.update,
                device=device,
                takes_codes=arithmetic.fp8_products,
                tables_on_host=tables_on_host,
            )
            model = checkpoint.family.load(weights, checkpoint.config, arithmetic)
            drafter = None
            if with_drafter:
                drafter = checkpoint.family.load_drafter(weights, checkpoint.config, arithmetic, model)
            weights.check_unread()
    return model, drafter


def open_dummy(
    model: str | Path,
    revision: str | None = None,
    ep_size: int = 1,
    redundant_experts: int = 0,
    engram_size: int = 0,
) -> Checkpoint:
    """The configuration and tokenizer of a model whose weights will be random.

    Args:
        model: local directory or Hub id, of which no tensor is read, or the name of a built-in configuration.
        revision: Hub revision.
        ep_size: ranks that experts are divided among; the configuration is that of one of them.
        redundant_experts: copies of experts in that group.
        engram_size: ranks that Engram tables are divided among; 0 for `ep_size`.

    Raises:
        CheckpointError, ConfigError: as `open_checkpoint`.
        ValueError: the model cannot be divided so.
    """
    checkpoint = open_checkpoint(built_in_directory(str(model)) or model, revision)
    share = checkpoint.family.rank_share(ep_size, redundant_experts, engram_size)
    return dataclasses.replace(checkpoint, config=share.config(checkpoint.config), share=share)


def load_dummy(
    checkpoint: Checkpoint,
    arithmetic: Arithmetic,
    *,
    seed: int,
    with_drafter: bool = False,
    use_tqdm: bool = True,
    **options: Any,
) -> tuple[Model, Drafter | None]:
    """Build a model with random weights, which can leave out prefills.

    Args:
        checkpoint: from `open_dummy`.
        arithmetic: how the model computes.
        seed: of the weights.
        with_drafter: load the drafter as well.
        use_tqdm: draw a progress bar on stderr.
        options: passed to the weights, such as `device`.
    """
    from tqdm import tqdm

    family = checkpoint.family
    with tqdm(desc="random weights", unit="B", unit_scale=True, disable=not use_tqdm) as bar:
        options["takes_codes"] = arithmetic.fp8_products
        weights = family.dummy_weights(checkpoint.config, checkpoint.share, seed, bar.update, **options)
        model = family.load(weights, checkpoint.config, arithmetic)
        drafter = None
        if with_drafter:
            drafter = family.load_drafter(weights, checkpoint.config, arithmetic, model)
    return family.pretended(model), drafter


def load_tokenizer(
    checkpoint: Checkpoint, tokenizer: str | Path | None = None, revision: str | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint, or another one for the same model.

    Args:
        checkpoint: from `open_checkpoint`.
        tokenizer: directory or Hub id of another tokenizer; None for the checkpoint's own.
        revision: Hub revision of `tokenizer`.
    """
    from deepinfer.checkpoint import tokenizer as tokenizer_module

    path = checkpoint.path if tokenizer is None else resolve_model(tokenizer, revision, tokenizer_only=True)
    return tokenizer_module.load_tokenizer(path, checkpoint.config)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(file)) from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(f"is not valid JSON: {error}", file=str(file)) from error
    if not isinstance(config, dict):
        raise CheckpointError("is not a JSON object", file=str(file))
    return config
