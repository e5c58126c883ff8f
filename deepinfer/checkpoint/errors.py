"""Errors of reading a checkpoint: each names the file and, where there is one, the tensor or key at fault."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The checkpoint on disk is not what its configuration and the engine need.

    Attributes:
        tensor: name of the tensor at fault, or None when the fault is not about one tensor.
        file: file name or path at fault, or None when no file can be named.
    """

    def __init__(self, message: str, *, tensor: str | None = None, file: str | None = None):
        parts = [f"tensor {tensor!r}" if tensor else "", f"file {file!r}" if file else ""]
        where = " in ".join(part for part in parts if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.tensor = tensor
        self.file = file


class ConfigError(CheckpointError):
    """A key of `config.json` is missing, has the wrong type or a value that the engine does not support.

    Attributes:
        key: dotted name of the key, for example "text_config.head_dim".
    """

    def __init__(self, key: str, message: str):
        super().__init__(f"config key {key!r}: {message}")
        self.key = key
