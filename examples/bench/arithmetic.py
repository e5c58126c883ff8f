"""The benchmark's arithmetic: quantiles, which intervals count, what one device gives. No engine here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Interval:
    """The time from one return of `step` to the next, and what was committed in it.

    Attributes:
        ms: wall time.
        first_step, last_step: the engine's step count before and behind it.
        num_request_steps: decode steps summed over the requests that took part.
        num_decode_tokens: output tokens of decode steps.
        num_prefill_tokens: prompt tokens that were computed.
    """

    ms: float
    first_step: int
    last_step: int
    num_request_steps: int
    num_decode_tokens: int
    num_prefill_tokens: int


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def quantiles(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """`<name>_mean`, `_p50`, `_p90` and `_p99` of the values that are not None; None of no values."""
    known = [value for value in values if value is not None]
    keys = (f"{name}_mean", *(f"{name}_p{100 * share:.0f}" for share in QUANTILES))
    if not known:
        return dict.fromkeys(keys)
    return dict(zip(keys, (statistics.fmean(known), *(quantile(known, share) for share in QUANTILES))))


def without_flushes(intervals: Sequence[Interval], flush_every: int) -> list[Interval]:
    """The intervals in which the engine wrote no statistics.

    Args:
        intervals: in order.
        flush_every: committed steps between two statistics lines, 0 for none.
    """
    if flush_every <= 0:
        return list(intervals)
    return [each for each in intervals if each.first_step // flush_every == each.last_step // flush_every]


def chain_tokens(num_drafts: int, acceptance: float) -> float:
    """Tokens of a request and step if each draft stands with this probability where those before it stand."""
    return 1.0 + sum(acceptance**place for place in range(1, num_drafts + 1))


def linear_tokens(num_drafts: int, acceptance: float) -> float:
    """The same as the charts of the original release count it: every draft on its own, an overestimate."""
    return 1.0 + num_drafts * acceptance


def decode_figures(intervals: Sequence[Interval], num_requests: int, num_devices: int) -> dict[str, float]:
    """Rates of decode steps in which every request took part.

    Args:
        intervals: one step each.
        num_requests: of each engine.
        num_devices: all that the requests use, whatever their part is.

    Returns:
        request_steps_per_s, tokens_per_request_step (the measured one, bonus token included), their product
        tokens_per_s, tokens_per_s_per_user, and both rates for each device.

    Raises:
        RuntimeError: some request did not take part in a step.
    """
    if not intervals:
        raise RuntimeError("no step is left to be measured")
    for each in intervals:
        if each.num_request_steps != num_requests:
            raise RuntimeError(
                f"{each.num_request_steps} of {num_requests} requests ran in step {each.last_step}: the "
                "caches hold no more; lower the number of requests or their context"
            )
    seconds = sum(each.ms for each in intervals) / 1e3
    request_steps = sum(each.num_request_steps for each in intervals)
    steps_rate = request_steps / seconds
    per_step = sum(each.num_decode_tokens for each in intervals) / request_steps
    return {
        "request_steps_per_s": steps_rate,
        "tokens_per_request_step": per_step,
        "tokens_per_s": steps_rate * per_step,
        "tokens_per_s_per_user": steps_rate * per_step / num_requests,
        "request_steps_per_s_per_device": steps_rate / num_devices,
        "tokens_per_s_per_device": steps_rate * per_step / num_devices,
    }


def assumed_figures(
    request_steps_per_s: float, num_requests: int, num_devices: int, num_drafts: int, acceptance: float
) -> dict[str, float]:
    """What the measured step rate would give with an acceptance that nobody measured; every name says so."""
    chain = chain_tokens(num_drafts, acceptance)
    linear = linear_tokens(num_drafts, acceptance)
    return {
        "assumed_acceptance": acceptance,
        "assumed_tokens_per_request_step": chain,
        "assumed_tokens_per_s_per_user": request_steps_per_s * chain / num_requests,
        "assumed_tokens_per_s_per_device": request_steps_per_s * chain / num_devices,
        "assumed_linear_tokens_per_request_step": linear,
        "assumed_linear_tokens_per_s_per_device": request_steps_per_s * linear / num_devices,
    }


def prefill_figures(intervals: Sequence[Interval], num_tokens: int, num_devices: int) -> dict[str, float]:
    """Rates of prefill steps of `num_tokens` prompt tokens each.

    Raises:
        RuntimeError: a step computed another number of tokens.
    """
    if not intervals:
        raise RuntimeError("no step is left to be measured")
    for each in intervals:
        if each.num_prefill_tokens != num_tokens:
            raise RuntimeError(
                f"step {each.last_step} computed {each.num_prefill_tokens} prompt tokens instead of "
                f"{num_tokens}: the caches do not hold the requests of a step, or a prompt was not cached"
            )
    seconds = sum(each.ms for each in intervals) / 1e3
    rate = num_tokens * len(intervals) / seconds
    return {"prefill_tokens_per_s": rate, "prefill_tokens_per_s_per_device": rate / num_devices}
