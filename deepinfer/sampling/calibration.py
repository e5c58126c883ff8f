"""Calibration of the drafter's confidences: fits the numbers that turn its logits into probabilities.

A confidence c_k estimates the probability that draft k is accepted if the drafts before it are; a scheduler
multiplies them, s_k = c_1 ... c_k, so their absolute size matters. Sequential temperature scaling fits one
temperature per position, left to right, such that s_k agrees with how often drafts 1 ... k were all accepted.

**Where blocks come from.** A label has to be known whatever the drafts and their confidences were. Where only
the first drafts of a block were verified the others have no label, also when one of the first was refused:
keeping just those labels would select by outcome. The same holds for what lies behind a token that ended the
sequence. A block whose verify length followed its own confidences tells nothing of the positions beyond, so
blocks are run at full length. Pure numpy; nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

GRID = 10.0 ** (np.arange(41) / 20.0 - 1.0)  # temperatures tried, 0.1 ... 10
FIT_BINS = 15
REPORT_BINS = 20
AUROC_BINS = 1000
MAX_LOGIT = 60.0  # of the sigmoid's argument, either way
_SCORE_EDGE = 1e-8


@dataclass(frozen=True)
class Blocks:
    """N drafted blocks of k positions with their outcome.

    Attributes:
        logits: [N, k] float64 raw confidence logits.
        num_accepted: [N] int64 leading drafts that were accepted, 0 ... num_observed.
        num_observed: [N] int64 leading positions whose outcome is known, 0 ... k.

    Raises:
        ValueError: shapes or numbers that contradict each other, or a logit that is not finite.
    """

    logits: np.ndarray
    num_accepted: np.ndarray
    num_observed: np.ndarray

    def __post_init__(self) -> None:
        count = self.logits.shape[0]
        if (
            self.logits.ndim != 2
            or (count,) != self.num_accepted.shape
            or (count,) != self.num_observed.shape
        ):
            raise ValueError(
                f"logits {self.logits.shape}, num_accepted {self.num_accepted.shape} and num_observed "
                f"{self.num_observed.shape} must be [N, k], [N] and [N]"
            )
        if not np.isfinite(self.logits).all():
            raise ValueError("a confidence logit is not finite")
        steps = np.stack([np.zeros_like(self.num_accepted), self.num_accepted, self.num_observed])
        if (np.diff(steps, axis=0) < 0).any() or (self.num_observed > self.num_positions).any():
            raise ValueError("blocks need 0 <= num_accepted <= num_observed <= k")

    @property
    def num_positions(self) -> int:
        return self.logits.shape[1]

    def known(self, position: int) -> np.ndarray:
        """[N] bool: blocks that have a label at a position (0 is the first draft)."""
        return self.num_observed > position

    def labels(self, position: int) -> np.ndarray:
        """[N] bool: whether drafts 0 ... position were all accepted; meaningful where `known`."""
        return self.num_accepted > position

    def select(self, chosen: np.ndarray) -> Blocks:
        """The blocks of a mask or of indices."""
        return Blocks(self.logits[chosen], self.num_accepted[chosen], self.num_observed[chosen])


@dataclass(frozen=True)
class Calibration:
    """What turns logits into confidences: sigmoid(logit / temperature + offset), one pair per position.

    Attributes:
        temperatures, offsets: [k] float64.
        needed_offset: [k] bool, positions where temperatures alone failed: the best was an end of the grid,
            for none moves a confidence across 1/2. There an offset is fitted in any case.
        is_at_grid_end: [k] bool, positions where the best is an end of the grid even so: retrain the head.
    """

    temperatures: np.ndarray
    offsets: np.ndarray
    needed_offset: np.ndarray
    is_at_grid_end: np.ndarray

    @classmethod
    def identity(cls, num_positions: int) -> Calibration:
        """Confidences as the head gives them."""
        no = np.zeros(num_positions, dtype=bool)
        return cls(np.ones(num_positions), np.zeros(num_positions), no, no)

    def survivals(self, logits: np.ndarray) -> np.ndarray:
        """[N, k] raw logits -> [N, k] estimates of the probability that drafts 0 ... position all stand."""
        return np.cumprod(sigmoid(logits / self.temperatures + self.offsets), axis=1)


@dataclass(frozen=True)
class PositionReport:
    """How the survival estimates of one position compare with its labels."""

    num_blocks: int
    acceptance: float  # mean label
    survival: float  # mean estimate
    ece: float
    log_loss: float
    auroc: float


@dataclass(frozen=True)
class ReliabilityBin:
    """Estimates within [low, high) and what came true of them; means are 0 in an empty bin."""

    low: float
    high: float
    count: int
    mean_score: float
    mean_label: float


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Logistic function of the argument clipped to +-MAX_LOGIT."""
    return 1.0 / (1.0 + np.exp(-np.clip(x, -MAX_LOGIT, MAX_LOGIT)))


def _bins(scores: np.ndarray, labels: np.ndarray, num_bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per equal-width bin of [0, 1]: count, sum of scores and sum of labels, [num_bins] each."""
    scores = np.clip(scores, _SCORE_EDGE, 1.0 - _SCORE_EDGE)
    place = np.minimum((scores * num_bins).astype(np.int64), num_bins - 1)
    return (
        np.bincount(place, minlength=num_bins),
        np.bincount(place, scores, num_bins),
        np.bincount(place, np.asarray(labels, dtype=np.float64), num_bins),
    )


def expected_calibration_error(scores: np.ndarray, labels: np.ndarray, num_bins: int) -> float:
    """Mean distance between estimate and frequency over equal-width bins, weighted by their sizes.

    Args:
        scores: [N] estimates in [0, 1].
        labels: [N] bool or 0 and 1.
    """
    _, score_sums, label_sums = _bins(scores, labels, num_bins)
    return float(np.abs(score_sums - label_sums).sum() / len(scores))


def log_loss(scores: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -log of the probability that the estimates give to what happened.

    Unlike the calibration error it cannot be lowered by estimates that are all the same.
    """
    scores = np.clip(scores, _SCORE_EDGE, 1.0 - _SCORE_EDGE)
    return float(-np.log(np.where(labels, scores, 1.0 - scores)).mean())


def auroc(scores: np.ndarray, labels: np.ndarray, num_bins: int = AUROC_BINS) -> float:
    """Area under the ROC curve from a histogram; scores of one bin count as ties. NaN with one class only."""
    count, _, positive = _bins(scores, labels, num_bins)
    negative = count - positive
    below = np.cumsum(negative) - negative
    pairs = positive.sum() * negative.sum()
    return float((positive * (below + 0.5 * negative)).sum() / pairs) if pairs else float("nan")


def reliability_table(
    scores: np.ndarray, labels: np.ndarray, num_bins: int = REPORT_BINS
) -> list[ReliabilityBin]:
    """The bins behind `expected_calibration_error`."""
    table = []
    for place, (count, score_sum, label_sum) in enumerate(zip(*_bins(scores, labels, num_bins))):
        size = max(int(count), 1)
        low, high = place / num_bins, (place + 1) / num_bins
        table.append(ReliabilityBin(low, high, int(count), float(score_sum) / size, float(label_sum) / size))
    return table


def reliability_text(columns: Mapping[str, Sequence[ReliabilityBin]]) -> str:
    """Tables of equal bins side by side: how many estimates, their mean, the share that came true.

    Rows that are empty in all columns are left out.
    """
    width = max(24, *(len(name) for name in columns))
    lines = ["estimate     " + "  ".join(f"{name:>{width}}" for name in columns)]
    for bins in zip(*columns.values(), strict=True):
        if any(each.count for each in bins):
            cells = (f"{each.count:8d}  {each.mean_score:6.3f}  {each.mean_label:6.3f}" for each in bins)
            row = "  ".join(f"{cell:>{width}}" for cell in cells)
            lines.append(f"{bins[0].low:.2f} - {bins[0].high:.2f}  {row}")
    return "\n".join(lines)


def report(blocks: Blocks, calibration: Calibration, num_bins: int = REPORT_BINS) -> list[PositionReport]:
    """One entry per position, over the blocks that have a label there."""
    return report_survivals(blocks, calibration.survivals(blocks.logits), num_bins)


def report_survivals(
    blocks: Blocks, survivals: np.ndarray, num_bins: int = REPORT_BINS
) -> list[PositionReport]:
    """The same of estimates that are given: [N, k]."""
    entries = []
    for position in range(blocks.num_positions):
        known = blocks.known(position)
        scores, labels = survivals[known, position], blocks.labels(position)[known]
        entries.append(
            PositionReport(
                num_blocks=int(known.sum()),
                acceptance=float(labels.mean()),
                survival=float(scores.mean()),
                ece=expected_calibration_error(scores, labels, num_bins),
                log_loss=log_loss(scores, labels),
                auroc=auroc(scores, labels),
            )
        )
    return entries


def fit(blocks: Blocks, num_bins: int = FIT_BINS, *, always_offset: bool = False) -> Calibration:
    """Fits every position, left to right; a position's numbers never change once they are found.

    The temperature of the grid with the smallest calibration error of the survival wins, the lowest one among
    equals. One at an end of the grid is a failure: then each temperature gets the offset with which the mean
    confidence over blocks whose earlier drafts stood is their acceptance rate, and the best pair wins.
    With `always_offset` that is done at every position.

    Raises:
        ValueError: when no block has a label at some position.
    """
    last = len(GRID) - 1
    fitted: list[tuple[float, float, bool, bool]] = []
    survival = np.ones(blocks.logits.shape[0])
    for position in range(blocks.num_positions):
        known = blocks.known(position)
        if not known.any():
            raise ValueError(f"no block has a known outcome at position {position + 1}")
        logits, labels = blocks.logits[:, position], blocks.labels(position)
        offsets = np.zeros(len(GRID))
        choice = _best(survival[known], logits[known], labels[known], offsets, num_bins)
        needs_offset = choice in (0, last)
        if needs_offset or always_offset:
            tested = known & (blocks.num_accepted >= position)
            offsets = np.array([_matching_offset(logits[tested] / t, labels[tested]) for t in GRID])
            choice = _best(survival[known], logits[known], labels[known], offsets, num_bins)
        temperature, offset = GRID[choice], offsets[choice]
        fitted.append((temperature, offset, needs_offset, choice in (0, last)))
        survival = survival * sigmoid(logits / temperature + offset)
    temperatures, offsets, needed, at_end = zip(*fitted)
    return Calibration(np.array(temperatures), np.array(offsets), np.array(needed), np.array(at_end))


def held_out_survivals(
    blocks: Blocks, sources: np.ndarray, num_folds: int, *, always_offset: bool = False
) -> np.ndarray:
    """Estimates of fits that have not seen the block's source: what a fit is worth on new prompts.

    Sources are dealt to the folds in turn, in ascending order; each fold is estimated by a fit of all others.

    Args:
        sources: [N] int numbers; blocks of one number are never on both sides.
        num_folds: 2 or more, at most the number of sources.
        always_offset: as `fit`.

    Returns:
        [N, k] survivals.

    Raises:
        ValueError: as `fit`.
    """
    numbers, places = np.unique(sources, return_inverse=True)
    assert 2 <= num_folds <= len(numbers), f"{num_folds=} {len(numbers)=}"
    survivals = np.empty_like(blocks.logits)
    for fold in range(num_folds):
        held_out = places % num_folds == fold
        others = fit(blocks.select(~held_out), always_offset=always_offset)
        survivals[held_out] = others.survivals(blocks.logits[held_out])
    return survivals


def _best(
    survival: np.ndarray, logits: np.ndarray, labels: np.ndarray, offsets: np.ndarray, num_bins: int
) -> int:
    """Index of the grid's temperature, with its offset, that calibrates best behind a `survival` so far."""
    errors = [
        expected_calibration_error(survival * sigmoid(logits / t + b), labels, num_bins)
        for t, b in zip(GRID, offsets)
    ]
    return int(np.argmin(errors))  # the first of equals


def _matching_offset(scaled: np.ndarray, labels: np.ndarray) -> float:
    """The b with mean sigmoid(scaled + b) = mean label, by bisection; rates of 0 and 1 are pulled inside."""
    if len(labels) == 0:
        return 0.0
    rate = (labels.sum() + 0.5) / (len(labels) + 1.0)
    reach = MAX_LOGIT / 2 + float(np.abs(scaled).max())
    low, high = -reach, reach
    for _ in range(60):
        middle = (low + high) / 2
        if sigmoid(scaled + middle).mean() < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
