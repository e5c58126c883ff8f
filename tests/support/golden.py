"""Golden data of an independent implementation, read lazily.

Files `tests/data/golden/<model>/<file>.safetensors` hold tensors under keys `<prompt>/<mode>/<what>` (caches
and the drafter: see their keys); modes are "plain" (float32, caches unrounded), "fp32" (float32, release
caches), "bf16" and "w8a8".
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.paths import GOLDEN, MODELS

if TYPE_CHECKING:
    from torch import Tensor


@functools.cache
def golden(model: str) -> Golden:
    """The golden data of "tiny-quant" or "v41-tiny"."""
    return Golden(GOLDEN / model, MODELS[model])


@functools.cache
def golden_units() -> TensorFile:
    """Single blocks on small inputs; `golden_units().about` describes them."""
    return TensorFile(GOLDEN / "units.safetensors")


class TensorFile:
    """One safetensors file; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file = safe_open(path, framework="pt")
        self.keys = frozenset(self._file.keys())
        self.path = path

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.keys:
            raise KeyError(f"{key!r} is not in {self.path}; keys such as {sorted(self.keys)[:4]} are")
        return self._file.get_tensor(key)

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Every tensor below `prefix/`, by the rest of its key."""
        return {
            key.removeprefix(prefix + "/"): self[key] for key in self.keys if key.startswith(prefix + "/")
        }

    @functools.cached_property
    def about(self) -> Any:
        """The JSON file of the same name."""
        return json.loads(self.path.with_suffix(".json").read_text())


class Golden:
    """All files of one model; attributes are the files' names."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder = folder
        self.checkpoint = checkpoint  # the model directory that the data belongs to

    @functools.cached_property
    def prompts(self) -> dict[str, list[int]]:
        """Token ids by prompt name, "len1", "len7", "len128" ..."""
        return {prompt["name"]: prompt["ids"] for prompt in self.json("prompts")}

    @functools.cached_property
    def greedy(self) -> dict[str, dict[str, Any]]:
        """prompt -> mode -> {"token_ids", "margins", "clear_steps" ...}."""
        return self.json("greedy")

    @functools.cached_property
    def stats(self) -> dict[str, dict[str, Any]]:
        """prompt -> pair of modes -> how far apart the reference's own modes are."""
        return self.json("stats")

    @functools.cached_property
    def logits(self) -> TensorFile:
        return TensorFile(self.folder / "logits.safetensors")

    @functools.cached_property
    def replay(self) -> TensorFile:
        """Prompts of which decoder layers ran the last rows only; `about` has their greedy tokens."""
        return TensorFile(self.folder / "replay.safetensors")

    @functools.cached_property
    def layers(self) -> TensorFile:
        return TensorFile(self.folder / "layers.safetensors")

    @functools.cached_property
    def caches(self) -> TensorFile:
        return TensorFile(self.folder / "caches.safetensors")

    @functools.cached_property
    def dspark(self) -> TensorFile:
        return TensorFile(self.folder / "dspark.safetensors")

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())
