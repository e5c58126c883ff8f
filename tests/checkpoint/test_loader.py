"""Loader: finding checkpoints, progress, and the memory that streaming takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepinfer.checkpoint.errors import CheckpointError, ConfigError
from deepinfer.checkpoint.loader import load_model, load_tokenizer, open_checkpoint, resolve_model
from deepinfer.checkpoint.reader import CHUNK_BYTES, CheckpointReader
from deepinfer.config import ARITHMETICS
from deepinfer.models.deepseek_v41.dspark import Drafter
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.weights import Weights
from tests.checkpoint.configs import edited
from tests.checkpoint.micro import CONFIG, Entry, micro_files, write
from tests.support.paths import TINY_QUANT, V41_TINY
from tests.support.process import run_python


def test_local_directory() -> None:
    assert resolve_model(TINY_QUANT) == TINY_QUANT
    assert resolve_model(str(TINY_QUANT)) == TINY_QUANT
    checkpoint = open_checkpoint(str(TINY_QUANT))
    assert checkpoint.config.hidden_size == 256
    assert load_tokenizer(checkpoint).encode("x") == load_tokenizer(checkpoint, TINY_QUANT).encode("x")


@pytest.mark.parametrize(
    "model", ["/no/such/directory", "./nothing-here", "../nothing", "a/b/c", "~/no-such-model"]
)
def test_missing_directory(model: str) -> None:
    with pytest.raises(CheckpointError, match="no such directory") as error:
        resolve_model(model)
    assert model in str(error.value)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V4.1-Flash-1017", "some-model", "not a valid id"])
def test_hub_offline(model: str) -> None:
    """The tests run with the Hub switched off."""
    with pytest.raises(CheckpointError) as error:
        resolve_model(model, revision="v2")
    text = str(error.value)
    for words in (model, "local directory", "Hub", "v2", "DEEPINFER_HF_MODEL_DIR"):
        assert words in text
    assert error.value.__cause__ is not None


def test_hub_id_in_the_local_cache(tmp_path: Path) -> None:
    """A snapshot that an earlier download left is found without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--owner--tiny"
    snapshot = repo / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(TINY_QUANT, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    code = (
        "from deepinfer.checkpoint.loader import open_checkpoint, load_tokenizer\n"
        "checkpoint = open_checkpoint('owner/tiny')\n"
        "print(checkpoint.path, load_tokenizer(checkpoint).encode('x')[0])"
    )
    from tests.support.process import clean_env

    printed = run_python(code, env=clean_env(HF_HOME=str(tmp_path), HF_HUB_CACHE=None, HF_HUB_OFFLINE="1"))
    assert printed.split() == [str(snapshot), "0"]


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("{", "not valid JSON"), ("[]", "not a JSON object")]
)
def test_broken_config_file(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(tmp_path)
    assert "config.json" in str(error.value)


def test_unsupported_config_is_refused_before_any_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "other"}))
    with pytest.raises(ConfigError, match=r"model_type.*other"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("arithmetic", sorted(ARITHMETICS))
def test_models_load_in_every_arithmetic(golden_model, arithmetic: str) -> None:
    checkpoint = open_checkpoint(golden_model.checkpoint)
    model, drafter = load_model(checkpoint, ARITHMETICS[arithmetic], use_tqdm=False)
    assert drafter is None
    assert model.spec.vocab_size == 4096
    assert model.spec.num_layers == 8


def test_drafter_on_demand(golden_model) -> None:
    """The drafter shares embedding and head with the backbone."""
    checkpoint = open_checkpoint(golden_model.checkpoint)
    model, drafter = load_model(checkpoint, ARITHMETICS["float32"], with_drafter=True, use_tqdm=False)
    assert drafter.block_size == model.spec.draft_block_size == 5
    assert drafter.embed is model.embed and drafter.head is model.head


def test_backbone_and_drafter_read_everything() -> None:
    """No tensor of a checkpoint without vision is left over."""
    config = open_checkpoint(V41_TINY).config
    with CheckpointReader(V41_TINY) as reader:
        counted: list[int] = []
        weights = Weights(reader, counted.append)
        model = DeepseekV41Model.load(weights, config, ARITHMETICS["float32"])
        without_drafter = len(counted)
        Drafter.load(weights, config, ARITHMETICS["float32"], model)
    assert without_drafter < len(counted) == 1210


def test_no_drafter_to_load(tmp_path: Path) -> None:
    """Asked for a drafter that the checkpoint does not have: an error before any tensor is read."""
    config = edited(CONFIG, text_config__num_nextn_predict_layers=0, text_config__compress_ratios=[0, 2, 1])
    files = micro_files(config)
    checkpoint = open_checkpoint(write(tmp_path, files, config=config))
    model, drafter = load_model(checkpoint, ARITHMETICS["float32"], use_tqdm=False)
    assert model.spec.draft_block_size == 0 and drafter is None
    for file in files:
        (tmp_path / file).unlink()
    with pytest.raises(CheckpointError, match=r"has no drafter.*DEEPINFER_USE_NEXTN_DECODE=0") as error:
        load_model(checkpoint, ARITHMETICS["float32"], with_drafter=True, use_tqdm=False)
    assert str(tmp_path) in str(error.value)


def test_progress_reaches_every_byte() -> None:
    """Each tensor counts once, whether the model reads it or only its values are checked."""
    with CheckpointReader(V41_TINY) as reader:
        counted: list[int] = []
        weights = Weights(reader, counted.append)
        weights.linear("head")
        weights.linear("head")
        weights.check_unread()
        assert sum(counted) == sum(reader.info(name).nbytes for name in reader.names)
        assert len(counted) == len(list(reader.names)) == 1210


def test_bar_is_optional(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, micro_files()))
    load_model(checkpoint, ARITHMETICS["float32"], use_tqdm=False)
    assert capfd.readouterr().err == ""
    load_model(checkpoint, ARITHMETICS["float32"], use_tqdm=True)
    assert "weights: 100%" in capfd.readouterr().err


def test_files_are_closed(tmp_path: Path) -> None:
    import os

    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(write(tmp_path, micro_files()))
    load_model(checkpoint, ARITHMETICS["float32"], use_tqdm=False)
    assert len(os.listdir("/proc/self/fd")) == before


PEAK = """
import os, sys
import torch
import deepinfer.checkpoint.reader as reader_module
from deepinfer.checkpoint.reader import CHUNK_BYTES, CheckpointReader
from deepinfer.models.deepseek_v41.dspark import Drafter
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.weights import Weights

torch.set_num_threads(1)
reader_module.CHUNK_BYTES = {chunk}
weights = Weights(CheckpointReader(sys.argv[1] if len(sys.argv) > 1 else {path!r}))
weights.linear("warm")

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = memory("VmRSS:")
kept = {read}
print(memory("VmHWM:") - before)
"""


@pytest.mark.parametrize(
    ("read", "result_bytes"),
    [
        ('weights.linear("fp4").weight', 8192 * 4096 * 2),
        ('weights.linear("fp8").weight', 8192 * 4096 * 2),
        ('weights.tensor("wide", torch.float32)', 8192 * 4096 * 4),
        ('weights.table("table")', 2**20 * (32 + 1)),
    ],
)
def test_memory_beyond_the_weights(tmp_path: Path, read: str, result_bytes: int) -> None:
    """Reading holds the result and at most 14 chunks: 224 MiB with chunks of 16 MiB, as they are by default.

    Chunks are smaller here, so that a reader that holds a whole tensor beside its result (32 to 64 chunks)
    fails.
    """
    chunk = 1 << 20
    files = {
        "model.safetensors": {
            "warm.weight": Entry("BF16", (2048, 512), bytes(2048 * 512 * 2)),
            "fp4.weight": Entry("I8", (8192, 2048), bytes(8192 * 2048)),
            "fp4.scale": Entry("F8_E8M0", (8192, 128), bytes(8192 * 128)),
            "fp8.weight": Entry("F8_E4M3", (8192, 4096), bytes(8192 * 4096)),
            "fp8.scale": Entry("F8_E8M0", (256, 128), b"\x7f" * (256 * 128)),
            "wide": Entry("BF16", (8192, 4096), bytes(8192 * 4096 * 2)),
            "table.weight": Entry("F8_E4M3", (2**20, 32), bytes(2**20 * 32)),
            "table.scale": Entry("F8_E8M0", (2**20, 1), bytes(2**20)),
        }
    }
    write(tmp_path, files)
    (tmp_path / "model.safetensors.index.json").unlink()
    extra = int(run_python(PEAK.format(chunk=chunk, path=str(tmp_path), read=read))) - result_bytes
    assert extra < 14 * chunk, f"{extra / chunk:.1f} chunks"
    assert 14 * CHUNK_BYTES <= 256 << 20
