"""BatchBuilder: a step plan's flat arrays as tensors, through one host buffer per part.

The C++ core writes every array of a part into one buffer; the device sees one copy of it and views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.config import ReplayMode
from deepinfer.platform.base import DeviceQueue
from deepinfer.runtime.async_batch import Remap
from deepinfer.runtime.batch import Batch, CacheCopies
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.utils.host_memory import HostArrays, PackedArrays, split


class BatchBuilder:
    """Turns plans into the records that forward and sampling read.

    Args:
        core: the `_core.EngineCore` that made the plans.
        device: where the tensors go.
        replay: what prefills compute of the decoder's part of a prompt.
        queue: the device's, which the copies go to; None for a CPU.
    """

    def __init__(
        self,
        core: Any,
        device: torch.device,
        replay: ReplayMode = ReplayMode.OFF,
        queue: DeviceQueue | None = None,
    ) -> None:
        self._queue = queue
        self._ring = None if queue is None else queue.host_ring()
        self._core = core
        self._device = device
        self._replay = replay

    def batch(self, plan: Any) -> tuple[Batch, Remap | None, CacheCopies | None]:
        """The forward's inputs, what to correct in them on the device, and what to copy in the caches.

        The latter two are None when there is nothing. Call right after the plan was made.
        """
        arrays, views, packed = self._views(plan, self._core.batch_layout, self._core.fill_batch)
        host = None
        if plan.is_prefill:  # decode rows may be corrected on the device
            host = {name: torch.from_numpy(arrays[name]) for name in Batch.tensor_names()}
        batch = Batch(
            **{name: views[name] for name in Batch.tensor_names()},
            max_seqlen_k=plan.max_seqlen_k,
            is_prefill=plan.is_prefill,
            replay=self._replay,
            host=host,
            planned=arrays,
            packed=packed,
        )
        copies = None
        if plan.has_copies:
            copies = CacheCopies(views["slot_copies"], views["state_copies"], views["block_copies"])
        if plan.is_prefill or plan.num_matched == 0:
            return batch, None, copies
        remap = Remap(views["remap"], views["committed_lens"], views["ngram_history"])
        if plan.can_redistribute:
            remap = dataclasses.replace(
                remap, limits=views["max_seqlens_q"], confidence_odds=views["confidence_odds"]
            )
        return batch, remap, copies

    def sampling(self, plan: Any) -> SamplingInputs:
        """The sampler's inputs; call once the tokens of earlier steps are committed."""
        return SamplingInputs.of(*self._views(plan, self._core.sampling_layout, self._core.fill_sampling))

    def _views(
        self, plan: Any, layout_of: Callable[[Any], Any], fill: Callable[[Any, Any], None]
    ) -> tuple[HostArrays, dict[str, Tensor], PackedArrays]:
        """The arrays by name, on the host and on the device (in the same memory on a CPU), and their buffer.

        The host's are good until the ring comes round, some steps later.
        """
        layout = layout_of(plan)
        ring, entries = self._ring, tuple(layout.entries)
        if ring is None:
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        else:
            buffer = ring.take(layout.nbytes)
        host = buffer.numpy()
        fill(plan, host)
        device = buffer
        if ring is not None:
            with self._queue.launching():
                device = buffer.to(self._device, non_blocking=True)
            ring.copied()
        words = device[: device.shape[0] // 4 * 4].view(torch.int32)
        return HostArrays(host, entries), split(device, entries), PackedArrays(words, entries)
