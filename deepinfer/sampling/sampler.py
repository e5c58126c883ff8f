"""Sampler: one token per row of logits, with whatever log-probabilities the rows ask for.

The choice of a row is a pure function of its logits, parameters, seed and token index (`draw`); plain
decoding, verification and scoring go through this one function. A bad row is flagged, never raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.draw import gumbel_argmax
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.logits import edit_logits, truncate
from deepinfer.sampling.logprobs import Logprobs, LogprobsMode, gather_logprobs
from tilelang_ops.sampling import ban_tokens, judge_rows, sample_tokens


class Fault(IntEnum):
    """Why a row has no token."""

    NONE = 0
    NUMERICS = 1  # NaN, +inf or nothing but -inf came from the model
    NO_TOKEN = 2  # masks forbid every token
    GRAMMAR = 3  # its grammar cannot go on


@dataclass(frozen=True)
class SampleResult:
    """Outcome of R rows; the log-probability fields are None when no row asked for them.

    K is the largest number of alternatives asked for; row r uses its first `num_logprobs[r]` columns. Rows
    that did not ask hold zeros.
    """

    token_ids: Tensor  # [R] int32, 0 for faulty rows
    faults: Tensor  # [R] uint8, values of Fault
    logprobs: Tensor | None  # [R] float32, of the chosen token
    ranks: Tensor | None  # [R] int32, 1-based
    top_ids: Tensor | None  # [R, K] int32
    top_logprobs: Tensor | None  # [R, K] float32


@dataclass(frozen=True)
class RowParameters:
    """What rows without further wishes need; fields of `SamplingInputs`, [R] each."""

    inv_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    token_index: Tensor

    @classmethod
    def of(cls, inputs: SamplingInputs, rows: Tensor | None = None) -> RowParameters:
        """Those of all rows, or of the rows [n] int64."""
        values = (getattr(inputs, name) for name in cls.__dataclass_fields__)
        return cls(*(value if rows is None else value.index_select(0, rows) for value in values))

    def slice(self, start: int, stop: int) -> RowParameters:
        """Those of the rows start ... stop - 1."""
        return RowParameters(*(getattr(self, name)[start:stop] for name in self.__dataclass_fields__))


class Sampler:
    """Samples with the settings that all requests of an engine share."""

    def __init__(
        self,
        vocab_size: int,
        *,
        banned_token_ids: Iterable[int] = (),
        force_top_k: int = 0,
        logprobs_mode: LogprobsMode | str = LogprobsMode.RAW,
        device: torch.device | str = "cpu",
        fused: bool = False,
    ) -> None:
        """Prepares the masks.

        Args:
            vocab_size: columns of the logits.
            banned_token_ids: tokens that are never sampled: undecodable ids and the blacklist.
            force_top_k: upper bound of every random row's top-k; 0 means none.
            logprobs_mode: what reported log-probabilities mean.
            device: where the logits live.
            fused: choose the tokens of all rows by one operator (`sample_tokens`), as a GPU does it; the
                tokens are the same either way.

        Raises:
            ValueError: an id outside the vocabulary, nothing left to sample, or an unknown mode.
        """
        ids = sorted(set(banned_token_ids))
        if ids and (ids[0] < 0 or ids[-1] >= vocab_size):
            bad = ids[0] if ids[0] < 0 else ids[-1]
            raise ValueError(f"banned token id {bad} is outside the vocabulary of {vocab_size} tokens")
        if len(ids) == vocab_size:
            raise ValueError(
                f"all {vocab_size} tokens of the vocabulary are banned: nothing could be sampled"
            )
        if force_top_k < 0:
            raise ValueError(f"force_top_k must be 0 (off) or at least 1, got {force_top_k}")
        self._vocab_size = vocab_size
        self._force_top_k = min(force_top_k, vocab_size)
        self._mode = LogprobsMode(logprobs_mode)
        self._fused = fused
        self._banned = self._banned_ids = None
        if ids:
            self._banned_ids = torch.tensor(ids, dtype=torch.int32).to(device)
            self._banned = torch.zeros(vocab_size, dtype=torch.bool)
            self._banned[ids] = True
            self._banned = self._banned.to(device)

    def sample(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        draw_ratio: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> SampleResult:
        """Chooses the token of every row.

        Args:
            logits: [R, V] float32 from the model, left as they are.
            inputs: parameters of the R rows.
            draw_ratio: (scores [C, V] float32 of a distribution per row, rows [C] int64) -> [C] int64 tokens;
                draws for the random rows with `is_ratio`. None draws theirs like all others.
        """
        assert logits.dtype == torch.float32, f"{logits.dtype=}"
        assert logits.shape == (inputs.num_rows, self._vocab_size), f"{logits.shape=} {inputs.num_rows=}"
        plan = _plan_rows(
            inputs, self._vocab_size, self._force_top_k, self._mode, draw_ratio is not None, self._fused
        )
        edited = edit_logits(logits, inputs, self._banned)
        if self._fused:
            token_ids, best = self._sample_tokens(edited, RowParameters.of(inputs))
        else:
            best, token_ids = _first_max(edited)

        shaped = (
            edited if plan.needs_scores else None
        )  # scores of the rows' distributions, for log-probabilities
        for rows, is_cut, is_ratio in plan.random:
            scores = _take(edited, rows) * inputs.inv_temperature[rows, None]
            if is_cut:
                top_k = inputs.top_k[rows]
                if self._force_top_k:
                    top_k = torch.where(top_k < 0, self._force_top_k, top_k.clamp(max=self._force_top_k))
                scores = truncate(scores, top_k, inputs.top_p[rows], inputs.min_p[rows], out=scores)
            if is_ratio:
                drawn = draw_ratio(scores, rows)
            else:
                drawn = gumbel_argmax(scores, inputs.seeds[rows], inputs.token_index[rows])
            token_ids[rows] = drawn.to(token_ids.dtype)
            if shaped is not None:
                shaped = shaped.clone() if shaped is edited else shaped
                shaped[rows] = scores

        forced = inputs.forced >= 0 if plan.has_forced else None
        faults = _find_faults(logits, best, forced)
        choice = token_ids
        if forced is not None:
            choice = torch.where(forced, inputs.forced.to(choice.dtype), choice)
        choice = torch.where(faults == Fault.NONE, choice, 0)
        found = None
        if plan.logprob_rows is not None:
            found = self._logprobs(logits, edited, shaped, token_ids, choice, inputs, plan)
        return _result(choice, faults, found, plan, inputs.num_rows)

    def choose(
        self, logits: Tensor, rows: RowParameters, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tokens of rows without further wishes, by operators of fixed shapes and nothing on the host.

        Args:
            logits: [R, V] float32, its to change.
            rows: parameters of the R rows.
            out: what the results are written to; None for new tensors.

        Returns:
            token_ids [R] int32, 0 for faulty rows; faults [R] uint8.
        """
        outside = None if self._banned_ids is None else ban_tokens(logits, self._banned_ids)
        return judge_rows(*self._sample_tokens(logits, rows), outside, out)

    def draft(self, logits: Tensor, rows: RowParameters) -> Tensor:
        """[R] int32 tokens as `choose`; of a faulty row any, for nothing can go wrong with a draft."""
        if self._banned_ids is not None:
            ban_tokens(logits, self._banned_ids)
        return self._sample_tokens(logits, rows)[0]

    def _sample_tokens(self, logits: Tensor, rows: RowParameters) -> tuple[Tensor, Tensor]:
        """[R] int32 tokens and [R] float32 largest logits."""
        top_k = rows.top_k
        if self._force_top_k:
            top_k = torch.where(top_k < 0, self._force_top_k, top_k.clamp(max=self._force_top_k))
        return sample_tokens(
            logits, rows.inv_temperature, top_k, rows.top_p, rows.min_p, rows.seeds, rows.token_index
        )

    def _logprobs(
        self,
        logits: Tensor,
        edited: Tensor,
        shaped: Tensor | None,
        drawn: Tensor,
        choice: Tensor,
        inputs: SamplingInputs,
        plan: _RowPlan,
    ) -> Logprobs:
        """Log-probabilities of the rows that want them, in the engine's mode."""
        rows = plan.logprob_rows
        if self._mode is LogprobsMode.RAW:
            scores = _take(logits, rows)
        elif self._mode is LogprobsMode.TEMPERATURE:
            inverse = inputs.inv_temperature[rows, None]
            scores = _take(edited, rows) * torch.where(inverse > 0, inverse, 1.0)
        else:
            scores = _take(shaped, rows)
            greedy = inputs.inv_temperature[rows, None] == 0
            ids = torch.arange(scores.shape[1], device=scores.device)
            scores = scores.masked_fill(greedy & (ids != drawn[rows, None]), -torch.inf)
        return gather_logprobs(scores, choice[rows].long(), plan.num_top)


@dataclass(frozen=True)
class _RowPlan:
    """Which rows need which work, decided on the host; None stands for no row. Indices are int64."""

    random: list[tuple[Tensor, bool, bool]]  # groups of rows, whether truncated, whether drawn by ratio
    logprob_rows: Tensor | None  # want log-probabilities
    num_top: int  # most alternatives that a row wants
    has_forced: bool
    needs_scores: bool  # log-probabilities read the scores that tokens are drawn from


def _plan_rows(
    inputs: SamplingInputs,
    vocab_size: int,
    force_top_k: int,
    mode: LogprobsMode,
    knows_ratio: bool,
    is_fused: bool,
) -> _RowPlan:
    host = inputs.host
    wants = host["num_logprobs"] >= 0
    free = host["forced"] < 0
    needs_scores = mode is LogprobsMode.PROCESSED and bool(wants.any())
    random = (host["inv_temperature"] > 0) & (free | wants if needs_scores else free)
    top_k = host["top_k"]
    truncated = (host["top_p"] < 1) | (host["min_p"] > 0) | ((top_k > 0) & (top_k < vocab_size))
    if 0 < force_top_k < vocab_size:
        truncated = np.ones_like(truncated)

    groups = [(random & ~truncated, False, False), (random & truncated, True, False)]
    if knows_ratio:
        by_ratio = host["is_ratio"] > 0
        groups = [
            (mask & (by_ratio == is_ratio), is_cut, is_ratio)
            for mask, is_cut, _ in groups
            for is_ratio in (False, True)
        ]
    if is_fused and not needs_scores:  # all others are drawn at once
        groups = [group for group in groups if group[2]]
    return _RowPlan(
        random=[(inputs.rows_where(mask), *flags) for mask, *flags in groups if mask.any()],
        logprob_rows=inputs.rows_where(wants) if wants.any() else None,
        num_top=max(int(host["num_logprobs"].max(initial=0)), 0),
        has_forced=not free.all(),
        needs_scores=needs_scores,
    )


def _take(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table; ascending distinct indices, so as many as there are rows means all of them."""
    return table if rows.shape[0] == table.shape[0] else table[rows]


def _first_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest score [R] float32 and its lowest index [R] int64 (NumPy's argmax is fast)."""
    if scores.device.type != "cpu":
        return torch.max(scores, dim=-1)
    ids = torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.gather(-1, ids[:, None]).squeeze(-1), ids


def _find_faults(logits: Tensor, best: Tensor, forced: Tensor | None) -> Tensor:
    """[R] uint8. A forced token needs no choice, so masks cannot fail its row."""
    masked = best == -torch.inf
    broken = ~torch.isfinite(logits.amax(dim=-1)) | ~(torch.isfinite(best) | masked)
    if forced is not None:
        masked = masked & ~forced
    faults = torch.zeros(best.shape[0], dtype=torch.uint8, device=best.device)
    faults.masked_fill_(masked, int(Fault.NO_TOKEN))
    return faults.masked_fill_(broken, int(Fault.NUMERICS))


def _result(
    choice: Tensor, faults: Tensor, found: Logprobs | None, plan: _RowPlan, num_rows: int
) -> SampleResult:
    """Spreads the rows that have log-probabilities over all rows."""
    if found is None:
        return SampleResult(choice.int(), faults, None, None, None, None)

    def spread(values: Tensor) -> Tensor:
        if values.shape[0] == num_rows:
            return values
        out = values.new_zeros((num_rows, *values.shape[1:]))
        out[plan.logprob_rows] = values
        return out

    logprobs, ranks, top_ids, top = map(spread, (found.chosen, found.ranks, found.top_ids, found.top))
    return SampleResult(choice.int(), faults, logprobs, ranks, top_ids, top)
