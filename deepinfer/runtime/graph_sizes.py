"""Which sizes of decode steps are captured: few, and such that little time goes into padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_WASTE = 0.1  # of a step's time, that padding to the next captured size may cost
SMALLEST_BOUND = 8192  # tokens of context
BOUND_RATIO = 4  # between two bounds


def candidate_sizes(maximum: int) -> list[int]:
    """Two sizes for each octave, up to the maximum."""
    sizes = {maximum}
    size = 1
    while size < maximum:
        sizes.update(n for n in (size, size + size // 2) if n < maximum)
        size *= 2
    return sorted(sizes)


def spaced_sizes(maximum: int, interval: int) -> list[int]:
    """Powers of two below the interval, its multiples, and the maximum."""
    interval = min(interval, maximum)
    sizes = {maximum, *range(interval, maximum + 1, interval)}
    size = 1
    while size < interval:
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def sizes_worth_having(times: Mapping[int, float], max_waste: float = MAX_WASTE) -> list[int]:
    """The fewest of the measured sizes that keep every step within the waste.

    From the largest one down: the next size that is kept is the largest one for which the one above would
    cost too much. What was not measured costs as much as the next larger size that was.

    Args:
        times: milliseconds by size.
        max_waste: part of a step's time that padding may add.
    """
    sizes = sorted(times)
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if times[kept[-1]] > (1 + max_waste) * times[size]:
            kept.append(size)
    return sorted(kept)


def context_bounds(max_model_len: int) -> list[int]:
    """Lengths of context that steps are captured for, the longest last."""
    bounds = [max_model_len]
    while bounds[-1] // BOUND_RATIO >= SMALLEST_BOUND:
        bounds.append(bounds[-1] // BOUND_RATIO)
    return bounds[::-1]


def fitting(sizes: Sequence[int], needed: int) -> int | None:
    """The smallest of ascending sizes that is large enough; None when none is."""
    return next((size for size in sizes if size >= needed), None)
