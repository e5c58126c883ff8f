"""What a model offers the engine: the caches it needs and the three calls of a step.

`runtime` and the C++ core build from a `ModelSpec` and never ask which model it describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.runtime.batch import Batch
    from deepinfer.runtime.caches import Caches


@dataclass(frozen=True)
class WindowSpec:
    """A per-sequence ring of the last tokens' KV vectors of one layer."""

    layer_id: int  # drafter layers follow the backbone's
    window: int  # tokens a query sees, itself included
    width: int  # channels of one vector


@dataclass(frozen=True)
class PagedSpec:
    """Compressed KV and index keys that one layer owns in the paged pool."""

    layer_id: int
    ratio: int  # tokens per entry
    width: int  # channels of a main KV entry
    index_width: int  # channels of an index key


@dataclass(frozen=True)
class CompressionSpec:
    """Per-sequence float32 state of a compressor with ratio > 1."""

    layer_id: int
    ratio: int
    width: int


@dataclass(frozen=True)
class ModelSpec:
    """The caches of a model, in layer order, and the numbers that the engine needs from it."""

    vocab_size: int
    num_layers: int  # backbone layers
    first_decoder_layer: int  # layers from here on read KV that earlier layers produced
    max_ngram: int  # columns of `Batch.ngram_ids`; 0 when the model hashes no n-grams
    draft_block_size: int  # drafts per block of the built-in drafter; 0 when it has none
    windows: tuple[WindowSpec, ...]
    paged: tuple[PagedSpec, ...]
    compression: tuple[CompressionSpec, ...]


@dataclass(frozen=True)
class ForwardOutput:
    """What one forward hands up.

    Attributes:
        hidden_states: [R, hidden] of `batch.output_rows`, after the last norm.
        features: [F, width] inputs of the built-in drafter's context, None when they were not asked for.
        feature_rows: [F] int64, ascending rows of the batch that `features` belong to, None likewise. They
            include the last `window` positions of every sequence's known tokens that are in the batch.
    """

    hidden_states: Tensor
    features: Tensor | None = None
    feature_rows: Tensor | None = None


class Model(Protocol):
    """The calls of one step, on one device."""

    spec: ModelSpec

    def forward(self, batch: Batch, caches: Caches, want_features: bool = False) -> ForwardOutput:
        """Run the backbone and write its caches."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
