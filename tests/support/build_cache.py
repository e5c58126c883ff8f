"""Where tests keep what they have built, between runs: files named by a hash of what they are made from."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any


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


def remembered(name: str, *decided_by: str) -> Path:
    """File for what is decided by these texts; it may be there already."""
    key = hashlib.sha256("|".join(decided_by).encode()).hexdigest()[:32]
    return build_cache(name) / f"{key}.json"


def fingerprint(program: Any, traced: Any) -> str:
    """Changes with a traced program and the options that it is compiled with; equal in every process."""
    from tvm.ir import structural_hash

    options = sorted(program.factory.pass_configs.items())
    return f"{program.factory.uses_tensor_cores}|{options}|{structural_hash(traced)}"
