"""Intake: everything that can be wrong with a request is found here, before any work is done for it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.outputs import CompletionOutput, RequestError, RequestMetrics, RequestOutput
from deepinfer.sampling.seeds import fresh_seed, sample_seed
from deepinfer.sampling_params import SamplingParams
from deepinfer.structured_output.request import GrammarSpec

if TYPE_CHECKING:
    from deepinfer.checkpoint.tokenizer import Tokenizer


class InvalidRequestError(ValueError):
    """A request that cannot run.

    Attributes:
        kind: machine-readable cause, as in `CompletionOutput.error.kind`: "invalid_request" or "too_long".
        row: index of the prompt in the caller's list, None for a single request.
    """

    def __init__(self, kind: str, message: str, row: int | None = None) -> None:
        self.kind = kind
        self.row = row
        self._message = message
        super().__init__(message if row is None else f"prompt {row}: {message}")

    def at_row(self, row: int) -> InvalidRequestError:
        """The same error, naming the row of the caller's list."""
        return InvalidRequestError(self.kind, self._message, row)

    def as_output(self, request_id: str, prompt: Prompt) -> RequestOutput:
        """The result of a request that ends with this error."""
        return RequestOutput(
            request_id=request_id,
            prompt=prompt.text if isinstance(prompt.text, str) else None,
            prompt_token_ids=[],
            outputs=[
                CompletionOutput(index=0, finish_reason="error", error=RequestError(self.kind, self._message))
            ],
            finished=True,
            metrics=RequestMetrics(),
        )


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

MAX_COMPLETIONS = 1 << 16  # of one request; each is a sequence of its own from the start


@dataclass(frozen=True)
class Prompt:
    """A prompt as the caller gave it; `token_ids` win over `text` when both are there."""

    text: Any
    token_ids: Any
    unknown: tuple[str, ...] = ()  # keys of a dict that mean nothing
    error: str | None = None  # why there is neither, when making the prompt failed
    cache_salt: Any = None  # only prompts of one salt share what they compute

    @classmethod
    def of(cls, value: Any) -> Prompt:
        """From text, token ids, or a dict with `prompt` and/or `prompt_token_ids`, and maybe `cache_salt`."""
        if isinstance(value, Prompt):
            return value
        if isinstance(value, dict):
            unknown = tuple(str(key) for key in value if key not in _PROMPT_KEYS)
            salt = value.get("cache_salt")
            return cls(value.get("prompt"), value.get("prompt_token_ids"), unknown, cache_salt=salt)
        if isinstance(value, str):
            return cls(value, None)
        return cls(None, value)


@dataclass(frozen=True)
class Request:
    """A checked request: what the scheduler and the output assembly need."""

    request_id: str
    text: str | None
    token_ids: np.ndarray  # [prompt_len] int32
    params: SamplingParams
    max_tokens: int  # most output tokens of a sample
    seeds: tuple[int, ...]  # one uint64 per sample
    is_ratio: bool  # drafts are tested by the ratio of probabilities
    grammar: GrammarSpec | None = None  # what the output has to follow, ready to be compiled
    cache_salt: str | None = None


class Intake:
    """Checks requests against one model and tokenizer.

    Args:
        tokenizer: encodes text prompts; text prompts are refused when None.
        vocab_size: ids of prompts and options are below it.
        max_model_len: most prompt + output tokens.
        verification: of requests that do not say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        verification: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._verification = verification

    def check(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> Request:
        """The request, ready to be scheduled.

        Raises:
            InvalidRequestError: naming what was given and what would work.
        """
        params = self._check_params(params)
        ids = self._token_ids(prompt)
        room = self._max_model_len - len(ids)
        if room < 1:
            raise InvalidRequestError(
                "too_long",
                f"the prompt has {len(ids)} tokens, but max_model_len={self._max_model_len} must hold the "
                f"prompt and at least one output token: shorten it to {self._max_model_len - 1} tokens or "
                "raise max_model_len",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = fresh_seed() if params.seed is None else params.seed
        return Request(
            request_id=request_id,
            text=prompt.text,
            token_ids=ids,
            params=params,
            max_tokens=max_tokens,
            seeds=tuple(sample_seed(seed, index) for index in range(params.n)),
            is_ratio=(params.verification or self._verification) == "ratio",
            grammar=self._grammar(params),
            cache_salt=_salt(prompt.cache_salt),
        )

    def _grammar(self, params: SamplingParams) -> GrammarSpec | None:
        """What the output has to follow."""
        spec = params.grammar
        if spec is None:
            return None
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidRequestError(
                "invalid_request",
                "structured output needs the package xgrammar: install deepinfer[structured]",
            )
        bound = () if spec.bound_token_id is None else (spec.bound_token_id,)
        self._check_vocab("trigger_token_ids", np.asarray(spec.trigger_token_ids, dtype=np.int64))
        self._check_vocab("bound_token_id", np.asarray(bound, dtype=np.int64))
        return spec

    def _token_ids(self, prompt: Prompt) -> np.ndarray:
        if prompt.error is not None:
            raise InvalidRequestError("invalid_request", prompt.error)
        if prompt.unknown:
            raise InvalidRequestError(
                "invalid_request",
                f"the prompt has the unknown key {prompt.unknown[0]!r}: use prompt or prompt_token_ids, "
                "and cache_salt",
            )
        if prompt.text is not None and not isinstance(prompt.text, str):
            raise InvalidRequestError(
                "invalid_request", f"the prompt is a {type(prompt.text).__name__}: pass text or token ids"
            )
        if prompt.token_ids is None:
            if prompt.text is None:
                raise InvalidRequestError("invalid_request", "the prompt has neither text nor token ids")
            if self._tokenizer is None:
                raise InvalidRequestError(
                    "invalid_request", "a text prompt needs a tokenizer; pass token ids"
                )
            ids = np.asarray(self._encode(prompt.text), dtype=np.int64)
        else:
            ids = _integers("prompt_token_ids", prompt.token_ids)
        if ids.size == 0:
            raise InvalidRequestError("invalid_request", "the prompt is empty: it needs at least one token")
        self._check_vocab("prompt_token_ids", ids)
        return ids.astype(np.int32)

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "invalid_request",
                f"the prompt is no valid Unicode text: character {error.start} is a lone surrogate",
            ) from None
        return self._tokenizer.encode(text)

    def _check_params(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                "invalid_request", f"sampling_params is a {type(params).__name__}: pass a SamplingParams"
            )
        if params.n > MAX_COMPLETIONS:
            raise InvalidRequestError(
                "invalid_request", f"n is {params.n}: a request can have {MAX_COMPLETIONS} completions"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "golden_token_ids"):
            values = getattr(params, name)
            if values:
                self._check_vocab(name, np.asarray(values, dtype=np.int64), free=name == "golden_token_ids")
        if params.logit_bias:
            self._check_vocab("logit_bias", np.asarray([token for token, _ in params.logit_bias]))
        if params.eos_id is not None:
            self._check_vocab("eos_id", np.asarray([params.eos_id]))
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("invalid_request", "stop strings need a tokenizer; use stop_token_ids")
        return params

    def _check_vocab(self, name: str, ids: np.ndarray, free: bool = False) -> None:
        """Refuse ids outside the vocabulary; -1 passes where it means "free"."""
        bad = (ids >= self._vocab_size) | (ids < (-1 if free else 0))
        if bad.any():
            place = int(np.argmax(bad))
            raise InvalidRequestError(
                "invalid_request",
                f"{name}[{place}] is {int(ids[place])}: token ids are 0 to {self._vocab_size - 1}",
            )


def _salt(salt: Any) -> str | None:
    """A prompt's `cache_salt`."""
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise InvalidRequestError(
            "invalid_request", f"cache_salt is {salt!r}: pass a text that is not empty, or leave it out"
        )
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("invalid_request", "cache_salt is no valid Unicode text") from None
    return salt


def _integers(name: str, values: Any) -> np.ndarray:
    """[n] int64 of a list, tuple, array or tensor of whole numbers."""
    if hasattr(values, "detach"):  # a tensor
        if values.is_floating_point() or values.is_complex():
            raise InvalidRequestError(
                "invalid_request", f"{name} is a tensor of {values.dtype}: pass one of integers"
            )
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or not (np.issubdtype(values.dtype, np.integer) or values.size == 0):
            raise InvalidRequestError(
                "invalid_request",
                f"{name} is an array of {values.dtype} with {values.ndim} dimensions: pass one of integers",
            )
        if values.dtype == np.uint64:  # what int64 cannot hold is out of every vocabulary
            values = np.minimum(values, np.uint64(2**63 - 1))
        return values.astype(np.int64)
    if not isinstance(values, (list, tuple, range)):
        raise InvalidRequestError(
            "invalid_request", f"{name} is a {type(values).__name__}: pass a list of integers, or text"
        )
    for place, value in enumerate(values):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise InvalidRequestError(
                "invalid_request", f"{name}[{place}] is {value!r}: token ids are integers"
            )
        if not -(2**63) <= value < 2**63:
            raise InvalidRequestError("invalid_request", f"{name}[{place}] is {value}: not a token id")
    return np.asarray(values, dtype=np.int64)
