"""CheckpointReader: the tensors of a checkpoint directory, proved against its index and read in slices."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint.errors import CheckpointError
from deepinfer.checkpoint.safetensors_header import TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"
CHUNK_BYTES = 16 << 20  # bytes of raw data held at a time while a tensor is streamed

# Scale bytes and packed values stay bytes: their meaning is the model's, see dequantize.py.
_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class CheckpointReader:
    """The tensors of a directory of safetensors shards, or of a single file without an index.

    Opening reads every header and proves it, and that index and headers say the same. A leading `model.` is
    dropped from every name. No tensor data is read until asked for.

    Args:
        path: the checkpoint directory.

    Raises:
        CheckpointError: names the tensor and the file at fault.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        index_path = self.path / INDEX_NAME
        self._files: dict[Path, int] = {}  # open file descriptors
        if index_path.is_file():
            self.index_file = index_path
            self._tensors = _read_sharded(index_path)
        else:
            self.index_file = _single_file(self.path)
            self._tensors = _merge([self.index_file])
        self.shards = tuple(sorted({info.file for info in self._tensors.values()}))

    @property
    def names(self) -> Iterable[str]:
        """Every tensor's name, in the order of the shards' headers."""
        return self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """dtype, shape and place of a tensor; CheckpointError when there is none of that name."""
        if name not in self._tensors:
            raise CheckpointError("missing", tensor=name, file=str(self.index_file))
        return self._tensors[name]

    def error(self, name: str, message: str) -> CheckpointError:
        """An error about a tensor that names its file."""
        return CheckpointError(message, tensor=name, file=str(self.info(name).file))

    def read(self, name: str) -> Tensor:
        """The whole tensor in its stored dtype (E8M0 as uint8); it owns its memory."""
        info = self.info(name)
        return self._read_bytes(name, info, 0, info.nbytes).view(_TORCH_DTYPES[info.dtype]).view(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first dimension, in the stored dtype."""
        info = self.info(name)
        assert info.shape and 0 <= start <= stop <= info.shape[0], f"{name=} {info.shape=} {start=} {stop=}"
        row_bytes = info.nbytes // max(info.shape[0], 1)
        data = self._read_bytes(name, info, start * row_bytes, (stop - start) * row_bytes)
        return data.view(_TORCH_DTYPES[info.dtype]).view(stop - start, *info.shape[1:])

    def row_ranges(self, name: str, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Consecutive row ranges of about `CHUNK_BYTES` each; they start at multiples of `multiple`."""
        info = self.info(name)
        num_rows = info.shape[0]
        row_bytes = max(info.nbytes // max(num_rows, 1), 1)
        step = max(CHUNK_BYTES // row_bytes // multiple, 1) * multiple
        for start in range(0, num_rows, step):
            yield start, min(start + step, num_rows)

    def verify_sha256(self, digests: Mapping[str, str] | str | Path) -> None:
        """Compare files with a list of SHA-256 digests; every shard must be in the list.

        Args:
            digests: file name -> hex digest, or the path of a file in the format of `sha256sum`.

        Raises:
            CheckpointError: a shard is not listed, or a listed file is missing or differs.
        """
        if not isinstance(digests, Mapping):
            digests = _read_digests(Path(digests))
        for shard in self.shards:
            if shard.name not in digests:
                raise CheckpointError("not in the list of SHA-256 digests", file=str(shard))
        for name, expected in digests.items():
            path = self.path / name
            try:
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from error
            if digest != expected.lower():
                raise CheckpointError(f"SHA-256 is {digest}, the list says {expected}", file=str(path))

    def close(self) -> None:
        """Close the shards; reading opens them again."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read_bytes(self, name: str, info: TensorInfo, offset: int, nbytes: int) -> Tensor:
        """`nbytes` of a tensor's data from `offset` on, as uint8."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(data.numpy())
        try:
            if info.file not in self._files:
                self._files[info.file] = os.open(info.file, os.O_RDONLY)
            done = 0
            while done < nbytes:
                count = os.preadv(self._files[info.file], [view[done:]], info.offset + offset + done)
                if not count:
                    raise self.error(
                        name, f"truncated: {nbytes - done} bytes are missing at the end of the file"
                    )
                done += count
        except OSError as error:
            raise self.error(name, f"cannot be read: {error.strerror or error}") from error
        return data


def _read_sharded(index_path: Path) -> dict[str, TensorInfo]:
    """Tensors of the shards that an index names; index and headers must agree."""
    weight_map = _read_weight_map(index_path)
    for name, file in weight_map.items():
        if not file or Path(file).name != file:
            raise CheckpointError(
                f"the index names {file!r}, which is no plain file name", tensor=name, file=str(index_path)
            )
        if not (index_path.parent / file).is_file():
            raise CheckpointError(
                "the index names this file, and it does not exist",
                tensor=name,
                file=str(index_path.parent / file),
            )
    tensors = _merge([index_path.parent / file for file in sorted(set(weight_map.values()))])
    indexed = {_plain_name(name): file for name, file in weight_map.items()}
    if len(indexed) < len(weight_map):
        twice = next(
            name for name in weight_map if _plain_name(name) != name and _plain_name(name) in weight_map
        )
        raise CheckpointError(
            "stands twice in the index, with and without `model.`", tensor=twice, file=str(index_path)
        )
    for name, info in tensors.items():
        if name not in indexed:
            raise CheckpointError(f"is not in the index {index_path.name}", tensor=name, file=str(info.file))
        if indexed[name] != info.file.name:
            raise CheckpointError(
                f"the index says it is in {indexed[name]}", tensor=name, file=str(info.file)
            )
    for name, file in indexed.items():
        if name not in tensors:
            raise CheckpointError(
                "the index names it, the file does not hold it",
                tensor=name,
                file=str(index_path.parent / file),
            )
    return tensors


def _read_weight_map(index_path: Path) -> dict[str, str]:
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot be read as JSON: {error}", file=str(index_path)) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError("has no `weight_map` of tensor names to file names", file=str(index_path))
    return weight_map


def _single_file(path: Path) -> Path:
    """The one safetensors file of a directory without an index."""
    if not path.is_dir():
        raise CheckpointError("is not a directory", file=str(path))
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(
            f"no {INDEX_NAME}, and not exactly one *.safetensors file: {names}", file=str(path)
        )
    return files[0]


def _merge(files: list[Path]) -> dict[str, TensorInfo]:
    """Tensors of several files under their plain names; a name may occur once."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for stored_name, info in read_header(file).items():
            name = _plain_name(stored_name)
            if name in tensors:
                raise CheckpointError(
                    f"duplicate: also in {tensors[name].file.name}", tensor=name, file=str(file)
                )
            tensors[name] = info
    return tensors


def _plain_name(name: str) -> str:
    return name.removeprefix("model.")


def _read_digests(path: Path) -> dict[str, str]:
    """Lines of `sha256sum`: 64 hex digits, a blank, a blank or `*`, the file name."""
    digests = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the list of SHA-256 digests cannot be read: {error}", file=str(path)
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        digest, _, name = line.partition(" ")
        if len(digest) != 64 or not name:
            raise CheckpointError(f"line {number} is not `sha256sum` output: {line!r}", file=str(path))
        digests[name[1:] if name[0] in " *" else name] = digest
    return digests
