"""Batch: the tensors that one forward reads. Rows are query tokens of all sequences, back to back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import ReplayMode
from deepinfer.utils.host_memory import PackedArrays


@dataclass(frozen=True)
class CacheCopies:
    """Slots and blocks of the pools that a step copies whole, rows of (source, target), int32.

    Of each list all sources are read before any target is written.
    """

    slots: Tensor  # [n, 2] before the forward: states that sequences resume from
    states: Tensor  # [n, 2] slots, at the end of the step: states to keep, or of equal sequences
    blocks: Tensor  # [n, 2] likewise


@dataclass(frozen=True)
class Batch:
    """One step's inputs on the device; every tensor is int32 and contiguous.

    S sequences, Q query rows in sequence order, R output rows. The rows of a sequence are consecutive
    positions `seqlens_k - seqlens_q ... seqlens_k - 1`. A step is all prefill or all decode; the model
    runs the same code for both.
    """

    input_ids: Tensor  # [Q]
    positions: Tensor  # [Q]
    row_seq: Tensor  # [Q] sequence of each row, 0..S-1
    ngram_ids: Tensor  # [Q, max_ngram] compressed ids of positions p, p-1, ...; pad where there is none
    cu_seqlens_q: Tensor  # [S + 1]
    seqlens_k: Tensor  # [S] tokens of the sequence after this step, drafts included
    state_slots: Tensor  # [S]
    block_tables: Tensor  # [S, max_blocks] 0 where unused
    total_lens: Tensor  # [S] tokens that rows are computed towards; decides which decoder rows nobody reads
    keep_all: Tensor  # [S] 1 when every row's output is wanted (prompt log-probabilities)
    window_starts: Tensor  # [S] first position that decoder windows see, with bounded replay
    output_rows: Tensor  # [R] rows whose final hidden state is wanted, ascending
    max_seqlen_k: int  # max(seqlens_k), known on the host
    is_prefill: bool
    replay: ReplayMode = (
        ReplayMode.OFF
    )  # what a prefill computes of the decoder; OFF heeds no `window_starts`
    host: Mapping[str, Tensor] | None = None  # the same tensors on the host, where they were filled
    planned: Mapping[str, np.ndarray] | None = None  # likewise of every step, before corrections
    packed: PackedArrays | None = None  # what the tensors are views of; None where some are not

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.seqlens_k.shape[0]

    def on_host(self, *names: str) -> Batch:
        """This batch with the named tensors on the host; copies them and waits if `host` is not there."""
        if self.input_ids.is_cpu:
            return self
        tensors = [getattr(self, name) for name in names]
        if self.host is not None:
            found = [self.host[name] for name in names]
        else:
            sizes = [tensor.numel() for tensor in tensors]
            flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split(sizes)
            found = [part.view(tensor.shape) for part, tensor in zip(flat, tensors, strict=True)]
        return dataclasses.replace(self, **dict(zip(names, found, strict=True)))

    @classmethod
    @functools.cache
    def tensor_names(cls) -> tuple[str, ...]:
        """Names of the tensors, which are those of the arrays that the C++ core fills."""
        hosts = ("max_seqlen_k", "is_prefill", "replay", "host", "planned", "packed")
        return tuple(field.name for field in dataclasses.fields(cls) if field.name not in hosts)
