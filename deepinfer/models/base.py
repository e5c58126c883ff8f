"""What a model offers the engine: the caches it needs, the calls of a step, and those of its drafter.

`runtime` and the C++ core build from a `ModelSpec` and never ask which model it describes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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
class AttentionTerm:
    """Keys of one kind that a query sees.

    A query with t visible tokens costs `flops * min((t + offset) // divisor, cap)`.
    """

    flops: float
    divisor: int
    offset: int
    cap: int


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
    attention_terms: tuple[
        AttentionTerm, ...
    ] = ()  # attention work of a query, for budgets and recompute costs
    flops_per_token: float = 1.0  # work of a row that does not depend on its position
    values_per_row: int = 0  # activations that a row of a forward holds at once, about
    scratch_bytes: int = 0  # what a forward holds beside them, at most


@dataclass(frozen=True)
class ForwardOutput:
    """What one forward hands up.

    Attributes:
        hidden_states: [R, hidden] of `batch.output_rows`, after the last norm.
        features: [F, width] inputs of the built-in drafter's context, None when they were not asked for.
        feature_rows: [F] int64, ascending rows of the batch that `features` belong to, or what tells the
            drafter of the same model about them; None likewise. They include the last `window` positions of
            every sequence's known tokens that are in the batch.
    """

    hidden_states: Tensor
    features: Tensor | None = None
    feature_rows: Any = None


class LayerGate(Protocol):
    """Bytes on their way into the pools, which a forward meets layer by layer."""

    def wait(self, layer_id: int) -> None:
        """Return when everything that this layer and those below it read is in the pools."""

    def finish(self) -> None:
        """Return when everything is there; to be called before anybody else touches the pools."""


class Model(Protocol):
    """The calls of one step, on one device."""

    spec: ModelSpec

    def reserve(self, num_positions: int) -> None:
        """Make what depends on positions hold those below `num_positions`, so that no step has to."""

    def forward(
        self, batch: Batch, caches: Caches, want_features: bool = False, gate: LayerGate | None = None
    ) -> ForwardOutput:
        """Run the backbone and write its caches; with a gate, pass it before each layer touches them."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""


@dataclass(frozen=True)
class Proposal:
    """Drafts of n sequences.

    Attributes:
        tokens: [n, k] int32.
        confidence_logits: [n, k] float32: the sigmoid, after a division by the calibrated temperature,
            estimates the probability that a draft is accepted if those before it are.
    """

    tokens: Tensor
    confidence_logits: Tensor


@dataclass(frozen=True)
class DraftContext:
    """What a drafter takes in of F rows.

    Attributes:
        features: [F, width] from the backbone.
        positions: [F] int32.
        state_slots: [F] int32 or int64 of the rows' sequences.
        max_length: most tokens that a sequence of the step has.
    """

    features: Tensor
    positions: Tensor
    state_slots: Tensor
    max_length: int


class Drafter(Protocol):
    """The calls of a model's built-in drafter, on the same device and caches.

    A sequence's drafts depend on that sequence alone, bit for bit, and on nothing that verification rejected.
    """

    block_size: int  # most drafts of a proposal
    context_size: int  # positions in front of an anchor that a proposal sees

    def context(self, features: Tensor, feature_rows: Any, batch: Batch) -> DraftContext:
        """The rows to take in of what the forward of `batch` handed out (`ForwardOutput`)."""

    def store_context(self, context: DraftContext, caches: Caches) -> None:
        """Take in the context of every forward, in order, before the next `propose`."""

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        state_slots: Tensor,
        caches: Caches,
        choose: Callable[[int, Tensor], Tensor],
        num_drafts: int,
    ) -> Proposal:
        """Draft the `num_drafts` (1 ... block_size) tokens behind the newest token of n sequences.

        Args:
            anchors: [n] int32 newest token of each sequence, sampled and not yet run.
            positions: [n] int32 of the anchors.
            state_slots: [n] int32.
            caches: the pools.
            choose: (draft number, logits float32 [n, vocab], its to change) -> [n] int32 tokens.
            num_drafts: calls of `choose`, in ascending order.
        """
