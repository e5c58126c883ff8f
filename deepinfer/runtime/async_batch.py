"""Asynchronous scheduling: corrects, on the device, a decode step that the host planned one step behind.

The host plans step N while step N-1 runs, so it does not know how many drafts N-1 accepts, nor its tokens.
It plans with the longest lengths possible; before N's forward the device puts in what N-1 really left:

    known length   L = committed_len + num_emitted        (of the sequence's row in N-1, `remap`)
    row j          position L - 1 + j;  input: N-1's last token (j = 0), then N-1's drafts
    n-gram window  the same tokens, then N-1's emitted ones, then the host's history before them;
                   pad at a barrier (a token of an image) and behind it

Nor has it seen N-1's confidences when it decides how many drafts each sequence verifies. Where those lengths
are chosen by confidence, the host's total stands and the device deals the rows anew before the correction.

Everything here is arithmetic on device tensors: nothing waits for the host, nothing is copied to it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from deepinfer.runtime.batch import Batch
from tilelang_ops.speculative import redistribute
from tilelang_ops.step_inputs import correct_rows, deal_rows


@dataclass(frozen=True)
class Remap:
    """What the host says about sequences whose last step it has not seen; S sequences of step N.

    Attributes:
        rows: [S] int32 sequence of step N-1, -1 where the host knew everything.
        committed_lens: [S] int32 tokens known before step N-1's.
        ngram_history: [S, max_ngram - 1] int32 compressed ids at committed_len - 1, committed_len - 2, ...
        limits: [S] int32 most query rows of each sequence; None where the planned rows stand.
        confidence_odds: [k] float32 factors that correct the odds of confidences; None likewise.
    """

    rows: Tensor
    committed_lens: Tensor
    ngram_history: Tensor
    limits: Tensor | None = None
    confidence_odds: Tensor | None = None


@dataclass(frozen=True)
class NgramVocab:
    """What tokens are in n-gram windows.

    Attributes:
        token_map: [vocab] int32 compressed ids.
        is_barrier: [vocab] bool; a window holds `pad_id` at such a token and behind it.
        pad_id: a compressed id.
    """

    token_map: Tensor
    is_barrier: Tensor
    pad_id: int


@dataclass(frozen=True)
class DeviceStep:
    """What a step leaves on the device for the next one; S sequences, k drafts.

    Attributes:
        emitted: [S, k + 1] int32 accepted drafts, then the sampled token; 0 behind `num_emitted`.
        num_emitted: [S] int32, 0 where the sequence sampled nothing.
        drafts: [S, k] int32 proposed for the next step; None when it proposed none.
        confidences: [S, k] float32 of the drafts; None likewise.
    """

    emitted: Tensor
    num_emitted: Tensor
    drafts: Tensor | None
    confidences: Tensor | None = None


def correct_batch(
    batch: Batch, remap: Remap, previous: DeviceStep, vocab: NgramVocab | None, *, in_place: bool = False
) -> Batch:
    """The batch of a decode step as it really is.

    Args:
        batch: the step as planned; the number of rows of each sequence stands.
        remap: which sequences to correct.
        previous: the step that was in flight when this one was planned.
        vocab: None when the model hashes no n-grams.
        in_place: write over the tensors as planned.
    """
    rows = correct_rows(
        batch.input_ids,
        batch.positions,
        batch.row_seq,
        batch.ngram_ids,
        batch.cu_seqlens_q,
        batch.seqlens_k,
        batch.total_lens,
        sources=remap.rows,
        committed_lens=remap.committed_lens,
        ngram_history=remap.ngram_history,
        emitted=previous.emitted,
        num_emitted=previous.num_emitted,
        drafts=previous.drafts,
        token_map=None if vocab is None else vocab.token_map,
        is_barrier=None if vocab is None else vocab.is_barrier,
        pad_id=0 if vocab is None else vocab.pad_id,
        in_place=in_place,
    )
    return batch if in_place else dataclasses.replace(batch, **rows._asdict(), packed=None)


def deal(batch: Batch, remap: Remap, previous: DeviceStep) -> tuple[Batch, Tensor]:
    """A planned decode step with its rows dealt by the newest confidences, and the rows of each sequence.

    `correct_batch` comes next.

    Args:
        batch: the step as planned.
        remap: with limits and odds.
        previous: the step that was in flight when this one was planned; it has proposed drafts.
    """
    seqlens_q = redistribute(
        batch.num_rows, remap.rows, previous.confidences, remap.limits, remap.confidence_odds
    )
    return with_seqlens_q(batch, seqlens_q), seqlens_q


def with_seqlens_q(batch: Batch, seqlens_q: Tensor) -> Batch:
    """A decode batch whose rows are dealt to its sequences anew; the total is the same.

    Ids and windows are only right for sequences with as many rows as planned, or fewer, and for those that
    `correct_batch` then corrects.
    """
    rows = deal_rows(seqlens_q, batch.cu_seqlens_q, batch.seqlens_k, batch.input_ids, batch.ngram_ids)
    return dataclasses.replace(batch, total_lens=rows.seqlens_k, **rows._asdict(), packed=None)
