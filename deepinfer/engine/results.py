"""Results: a sequence of the core, read once and turned into plain values."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer.checkpoint.detokenizer import Detokenizer
from deepinfer.checkpoint.token_text import TokenTable
from deepinfer.engine.intake import Request
from deepinfer.outputs import (
    CompletionOutput,
    ErrorKind,
    FinishReason,
    Logprob,
    RequestError,
    RequestMetrics,
    RequestOutput,
    position_logprobs,
)
from deepinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.checkpoint.tokenizer import Tokenizer

_ERRORS = {
    "NUMERICS": (ErrorKind.NUMERICS, "the model's logits are NaN or infinite for this request"),
    "MASKED": (
        ErrorKind.NO_TOKEN,
        "bans, allowed ids, logit_bias and grammar leave no token to sample",
    ),
    "GRAMMAR": (ErrorKind.GRAMMAR, "the output cannot follow its grammar"),
    "PREEMPTED": (ErrorKind.PREEMPTED, "evicted for lack of cache blocks (stop_preempted_request=True)"),
}
_REASONS = {
    "STOP": FinishReason.STOP,
    "LENGTH": FinishReason.LENGTH,
    "ABORT": FinishReason.ABORT,
    "ERROR": FinishReason.ERROR,
    "HAND_OFF": FinishReason.HANDED_OFF,
}


@dataclass
class SampleState:
    """One completion of a request, from submission to its end."""

    index: int
    seq_id: int
    detokenizer: Detokenizer | None  # only where text is needed before the end
    stop_string: str | None = None  # the one that ended it
    output: CompletionOutput | None = None  # once it has ended
    metrics: Any = None  # the core's SequenceMetrics, likewise


@dataclass
class RequestState:
    """One request, from submission to its end."""

    request: Request
    stream: bool
    arrival_time: float  # Unix seconds
    samples: list[SampleState] = field(default_factory=list)
    prompt_logprobs: tuple[list[float], list[dict[int, Logprob] | None]] | None = None
    is_leaving: bool = False  # in a PROMPT engine: completions of it are handed off, all are from now on
    is_aborted: bool = False  # in a COMPLETION engine: completions that are still to come end at once

    @property
    def is_complete(self) -> bool:
        """Whether every completion is here and has ended."""
        return len(self.samples) == self.request.params.n and all(
            sample.output is not None for sample in self.samples
        )


class ResultReader:
    """Reads sequences of one `_core.EngineCore`."""

    def __init__(self, core: Any, tokenizer: Tokenizer) -> None:
        self._core = core
        self._table = TokenTable(tokenizer.backend)

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """The text of one completion, empty yet."""
        return Detokenizer(
            self._table,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def end(self, state: RequestState, sample: SampleState) -> None:
        """Read an ended sequence into `sample.output`; the core forgets it."""
        core, seq_id, params = self._core, sample.seq_id, state.request.params
        is_handed_off = core.finish_reason(seq_id).name == "HAND_OFF"
        if params.detokenize and not is_handed_off:  # then its text goes on elsewhere
            self._finish_text(sample, params)
        reason = _REASONS[core.finish_reason(seq_id).name]
        output = self._sequence(state, sample)
        output.finish_reason = reason.value
        stop_token = core.stop_token(seq_id)
        if sample.stop_string is not None:
            output.stop_reason = sample.stop_string
        elif reason is FinishReason.STOP and stop_token in params.stop_token_ids:
            output.stop_reason = stop_token
        if reason is FinishReason.ERROR:
            output.error = RequestError(*_error(core.error_kind(seq_id).name))
        if sample.index == 0 and params.prompt_logprobs is not None:  # the sample that scores the prompt
            state.prompt_logprobs = self._prompt_logprobs(state.request, seq_id)
        sample.metrics = core.metrics(seq_id)
        sample.output = output
        core.release(seq_id)

    def result(self, state: RequestState) -> RequestOutput:
        """The request's state: ended completions, and running ones as far as they are.

        Nothing of it is handed out twice: an ended completion of a request that goes on is copied.
        """
        request = state.request
        finished = state.is_complete
        ended = [sample.output if finished else copy.deepcopy(sample.output) for sample in state.samples]
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.text,
            prompt_token_ids=request.token_ids.tolist(),
            outputs=[
                output or self._sequence(state, sample)
                for output, sample in zip(ended, state.samples, strict=True)
            ],
            finished=finished,
            metrics=self._metrics(state),
        )
        times = [sample.metrics or self._core.metrics(sample.seq_id) for sample in state.samples]
        output.num_cached_tokens = min(each.num_cached_tokens for each in times)
        if finished and state.prompt_logprobs is not None:
            output.prompt_token_logprobs, output.prompt_logprobs = state.prompt_logprobs
        return output

    def _finish_text(self, sample: SampleState, params: SamplingParams) -> None:
        """End the sample's text; what was held back may still complete a stop string."""
        core, seq_id = self._core, sample.seq_id
        if sample.detokenizer is None:
            sample.detokenizer = self.detokenizer(params)
            tokens = core.output_token_ids(seq_id).tolist()
            sample.detokenizer.append(tokens, ends_with_stop_token=core.stop_token(seq_id) >= 0)
        hit = sample.detokenizer.finish()
        if hit is not None and sample.stop_string is None:
            sample.stop_string = hit.stop
            core.stop(seq_id, hit.num_tokens)

    def _sequence(self, state: RequestState, sample: SampleState) -> CompletionOutput:
        """A sequence's tokens, log-probabilities and streamed text."""
        core, seq_id, params = self._core, sample.seq_id, state.request.params
        output = CompletionOutput(index=sample.index, token_ids=core.output_token_ids(seq_id).tolist())
        if sample.detokenizer is not None:
            output.text = sample.detokenizer.text
        if params.logprobs is None:
            return output
        values, ranks = core.logprobs(seq_id).tolist(), core.ranks(seq_id).tolist()
        output.token_logprobs = values
        output.cumulative_logprob = float(sum(values))
        output.logprobs = self._positions(
            output.token_ids, values, ranks, core.top_logprobs(seq_id), params.detokenize
        )
        return output

    def _prompt_logprobs(
        self, request: Request, seq_id: int
    ) -> tuple[list[float], list[dict[int, Logprob] | None]]:
        core = self._core
        values, ranks = core.prompt_logprobs(seq_id).tolist(), core.prompt_ranks(seq_id).tolist()
        tokens = request.token_ids[1 : len(values) + 1].tolist()
        tops = core.prompt_top_logprobs(seq_id)
        return values, [None, *self._positions(tokens, values, ranks, tops, request.params.detokenize)]

    def _positions(
        self, tokens: list[int], values: list[float], ranks: list[int], tops: tuple[Any, Any], decode: bool
    ) -> list[dict[int, Logprob]]:
        """`position_logprobs` of each token; `tops` are [n, K] ids and values."""
        text_of = self._table.token_text if decode else None
        ids, top_values = (array.tolist() for array in tops)
        return [
            position_logprobs(token, value, rank, top_ids, top, text_of)
            for token, value, rank, top_ids, top in zip(tokens, values, ranks, ids, top_values, strict=True)
        ]

    def _metrics(self, state: RequestState) -> RequestMetrics:
        """Times of the request: first start, first token, last end over its completions."""
        times = [sample.metrics or self._core.metrics(sample.seq_id) for sample in state.samples]
        arrival = times[0].arrival
        started = [each.first_scheduled for each in times if each.first_scheduled > 0]
        first = [each.first_token for each in times if each.first_token > 0]
        metrics = RequestMetrics(
            arrival_time=state.arrival_time,
            queue_ms=1e3 * (min(started) - arrival) if started else None,
            ttft_ms=1e3 * (min(first) - arrival) if first else None,
            num_preemptions=sum(each.num_preemptions for each in times),
            num_cached_tokens=max(each.num_cached_tokens for each in times),
            num_accepted_tokens=sum(each.num_accepted for each in times),
            num_draft_tokens=sum(each.num_drafted for each in times),
            num_verified_tokens=sum(each.num_verified for each in times),
            verified_by_position=sum(each.verified_by_position for each in times).tolist(),
            accepted_by_position=sum(each.accepted_by_position for each in times).tolist(),
            num_decode_steps=sum(each.num_decode_steps for each in times),
            num_decode_tokens=sum(each.num_decode_tokens for each in times),
        )
        if state.is_complete:
            end = max(each.finish for each in times)
            longest = max(len(sample.output.token_ids) for sample in state.samples)
            metrics.total_ms = 1e3 * (end - arrival)
            if first and longest > 1:
                metrics.tpot_ms = 1e3 * (end - min(first)) / (longest - 1)
        return metrics


def _error(name: str) -> tuple[str, str]:
    """Kind and message of a core ErrorKind."""
    kind, message = _ERRORS.get(name, (ErrorKind.INTERNAL, "the engine ended this request"))
    return kind.value, message
