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

import torch
from torch import Tensor

from deepinfer.runtime.batch import Batch

_EDGE = 1e-3  # confidences are corrected inside of (0, 1), as in csrc/core/draft_calibration.cpp


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


def correct_batch(batch: Batch, remap: Remap, previous: DeviceStep, vocab: NgramVocab | None) -> Batch:
    """The batch of a decode step as it really is.

    Args:
        batch: the step as planned; the number of rows of each sequence stands.
        remap: which sequences to correct.
        previous: the step that was in flight when this one was planned.
        vocab: None when the model hashes no n-grams.
    """
    source = remap.rows.clamp(min=0).long()
    is_matched = remap.rows >= 0
    seqlens_q = batch.cu_seqlens_q.diff()
    num_emitted = previous.num_emitted[source]
    starts = remap.committed_lens + num_emitted - 1
    seqlens_k = torch.where(is_matched, starts + seqlens_q, batch.seqlens_k)

    seq = batch.row_seq.long()
    row_is_matched = is_matched[seq]
    place = torch.arange(batch.num_rows, dtype=torch.int32, device=seq.device) - batch.cu_seqlens_q[seq]
    positions = torch.where(row_is_matched, starts[seq] + place, batch.positions)
    # Index of each row's token among those that came after the committed ones: emitted, then drafts.
    newest = num_emitted[seq] - 1 + place
    tokens = _new_tokens(previous, source[seq], num_emitted[seq], newest)
    input_ids = torch.where(row_is_matched, tokens, batch.input_ids)
    corrected = dataclasses.replace(
        batch,
        input_ids=input_ids,
        positions=positions,
        seqlens_k=seqlens_k,
        total_lens=torch.where(is_matched, seqlens_k, batch.total_lens),
    )
    width = batch.ngram_ids.shape[1]
    if vocab is None or width == 0:
        return corrected
    columns = []
    is_behind = torch.zeros_like(row_is_matched)  # a barrier has been met
    for back in range(width):
        index = newest - back
        token = _new_tokens(previous, source[seq], num_emitted[seq], index.clamp(min=0)).long()
        is_behind = is_behind | ((index >= 0) & vocab.is_barrier[token])
        known = vocab.token_map[token]
        if back > 0:  # the history has one column less, and its own barriers are pads already
            old_place = (-1 - index).clamp(0, width - 2).long()
            known = torch.where(index >= 0, known, remap.ngram_history[seq, old_place])
        columns.append(torch.where(is_behind, vocab.pad_id, known))
    windows = torch.where(row_is_matched[:, None], torch.stack(columns, 1), batch.ngram_ids)
    return dataclasses.replace(corrected, ngram_ids=windows)


def _new_tokens(previous: DeviceStep, source: Tensor, num_emitted: Tensor, index: Tensor) -> Tensor:
    """Token `index` of each row's source: its emitted tokens, then its drafts. All [Q]; result int32."""
    width = previous.emitted.shape[1]
    emitted = previous.emitted[source, index.clamp(0, width - 1).long()]
    if previous.drafts is None:
        return emitted
    draft = previous.drafts[source, (index - num_emitted).clamp(0, width - 2).long()]
    return torch.where(index < num_emitted, emitted, draft)


def deal(batch: Batch, remap: Remap, previous: DeviceStep) -> Batch:
    """A planned decode step with its rows dealt by the newest confidences; `correct_batch` comes next.

    Args:
        batch: the step as planned.
        remap: with limits and odds.
        previous: the step that was in flight when this one was planned; it has proposed drafts.
    """
    survivals = corrected_survivals(previous.confidences, remap.confidence_odds)
    return with_seqlens_q(batch, redistribute(batch.num_rows, remap.rows, survivals, remap.limits))


def corrected_survivals(confidences: Tensor, odds: Tensor) -> Tensor:
    """Probability that drafts up to each position stand, as the core's calibration sees it.

    Args:
        confidences: [S, k] float32; 0 marks drafts that are not worth a row.
        odds: [k] float32.
    """
    inside = confidences.clamp(_EDGE, 1 - _EDGE)
    corrected = odds * inside / (1 - inside + odds * inside)
    return torch.where(confidences > 0, corrected, 0.0).cumprod(1)


def redistribute(num_rows: int, remap: Tensor, survivals: Tensor, limits: Tensor | None = None) -> Tensor:
    """Query rows of each sequence when the total is fixed and the newest survivals are known.

    Every sequence gets one row; the others go to the largest survivals, ties to the lower flat index
    (sequence, position). A sequence's survivals never increase with the position, so each gets a prefix of
    its drafts. Sequences without a source count as survival 0; with limits they keep theirs, for the host
    has planned them exactly.

    Args:
        num_rows: query rows of the step.
        remap: [S] int32 row of each sequence in `survivals`, -1 for none.
        survivals: [S', k] float32.
        limits: [S] int32 most rows of each sequence, k + 1 when None.

    Returns:
        [S] int32.
    """
    num_seqs, width = remap.shape[0], survivals.shape[1]
    has_source = (remap >= 0)[:, None]
    value = torch.where(has_source, survivals[remap.clamp(min=0).long()], 0.0)
    if limits is not None:
        value = torch.where(has_source, value, 2.0)  # above any survival
        place = torch.arange(1, width + 1, device=remap.device)
        value = torch.where(place < limits[:, None], value, -1.0)
    order = torch.sort(value.flatten(), descending=True, stable=True).indices[: num_rows - num_seqs]
    extra = torch.zeros(num_seqs * width, dtype=torch.int32, device=remap.device)
    extra[order] = 1
    return 1 + extra.view(num_seqs, width).sum(1, dtype=torch.int32)


def with_seqlens_q(batch: Batch, seqlens_q: Tensor) -> Batch:
    """A decode batch whose rows are dealt to its sequences anew; the total is the same.

    Ids and windows are only right for sequences with as many rows as planned, or fewer, and for those that
    `correct_batch` then corrects.
    """
    num_seqs = batch.num_seqs
    cu_seqlens_q = torch.nn.functional.pad(seqlens_q.cumsum(0, dtype=torch.int32), (1, 0))
    seq = torch.arange(num_seqs, dtype=torch.int32, device=seqlens_q.device)
    row_seq = torch.repeat_interleave(seq, seqlens_q, output_size=batch.num_rows)
    planned = batch.cu_seqlens_q.diff()
    old_start = batch.seqlens_k - planned
    place = torch.arange(batch.num_rows, dtype=torch.int32, device=seq.device) - cu_seqlens_q[row_seq.long()]
    old_place = torch.minimum(place, planned[row_seq.long()] - 1)
    old_row = (batch.cu_seqlens_q[row_seq.long()] + old_place).long()
    return dataclasses.replace(
        batch,
        cu_seqlens_q=cu_seqlens_q,
        row_seq=row_seq,
        seqlens_k=old_start + seqlens_q,
        total_lens=old_start + seqlens_q,
        positions=old_start[row_seq.long()] + place,
        input_ids=batch.input_ids[old_row],
        ngram_ids=batch.ngram_ids[old_row],
    )
