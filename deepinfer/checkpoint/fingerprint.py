"""Fingerprint of a checkpoint: what tells its configuration and weights from those of others."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from deepinfer.checkpoint.reader import CheckpointReader

WHOLE_BYTES = 1 << 28  # a checkpoint of at most this size is read as a whole
PIECE_BYTES = 1 << 12  # of larger ones the first, middle and last bytes of every tensor are


def fingerprint(path: Path) -> str:
    """SHA-256 over a checkpoint's `config.json`, the name, dtype and shape of every tensor, and its data.

    Of a large checkpoint three pieces of each tensor stand for its data: weights that were trained further
    differ, a change to a few rows of one tensor need not.

    Args:
        path: the checkpoint directory.

    Raises:
        CheckpointError: as the reader does.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    files: dict[Path, int] = {}
    try:
        with CheckpointReader(path) as reader:
            is_small = sum(reader.info(name).nbytes for name in reader.names) <= WHOLE_BYTES
            for name in sorted(reader.names):
                info = reader.info(name)
                digest.update(repr((name, info.dtype, info.shape)).encode())
                if info.file not in files:
                    files[info.file] = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
                for start, size in _pieces(info.nbytes, is_small):
                    digest.update(os.pread(files[info.file], size, info.offset + start))
    finally:
        for file in files.values():
            os.close(file)
    return digest.hexdigest()


def _pieces(nbytes: int, is_small: bool) -> list[tuple[int, int]]:
    """(offset, size) of what is read of a tensor."""
    if is_small or nbytes <= 3 * PIECE_BYTES:
        return [(0, nbytes)]
    starts = (0, (nbytes - PIECE_BYTES) // 2, nbytes - PIECE_BYTES)
    return [(start, PIECE_BYTES) for start in starts]
