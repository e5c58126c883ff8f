"""BatchBuilder: a step plan's flat arrays as tensors, through one host buffer per part.

The C++ core writes every array of a part into one buffer; the device sees one copy of it and views.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepinfer.runtime.batch import Batch
from deepinfer.sampling.inputs import SamplingInputs

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class BatchBuilder:
    """Turns plans of one `_core.EngineCore` into the records that forward and sampling read."""

    def __init__(self, core: ModuleType, device: torch.device) -> None:
        self._core = core
        self._device = device

    def batch(self, plan: Any) -> Batch:
        """The forward's inputs; call right after the plan was made."""
        views = self._views(plan, self._core.batch_layout, self._core.fill_batch)
        return Batch(
            **{name: views[name] for name in Batch.tensor_names()},
            max_seqlen_k=plan.max_seqlen_k,
            is_prefill=plan.is_prefill,
        )

    def sampling(self, plan: Any) -> SamplingInputs:
        """The sampler's inputs; call once the tokens of earlier steps are committed."""
        return SamplingInputs.from_host(
            self._views(plan, self._core.sampling_layout, self._core.fill_sampling)
        )

    def _views(self, plan: Any, layout_of: Any, fill: Any) -> dict[str, Tensor]:
        layout = layout_of(plan)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        fill(plan, buffer.numpy())
        buffer = buffer.to(self._device)
        views = {}
        for name, dtype, shape, offset in layout.entries:
            kind = _DTYPES[dtype]
            num_bytes = kind.itemsize
            for size in shape:
                num_bytes *= size
            views[name] = buffer[offset : offset + num_bytes].view(kind).view(shape)
        return views
