"""Where tests keep what they have built, between runs: files named by a hash of what they are made from."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def build_cache(name: str) -> Path:
    """The user's cache directory for one kind of thing, made if it is not there."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "deepinfer-tests" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file so that no other process sees a part of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
