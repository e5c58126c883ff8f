"""Fingerprints: equal for equal checkpoints, different for everything that changes what a model computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepinfer.checkpoint import fingerprint as module
from deepinfer.checkpoint.fingerprint import fingerprint
from deepinfer.checkpoint.reader import CheckpointReader
from tests.support.paths import TINY_QUANT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_QUANT, tmp_path / "copy"))


def flip(path: Path, name: str, place: int) -> None:
    """Change one byte of a tensor."""
    with CheckpointReader(path) as reader:
        info = reader.info(name)
    with open(info.file, "r+b") as file:
        file.seek(info.offset + place % info.nbytes)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_copy_is_the_same(copy: Path) -> None:
    (copy / "notes.txt").write_text("not read")
    assert fingerprint(copy) == fingerprint(TINY_QUANT)


def test_configuration_counts(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "something": 1}))
    assert fingerprint(copy) != fingerprint(TINY_QUANT)


@pytest.mark.parametrize("is_large", [False, True])
def test_weights_count(copy: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small checkpoint every byte; of a large one the ends and the middle of each tensor."""
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    if is_large:
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    with CheckpointReader(copy) as reader:
        names = {name: reader.info(name).nbytes for name in sorted(reader.names)}
    base = fingerprint(copy)
    large = [name for name, size in names.items() if size > 1000][:3]
    for name in [*large, next(name for name, size in names.items() if size <= 192)]:
        for place in (0, names[name] // 2, names[name] - 1):
            flip(copy, name, place)
            assert fingerprint(copy) != base, f"{name} at {place}"
            flip(copy, name, place)
    assert fingerprint(copy) == base
    flip(copy, large[0], 100)  # between two pieces
    assert (fingerprint(copy) == base) is is_large
