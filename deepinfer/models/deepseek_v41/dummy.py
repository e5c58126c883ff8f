"""Random weights: tensors of a configuration without a checkpoint, drawn where they are used.

Bytes are valid in the checkpoint's formats and scaled so that activations stay of order one through all
layers. `DummyWeights` packs one expert of a layer and copies it: each has memory of its own, which is what
time depends on, and loading a layer costs no more than filling it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint.errors import CheckpointError
from deepinfer.checkpoint.safetensors_header import DTYPE_BYTES, TensorInfo
from deepinfer.config import Arithmetic
from deepinfer.layers.experts import RoutedExperts
from deepinfer.layers.inputs import Inputs
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.rank_share import RankShare
from deepinfer.models.deepseek_v41.tensors import TensorSpec, expected_tensors
from deepinfer.models.deepseek_v41.weights import QuantTable, Weights
from deepinfer.utils.aside import Aside

CHUNK_BYTES = 64 << 20
E4M3_RMS = 0.62  # of codes without the exponent's high bit, all others equally likely: at most 1.875
E2M1_RMS = 2.93  # of all codes, equally likely
E8M0_BIAS = 127


class DummyReader:
    """The tensors of a configuration, drawn when they are read; offers what `Weights` asks of a reader.

    Args:
        specs: what there is.
        device: where values are drawn.
        seed: a tensor's values depend on it and on the tensor's name.
    """

    def __init__(self, specs: dict[str, TensorSpec], device: torch.device, seed: int) -> None:
        self._specs = specs
        self._device = device
        self._seed = seed

    @property
    def names(self) -> Iterable[str]:
        """Every tensor's name."""
        return self._specs.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def info(self, name: str) -> TensorInfo:
        """dtype and shape of a tensor."""
        if name not in self._specs:
            raise CheckpointError("missing", tensor=name, file="(random weights)")
        spec = self._specs[name]
        nbytes = math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        return TensorInfo(spec.dtype, spec.shape, Path("(random weights)"), 0, nbytes)

    def error(self, name: str, message: str) -> CheckpointError:
        """An error about a tensor."""
        return CheckpointError(message, tensor=name, file="(random weights)")

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return self.read_rows(name, 0, self.info(name).shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop); the same rows have the same values only if read in the same ranges."""
        spec = self._specs[name]
        generator = torch.Generator(self._device)
        digest = hashlib.sha256(f"{self._seed} {name} {start}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        return self._draw(name, spec, (stop - start, *spec.shape[1:]), generator)

    def row_ranges(self, name: str, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Consecutive row ranges of about `CHUNK_BYTES` each; they start at multiples of `multiple`."""
        info = self.info(name)
        row_bytes = max(info.nbytes // max(info.shape[0], 1), 1)
        step = max(CHUNK_BYTES // row_bytes // multiple, 1) * multiple
        for start in range(0, info.shape[0], step):
            yield start, min(start + step, info.shape[0])

    def _draw(
        self, name: str, spec: TensorSpec, shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor:
        if spec.dtype == "F8_E8M0":
            return torch.full(shape, self._scale_byte(spec), dtype=torch.uint8, device=self._device)
        if spec.dtype in ("F8_E4M3", "I8"):
            codes = torch.empty(shape, dtype=torch.uint8, device=self._device)
            codes.random_(0, 256, generator=generator)
            if spec.dtype == "I8":
                return codes.view(torch.int8)
            return codes.bitwise_and_(0xBF).view(torch.float8_e4m3fn)
        values = torch.empty(shape, dtype=torch.float32, device=self._device)
        mean, deviation = _moments(name, spec)
        values.normal_(mean, deviation, generator=generator)
        return values if spec.dtype == "F32" else values.to(torch.bfloat16)

    def _scale_byte(self, spec: TensorSpec) -> int:
        """The power of two that gives a product of many channels outputs as large as its inputs."""
        matrix = self._specs[spec.scale_of or ""]
        is_packed = matrix.dtype == "I8"
        rms, channels = (E2M1_RMS, 2 * matrix.shape[1]) if is_packed else (E4M3_RMS, matrix.shape[1])
        if ".engram.embed." in (spec.scale_of or ""):
            channels = 1  # rows of a table are inputs
        return E8M0_BIAS + round(math.log2(1 / (rms * math.sqrt(channels))))


def _moments(name: str, spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of an unquantised tensor's values."""
    if name.startswith("embed.") or ".markov_head.embed." in name:
        return 0.0, 1.0
    if name.endswith((".q_weight", ".k_weight")) or (len(spec.shape) == 1 and "norm" in name):
        return 1.0, 0.05
    if len(spec.shape) == 1:
        return 0.0, 0.05
    return 0.0, spec.shape[-1] ** -0.5


@dataclass(frozen=True)
class EvenExperts:
    """Resident experts whose load is even: a stand-in for what all ranks of a group send to one.

    The router still runs over all experts and its weights count; its choice is replaced.

    Attributes:
        experts: the resident ones.
        choice: [rows, slots] int32, slot s of row r goes to resident (r * slots + s) % residents.
    """

    experts: RoutedExperts
    choice: Tensor

    def __call__(
        self,
        x: Tensor | Inputs,
        expert_ids: Tensor,
        expert_weights: Tensor,
        limit: float,
        arithmetic: Arithmetic,
        shared: Aside[Tensor] | None = None,
    ) -> Tensor:
        """As `RoutedExperts`."""
        num_rows = expert_ids.shape[0]
        assert num_rows <= self.choice.shape[0], f"{num_rows=} {self.choice.shape=}"
        return self.experts(x, self.choice[:num_rows], expert_weights, limit, arithmetic, shared)


MAX_ROWS = 1 << 18  # of a step; what `EvenExperts.choice` has


class DummyWeights(Weights):
    """Random weights of one rank.

    Args:
        config: the rank's, `share.config(...)` of the model's.
        share: the rank.
        seed: of the values.
        on_read: called with the bytes of each tensor that has been drawn (progress).
        device: where the weights go.
        is_packed, takes_codes: as in `Weights`.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        share: RankShare,
        seed: int,
        on_read: Callable[[int], object] | None = None,
        *,
        device: torch.device | str = "cpu",
        is_packed: bool | None = None,
        takes_codes: bool = False,
    ) -> None:
        device = torch.device(device)
        self._share = share
        self._num_slots = {"layers": config.num_experts_per_tok, "mtp": config.dspark_num_experts_per_tok}
        self._choices: dict[tuple[int, int], Tensor] = {}
        reader = DummyReader(expected_tensors(config), device, seed)
        super().__init__(reader, on_read, device=device, is_packed=is_packed, takes_codes=takes_codes)

    def experts(self, prefix: str, num_experts: int) -> RoutedExperts:
        """The resident experts under `prefix`, with an even load where not all are resident."""
        resident = self._share.resident_of(prefix, num_experts)
        if self._share.is_whole:
            return super().experts(prefix, resident)
        slots = self._num_slots[prefix.partition(".")[0]]
        if (slots, resident) not in self._choices:
            places = torch.arange(MAX_ROWS * slots, dtype=torch.int32, device=self._device)
            self._choices[slots, resident] = (places % resident).view(-1, slots)
        return EvenExperts(super().experts(prefix, resident), self._choices[slots, resident])

    def table(self, prefix: str) -> QuantTable:
        """A table that is drawn in place."""
        weight, scale = (self._reader.info(f"{prefix}.{part}") for part in ("weight", "scale"))
        rows = torch.empty(weight.shape, dtype=torch.uint8, device=self._device)
        for start, stop in self._reader.row_ranges(f"{prefix}.weight"):
            rows[start:stop] = self._reader.read_rows(f"{prefix}.weight", start, stop).view(torch.uint8)
        scales = torch.empty(scale.shape, dtype=torch.uint8, device=self._device)
        scales.fill_(int(self._reader.read_rows(f"{prefix}.scale", 0, 1)[0, 0]))
        self._done(f"{prefix}.weight")
        self._done(f"{prefix}.scale")
        return QuantTable(rows, scales)

    def check_unread(self) -> None:
        """Nothing: what nobody reads is not drawn."""

    def _packed_experts(
        self, prefix: str, num_experts: int, names: tuple[str, ...], *, gated: bool
    ) -> Tensor:
        one = super()._packed_experts(prefix, 1, names, gated=gated)
        return one.expand(num_experts, *one.shape[1:]).contiguous()
