"""Results of requests: plain values that belong to the caller and refer to nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

IMPOSSIBLE = -9999.0  # log-probability of a token that could not occur


class FinishReason(StrEnum):
    """Why an output ended. Each is the string that `CompletionOutput.finish_reason` holds."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller gave up the request
    ERROR = "error"  # `CompletionOutput.error` says what happened
    HANDED_OFF = "handed_off"  # a COMPLETION engine goes on with it


class ErrorKind(StrEnum):
    """What went wrong with one request; the others go on."""

    INVALID_REQUEST = "invalid_request"  # parameters or prompt that the engine refuses
    TOO_LONG = "too_long"  # the prompt does not fit the context or the caches
    NUMERICS = "numerics"  # the model produced NaN or infinite logits
    NO_TOKEN = "no_token"  # masks forbid every token
    PREEMPTED = "preempted"  # evicted by an engine that does not recompute
    GRAMMAR = "grammar"  # the structured output failed
    TRANSFER = "transfer"  # the hand-off to another engine failed
    INTERNAL = "internal"  # a fault of the engine


@dataclass(frozen=True)
class RequestError:
    """What went wrong with a request."""

    kind: str
    """One of `ErrorKind`."""
    message: str
    """A sentence for people."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position; the engine's `logprobs_mode` says of which law."""

    logprob: float
    """Natural logarithm, <= 0; -9999 for a token that could not occur."""
    rank: int | None = None
    """Place in the order of likelihood, 1 for the most likely token; ties by lower token id."""
    decoded_token: str | None = None
    """The token's text alone; None without detokenisation."""


def position_logprobs(
    token_id: int,
    logprob: float,
    rank: int | None,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    decode: Callable[[int], str] | None = None,
) -> dict[int, Logprob]:
    """The log-probabilities of one position by token id: the chosen token first, then the most likely ones.

    Args:
        token_id, logprob, rank: the chosen token.
        top_ids, top_logprobs: the most likely tokens, descending. Impossible ones are left out.
        decode: gives a token's text.
    """
    found = {token_id: Logprob(logprob, rank, decode(token_id) if decode else None)}
    for place, (token, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
        if token != token_id and value > IMPOSSIBLE:
            found[token] = Logprob(value, place, decode(token) if decode else None)
    return found


@dataclass(repr=False)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Which of the request's n completions, 0 ... n - 1."""
    text: str = ""
    """The output's text; empty without detokenisation. Never contains a part of a character."""
    token_ids: list[int] = field(default_factory=list)
    """The output's tokens, the stopping one included."""
    cumulative_logprob: float | None = None
    """Sum of `token_logprobs`; None when none were asked for."""
    token_logprobs: list[float] | None = None
    """The log-probability of each output token."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per position, the output token's log-probability and those of the most likely tokens."""
    finish_reason: str | None = None
    """One of `FinishReason`; None while the output grows."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the output; None for EOS and other reasons."""
    error: RequestError | None = None
    """What went wrong, when `finish_reason` is "error"."""

    @property
    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass
class RequestMetrics:
    """Times and counts of one request; a time is None until it is known."""

    arrival_time: float = 0.0
    """When the request was submitted, seconds of the Unix clock."""
    queue_ms: float | None = None
    """From submission to the first step that worked on it."""
    ttft_ms: float | None = None
    """Time to first token, from submission."""
    tpot_ms: float | None = None
    """Mean time per output token after the first; None with fewer than two tokens."""
    total_ms: float | None = None
    """From submission to the end."""
    num_preemptions: int = 0
    """How often the request was evicted and recomputed."""
    num_cached_tokens: int = 0
    """Prompt tokens whose computation was reused, by the completion that could reuse the most."""
    num_draft_tokens: int = 0
    """Draft tokens that were proposed."""
    num_verified_tokens: int = 0
    """Draft tokens that were verified."""
    num_accepted_tokens: int = 0
    """Draft tokens that became output."""
    verified_by_position: list[int] = field(default_factory=list)
    """Of the verified ones, how many stood at each place in the block of drafts."""
    accepted_by_position: list[int] = field(default_factory=list)
    """Of the accepted ones likewise."""
    num_decode_steps: int = 0
    """Decode steps that gave it tokens, summed over the completions."""
    num_decode_tokens: int = 0
    """The tokens from these steps."""

    @property
    def tokens_per_step(self) -> float:
        """Mean output tokens of a decode step; 0 before the first."""
        return self.num_decode_tokens / self.num_decode_steps if self.num_decode_steps else 0.0


@dataclass(repr=False)
class RequestOutput:
    """The result of one prompt, complete or so far."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The n completions, by index."""
    finished: bool = False
    """Whether every completion has ended."""
    prompt_token_logprobs: list[float] | None = None
    """Entry i is the log-probability of prompt token i + 1 given the ones before it."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token, as in `CompletionOutput.logprobs`; None for the first, which is given."""
    num_cached_tokens: int = 0
    """Prompt tokens that no completion had to compute, because an earlier request had."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def error(self) -> RequestError | None:
        """The first completion's error, if any has one."""
        return next((output.error for output in self.outputs if output.error is not None), None)

    def __repr__(self) -> str:
        return _short_repr(self)


def _short_repr(record: Any) -> str:
    """A dataclass's repr without empty fields and with long values cut."""
    parts = []
    for f in fields(record):
        value = getattr(record, f.name)
        if value is None or (f.name == "metrics" and value == RequestMetrics()):
            continue
        parts.append(f"{f.name}={_short(value)}")
    return f"{type(record).__name__}({', '.join(parts)})"


def _short(value: Any, max_items: int = 8, max_chars: int = 80) -> str:
    if isinstance(value, str):
        text = str(value)
        return repr(text) if len(text) <= max_chars else f"{text[:max_chars]!r}... ({len(text)} characters)"
    if isinstance(value, list) and len(value) > max_items:
        return f"[{', '.join(map(repr, value[:max_items]))}, ... ({len(value)} items)]"
    return repr(value)
