"""Comparisons of logits with the golden data, with the tolerances that its own statistics give.

How far two correct implementations part, as a fraction of the spread of the logits:

    plain         two float32 implementations agree to 5e-7. Entries whose index scores are all cut to zero
                  tie exactly; where such a tie decides a selection, one row moves by 1e-2, others by 1e-5.
    fp32          a value that falls on the other side of a cache code or of a near tie moves single rows by
                  some percent; medians stay far below.
    bf16, w8a8    independent rounding of activations: compared with the float32 values, at most twice as far
                  as the golden data's own rows are.

Token ids agree except where the golden best two stand closer than `NEAR_TIE`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.compare import relative_rms
from tests.support.golden import Golden

NEAR_TIE = 0.2  # logits
MANY_ROWS = 100  # from here on percentiles mean something
LIMITS = {"plain": (1e-5, 1e-3), "fp32": (5e-3, 0.05)}  # median and 99th percentile of the error


def check_logits(golden: Golden, mode: str, prompt: str, logits: Tensor) -> None:
    """Compare [tokens, vocab] logits of a prompt in a mode; raises AssertionError."""
    if mode in ("plain", "fp32"):
        _check_float32(golden, mode, prompt, logits)
    else:
        _check_rounded(golden, mode, prompt, logits)


def _check_float32(golden: Golden, mode: str, prompt: str, logits: Tensor) -> None:
    data = golden.logits.under(f"{prompt}/{mode}")
    errors = torch.cat(
        [relative_rms(logits[data["positions"].long()], data["logits"]), top_errors(data, logits)]
    )
    for quantile, limit in zip((0.5, 0.99), LIMITS[mode], strict=True):
        error = errors.quantile(quantile)
        assert error <= limit, f"{prompt} {mode}: error {error:.1e} at quantile {quantile}, limit {limit:.0e}"
    best = logits.argmax(1)
    margins = data["top_logits"][:, 0] - data["top_logits"][:, 1]
    differs = best != data["top_ids"][:, 0]
    assert (margins[differs] < NEAR_TIE).all(), (
        f"{prompt} {mode}: another token than one that is clearly best"
    )
    assert differs.float().mean() <= 0.02, f"{prompt} {mode}: {differs.float().mean():.1%} other tokens"


def _check_rounded(golden: Golden, mode: str, prompt: str, logits: Tensor) -> None:
    exact, stats = golden.logits.under(f"{prompt}/fp32"), golden.stats[prompt][f"{mode} against fp32"]
    errors = relative_rms(logits[exact["positions"].long()], exact["logits"])
    # Few rows say little about a median: the longer prompts are judged by all of theirs.
    factor = 3.0 if len(logits) < MANY_ROWS else 2.0
    limit = factor * stats["relative_rms_median"]
    assert errors.median() <= limit, f"{prompt} {mode}: median error {errors.median():.3f}, limit {limit:.3f}"
    if len(logits) >= MANY_ROWS:
        top = top_errors(exact, logits)
        assert top.median() <= limit, f"{prompt} {mode}: median error of top logits {top.median():.3f}"
        percentile, limit = top.quantile(0.99), 2 * stats["relative_rms_p99"]
        assert percentile <= limit, f"{prompt} {mode}: 99th percentile {percentile:.3f}, limit {limit:.3f}"
        same = (logits.argmax(1) == exact["top_ids"][:, 0]).double().mean()
        assert same >= stats["same_top1"] - 0.05, f"{prompt} {mode}: {same:.1%} of the best tokens agree"


def top_errors(data: dict[str, Tensor], logits: Tensor) -> Tensor:
    """[tokens] error over the golden best 8 tokens of every position, by the spread of the row's logits."""
    mine = logits.gather(1, data["top_ids"].long()).double()
    difference = (mine - data["top_logits"].double()).square().mean(1).sqrt()
    return difference / logits.double().std(1, correction=0)
