"""SamplingInputs: everything but the logits that choosing one token per row needs.

The C++ core fills these arrays from its sequences, one row per output row of the step. Most requests use few
options, so what only some rows need (penalties, bias, bans, allowed tokens) is sparse and names its row; the
rows of every sparse array ascend. Decisions that steer the work (is any row random? truncated?) are made from
the host's copy of the arrays, so a device never has to answer them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deepinfer.utils.host_memory import PackedArrays
from deepinfer.utils.upload import upload, upload_one

# Sparse groups: the array that names the row, then the arrays of the same length.
_TRIPLETS = (
    ("penalty_rows", "penalty_tokens", "penalty_counts"),
    ("bias_rows", "bias_tokens", "bias_values"),
    ("ban_rows", "ban_tokens"),
)
_OTHERS = ("host", "masks", "packed")  # fields that are no array of the core
_DENSE = (
    "seeds",
    "token_index",
    "inv_temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_logprobs",
    "forced",
    "repetition",
    "presence",
    "frequency",
    "draft_ids",
    "is_ratio",
)


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens some rows may choose; a row without one may choose all.

    Attributes:
        rows: [M] int32, ascending.
        words: [M, ceil(V / 32)] int32; bit v % 32 of word v // 32 allows token v.
        host_rows: the same rows on the host.
    """

    rows: Tensor
    words: Tensor
    host_rows: np.ndarray

    @classmethod
    def of(cls, masks: Mapping[int, np.ndarray], device: torch.device) -> TokenMasks | None:
        """From the words of each row, in ascending order of rows; None without any."""
        if not masks:
            return None
        rows = np.fromiter(masks, dtype=np.int32)
        words = np.stack(list(masks.values()))
        return cls(upload_one(rows, device), upload_one(words, device), rows)

    def slice(self, start: int, stop: int) -> TokenMasks | None:
        """Those of the rows start ... stop - 1, renumbered from 0."""
        low, high = np.searchsorted(self.host_rows, (start, stop))
        if low == high:
            return None
        return TokenMasks(self.rows[low:high] - start, self.words[low:high], self.host_rows[low:high] - start)


@dataclass(frozen=True)
class SamplingInputs:
    """Parameters of R rows that belong to S sequences; rows of a sequence are consecutive.

    A row at position p generates the token with absolute index t = p + 1. Rows of one sequence differ only
    by index, history and draft, so plain decoding, verification and prompt scoring are the same rows.
    """

    seeds: Tensor  # [R] int64, bit pattern of the sequence's unsigned 64-bit seed
    token_index: Tensor  # [R] int64, t
    inv_temperature: Tensor  # [R] float32, 1 / temperature; 0 = greedy
    top_p: Tensor  # [R] float32, 1 = off
    top_k: Tensor  # [R] int32, -1 = off
    min_p: Tensor  # [R] float32, 0 = off
    num_logprobs: Tensor  # [R] int32, -1 = none wanted, k = the chosen token's and the k best
    forced: Tensor  # [R] int32, the token that replaces the choice, -1 = free
    repetition: Tensor  # [R] float32, 1 = off
    presence: Tensor  # [R] float32, 0 = off
    frequency: Tensor  # [R] float32, 0 = off
    draft_ids: Tensor  # [R] int32, draft that the row tests, -1 = none
    is_ratio: Tensor  # [R] int32, 1 = random drafts are tested by the ratio of probabilities
    row_offsets: Tensor  # [S + 1] int32, first row of each sequence

    penalty_rows: Tensor  # [H] int32; pairs (row, token) are unique
    penalty_tokens: Tensor  # [H] int32
    penalty_counts: Tensor  # [H] int32, occurrences in the output before the row; 0 = in the prompt only
    bias_rows: Tensor  # [B] int32; pairs (row, token) are unique
    bias_tokens: Tensor  # [B] int32
    bias_values: Tensor  # [B] float32, finite or -inf
    ban_rows: Tensor  # [N] int32; pairs may repeat
    ban_tokens: Tensor  # [N] int32
    allowed_rows: Tensor  # [A] int32, rows that have a list of allowed tokens
    allowed_offsets: Tensor  # [A + 1] int32
    allowed_tokens: Tensor  # [M] int32

    host: Mapping[str, np.ndarray]  # the same arrays on the host
    masks: TokenMasks | None = None  # of rows that follow a grammar
    packed: PackedArrays | None = None  # what the tensors are views of; None where some are not

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, np.ndarray],
        tensors: Mapping[str, Tensor],
        packed: PackedArrays | None = None,
    ) -> SamplingInputs:
        """Builds the record from all arrays by name, on the host and on the device that samples."""
        return cls(*(tensors[name] for name in cls.array_names()), host=arrays, packed=packed)

    @classmethod
    @functools.cache
    def array_names(cls) -> tuple[str, ...]:
        """Names of the arrays, in the order of the fields."""
        return tuple(field.name for field in dataclasses.fields(cls) if field.name not in _OTHERS)

    @classmethod
    def from_host(
        cls,
        host: Mapping[str, Tensor],
        device: Mapping[str, Tensor] | None = None,
    ) -> SamplingInputs:
        """Builds the record from the arrays of one step.

        Args:
            host: every tensor field by name, in host memory.
            device: the same arrays on the device that samples; the host's own when None.
        """
        arrays = {name: host[name].numpy() for name in cls.array_names()}
        return cls.of(arrays, host if device is None else device)

    @property
    def num_rows(self) -> int:
        return self.host["seeds"].shape[0]

    @property
    def device(self) -> torch.device:
        return self.seeds.device

    @cached_property
    def is_plain(self) -> bool:
        """Whether no row asks for more than temperature, truncation and a seed."""
        host = self.host
        sparse = ("penalty_rows", "bias_rows", "ban_rows", "allowed_rows")
        return (
            self.masks is None
            and not any(host[name].shape[0] for name in sparse)
            and not (host["num_logprobs"] >= 0).any()
            and not (host["forced"] >= 0).any()
            and not host["is_ratio"].any()
        )

    def rows_where(self, mask: np.ndarray) -> Tensor:
        """Indices of the rows in a host mask [R] bool, as an int64 tensor on the sampling device."""
        return upload_one(np.flatnonzero(mask), self.device)

    def slice(self, start: int, stop: int) -> SamplingInputs:
        """The rows start ... stop - 1, renumbered from 0, so that few logits need to exist at once.

        `row_offsets` is clipped to the slice: a sequence that it cuts keeps only the rows inside.
        """
        host: dict[str, np.ndarray] = {}
        device: dict[str, Tensor] = {}

        def take(name: str, low: int, high: int, minus: int = 0) -> None:
            host[name] = self.host[name][low:high] - minus if minus else self.host[name][low:high]
            tensor = getattr(self, name)[low:high]
            device[name] = tensor - minus if minus else tensor

        for name in _DENSE:
            take(name, start, stop)
        for rows, *values in _TRIPLETS:
            low, high = np.searchsorted(self.host[rows], (start, stop))
            take(rows, low, high, minus=start)
            for name in values:
                take(name, low, high)
        low, high = np.searchsorted(self.host["allowed_rows"], (start, stop))
        first, last = self.host["allowed_offsets"][[low, high]]
        take("allowed_rows", low, high, minus=start)
        take("allowed_offsets", low, high + 1, minus=int(first))
        take("allowed_tokens", first, last)
        host["row_offsets"] = np.clip(self.host["row_offsets"], start, stop) - np.int32(start)
        device["row_offsets"] = self.row_offsets.clamp(start, stop) - start
        masks = None if self.masks is None else self.masks.slice(start, stop)
        return SamplingInputs(**device, host=host, masks=masks)

    def with_masks(self, masks: TokenMasks | None) -> SamplingInputs:
        """The same under other masks."""
        return dataclasses.replace(self, masks=masks)

    def without_bans(self, rows: Collection[int]) -> SamplingInputs:
        """The same, but that some rows ban no token."""
        kept = np.flatnonzero(~np.isin(self.host["ban_rows"], list(rows)))
        host = {**self.host, **{name: self.host[name][kept] for name in ("ban_rows", "ban_tokens")}}
        index = upload_one(kept, self.device)
        return dataclasses.replace(
            self, ban_rows=self.ban_rows[index], ban_tokens=self.ban_tokens[index], host=host, packed=None
        )

    def take(self, rows: np.ndarray) -> SamplingInputs:
        """One row of each of some sequences, renumbered from 0, so that every sequence has one row; no masks.

        Args:
            rows: [n] int64 on the host, ascending and distinct.
        """
        host = {name: self.host[name][rows] for name in _DENSE}
        for row_name, *value_names in _TRIPLETS:
            owner = np.searchsorted(rows, self.host[row_name])
            kept = np.flatnonzero(np.isin(self.host[row_name], rows))
            host[row_name] = owner[kept].astype(np.int32)
            for name in value_names:
                host[name] = self.host[name][kept]
        kept = np.flatnonzero(np.isin(self.host["allowed_rows"], rows))
        offsets = self.host["allowed_offsets"]
        lists = [self.host["allowed_tokens"][offsets[i] : offsets[i + 1]] for i in kept]
        host["allowed_rows"] = np.searchsorted(rows, self.host["allowed_rows"][kept]).astype(np.int32)
        host["allowed_offsets"] = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        host["allowed_tokens"] = np.concatenate([*lists, np.empty(0, np.int32)]).astype(np.int32)
        host["row_offsets"] = np.arange(rows.shape[0] + 1, dtype=np.int32)
        device = dict(zip(host, upload(list(host.values()), self.device), strict=True))
        return SamplingInputs(**device, host=host)
