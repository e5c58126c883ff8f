"""SamplingParams: what a caller may ask of one request, validated when it is built.

A value is immutable, so one object serves any number of prompts without copies; `clone` makes a changed
one. Limits that depend on the model (vocabulary, context length) are checked where the request enters
the engine. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from deepinfer.structured_output.request import (
    GrammarSpec,
    StructuredOutputsParams,
    check_so_args,
    check_structured_outputs,
)
from deepinfer.utils.checks import check_bool, check_float, check_int, check_int_list

SAMPLING_EPS = 1e-5  # temperatures below it mean greedy decoding
INT32_MAX = 2**31 - 1
MAX_LOGPROBS = 1000  # most alternatives that one position may report
MAX_PENALTY = 2.0  # bound of presence and frequency penalties, as in the OpenAI API
VERIFICATIONS = ("coupled", "ratio")


@dataclass(init=False, repr=False, unsafe_hash=True)  # immutable by __setattr__
class SamplingParams:
    """How the tokens of one request are chosen, when it stops and what it reports.

    Logits pass through, in this order: penalties, logit bias, masks (bans, allowed tokens, `min_tokens`),
    temperature, min-p, top-k, top-p. Ties are resolved towards the lowest token id everywhere.

    Three keywords are other names of a field: `seq_seed` of `seed`, `top_logprobs` of `logprobs` (with
    `logprobs=True` it is the number of alternatives), and an explicit `None` always means the default.

    Raises (on construction):
        TypeError: a value of the wrong type (a bool is not a number) or an unknown keyword; the message
            names the nearest known one.
        ValueError: a value out of its range; the message says what was given and what would work.
    """

    n: int = 1
    """Completions per prompt, >= 1. Completion j uses seed S_j (`deepinfer.sampling.seeds`)."""
    temperature: float = 1.0
    """Divides the logits, >= 0. Below 1e-5 the request is greedy: this field becomes 0.0 and top_p, top_k and
    min_p are switched off, since only the largest logit can win."""
    top_p: float = 1.0
    """Keeps the fewest most likely tokens whose mass reaches top_p, in (0, 1]; a token stays when the mass
    strictly before it is <= top_p, so at least one survives. 1 is off."""
    top_k: int = -1
    """Keeps the k most likely tokens; -1 is off. Larger than the vocabulary is off as well."""
    min_p: float = 0.0
    """Keeps tokens at least min_p times as likely as the most likely one, in [0, 1]; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that occur in the prompt or the output so
    far; > 0, 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output so far; in [-2, 2], 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output so far; in [-2, 2], 0 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of single tokens before the temperature. Given as {token id: bias}; a bias is
    finite or -inf (never this token). Kept as pairs sorted by token id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """When given, only these token ids can be sampled. Kept sorted and without repeats."""
    seed: int | None = None
    """64-bit seed of every draw (taken modulo 2**64). None draws a fresh one for each prompt; a given one is
    used as it stands for every prompt that it is passed to."""
    max_tokens: int | None = 16
    """Most output tokens, >= 1; None goes on to the end of the context."""
    min_tokens: int = 0
    """EOS, `stop_token_ids` and `stop` cannot end the output before this many tokens."""
    ignore_eos: bool = False
    """Goes on after EOS."""
    eos_id: int | None = None
    """The end-of-sequence id of this request; None takes the checkpoint's."""
    first_n_token_no_eos: int = 0
    """EOS is impossible for the first this-many output tokens, also under `ignore_eos`."""
    stop: tuple[str, ...] = ()
    """Strings that end the output. Given as a string or a list of non-empty strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output."""
    include_stop_str_in_output: bool = False
    """Keeps the stop string (or the text of the stopping token) at the end of the text."""
    logprobs: int | None = None
    """None: no log-probabilities; k >= 0: that of the chosen token and of the k most likely ones, k <= 1000.
    True counts as 0 and False as None. What the values mean is the engine's `logprobs_mode`."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, each given the ones before it and under the same parameters;
    penalties, which look at the output, and `min_tokens` do not apply to them."""
    golden_token_ids: tuple[int, ...] = ()
    """Forced output tokens by output index; -1 leaves a place free, places beyond the list are free. The
    reported log-probability is the model's value for the forced token."""
    verification: str | None = None
    """How drafts are tested when the engine speculates; None takes `EngineArgs.verification`. "coupled": the
    output is that of plain sampling with the same seed, token for token. "ratio": a few more drafts are
    accepted; the output has the law of plain sampling, but the seed alone does not fix it. A greedy request
    gets the same output from both."""
    detokenize: bool = True
    """Turns the output into text. False leaves `text` empty."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text."""
    so_args: Mapping[str, Any] | None = field(default=None, hash=False)
    """Structured output: a dict with `schema_type` ("json", "json_object", "regex", "ebnf", "choice",
    "structural_tag"), `schema`, and optionally `trigger_token_ids` (output is free until these tokens have
    appeared in a row) and `bound_token_id` (when it appears first, the rest of the trigger is forced)."""
    structured_outputs: StructuredOutputsParams | None = field(default=None, hash=False)
    """Structured output in vLLM's form, also as a dict of its options. At most one of `so_args` and
    `structured_outputs` may be given."""

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        seq_seed: int | None = None,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        eos_id: int | None = None,
        first_n_token_no_eos: int = 0,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        include_stop_str_in_output: bool = False,
        logprobs: int | bool | None = None,
        top_logprobs: int | None = None,
        prompt_logprobs: int | bool | None = None,
        golden_token_ids: Sequence[int] | None = None,
        verification: str | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        so_args: Mapping[str, Any] | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(_unknown_keywords(unknown))
        values = {
            "n": check_int("n", n, 1, INT32_MAX),
            "temperature": check_float("temperature", temperature, 0.0, 1e6),
            "top_p": check_float("top_p", top_p, 0.0, 1.0, open_low=True, hint="1.0 switches it off"),
            "top_k": _check_top_k(top_k),
            "min_p": check_float("min_p", min_p, 0.0, 1.0, hint="0.0 switches it off"),
            "repetition_penalty": check_float(
                "repetition_penalty", repetition_penalty, 0.0, 1e6, open_low=True, hint="1.0 switches it off"
            ),
            "presence_penalty": check_float("presence_penalty", presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            "frequency_penalty": check_float(
                "frequency_penalty", frequency_penalty, -MAX_PENALTY, MAX_PENALTY
            ),
            "logit_bias": _check_logit_bias(logit_bias),
            "allowed_token_ids": _check_allowed(allowed_token_ids),
            "seed": _check_seed(seed, seq_seed),
            "max_tokens": _check_max_tokens(max_tokens),
            "min_tokens": check_int("min_tokens", min_tokens, 0, INT32_MAX),
            "ignore_eos": check_bool("ignore_eos", ignore_eos),
            "eos_id": None if eos_id is None else check_int("eos_id", eos_id, 0, INT32_MAX),
            "first_n_token_no_eos": check_int("first_n_token_no_eos", first_n_token_no_eos, 0, INT32_MAX),
            "stop": _check_stop(stop),
            "stop_token_ids": tuple(
                dict.fromkeys(check_int_list("stop_token_ids", stop_token_ids or (), 0, INT32_MAX))
            ),
            "include_stop_str_in_output": check_bool(
                "include_stop_str_in_output", include_stop_str_in_output
            ),
            "logprobs": _check_logprobs("logprobs", logprobs, top_logprobs),
            "prompt_logprobs": _check_logprobs("prompt_logprobs", prompt_logprobs, None),
            "golden_token_ids": check_int_list("golden_token_ids", golden_token_ids or (), -1, INT32_MAX),
            "verification": None if verification is None else check_verification(verification),
            "detokenize": check_bool("detokenize", detokenize),
            "skip_special_tokens": check_bool("skip_special_tokens", skip_special_tokens),
        }
        if values["temperature"] < SAMPLING_EPS:
            values.update(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
        if values["max_tokens"] is not None and values["min_tokens"] > values["max_tokens"]:
            raise ValueError(f"min_tokens ({min_tokens}) must not be larger than max_tokens ({max_tokens})")
        if values["stop"] and not values["detokenize"]:
            raise ValueError(
                "stop strings are searched in the text: give detokenize=True, or use stop_token_ids instead"
            )
        values |= _check_structured_output(so_args, structured_outputs)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit wins and no random number is drawn."""
        return self.temperature == 0.0

    @property
    def seq_seed(self) -> int | None:
        """Another name of `seed`."""
        return self.seed

    @property
    def top_logprobs(self) -> int:
        """The number of alternatives per position; 0 also when no log-probabilities are wanted."""
        return self.logprobs or 0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on which tokens occurred before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_structured_output(self) -> bool:
        """Whether the output has to follow a grammar."""
        return self.so_args is not None or self.structured_outputs is not None

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the output has to look like, from `so_args` or `structured_outputs`."""
        return self._grammar  # type: ignore[attr-defined]

    @classmethod
    def from_optional(cls, **options: Any) -> SamplingParams:
        """Builds parameters from keywords of which any may be None, meaning the field's default."""
        return cls(**{name: value for name, value in options.items() if value is not None})

    def clone(self, **changes: Any) -> SamplingParams:
        """Returns a copy with some fields changed; without changes, the object itself (it is immutable)."""
        if not changes:
            return self
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        if "seq_seed" in changes and "seed" not in changes:
            del options["seed"]
        if "top_logprobs" in changes and "logprobs" not in changes:
            del options["logprobs"]
        return type(self)(**(options | changes))

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(
            f"SamplingParams cannot be changed: {name!r}; use params.clone({name}=...) to get a changed copy"
        )

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"SamplingParams cannot be changed: {name!r}")

    def __copy__(self) -> SamplingParams:
        return self

    def __deepcopy__(self, memo: dict) -> SamplingParams:
        return self

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.changed_fields())

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{k}={v!r}' for k, v in self.changed_fields().items())})"

    def changed_fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in the order of declaration."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if "so_args" in changed:
            changed["so_args"] = dict(changed["so_args"])
        return changed


def _rebuild(cls: type[SamplingParams], options: dict[str, Any]) -> SamplingParams:
    return cls(**options)


def _unknown_keywords(unknown: dict[str, Any]) -> str:
    known = [name for name in inspect.signature(SamplingParams).parameters if name != "unknown"]
    parts = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        parts.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return f"SamplingParams has no option {', '.join(parts)}; it knows {', '.join(known)}"


def check_verification(value: str) -> str:
    """The value; a ValueError that says what would work when it is no kind of verification."""
    if value not in VERIFICATIONS:
        raise ValueError(f"verification={value!r}: choose one of {', '.join(VERIFICATIONS)}")
    return value


def _check_top_k(value: int) -> int:
    value = check_int("top_k", value, -1, INT32_MAX, hint="-1 switches it off")
    if value == 0:
        raise ValueError("top_k must be -1 (off) or at least 1, got 0")
    return value


def _check_max_tokens(value: int | None) -> int | None:
    if value is None:
        return None
    return check_int("max_tokens", value, 1, INT32_MAX, hint="None goes on to the end of the context")


def _check_seed(seed: int | None, seq_seed: int | None) -> int | None:
    given = {
        name: check_int(name, value) % 2**64
        for name, value in (("seed", seed), ("seq_seed", seq_seed))
        if value is not None
    }
    if len(set(given.values())) > 1:
        raise ValueError(f"seed ({seed}) and seq_seed ({seq_seed}) are the same option: give one of them")
    return next(iter(given.values()), None)


def _check_stop(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or isinstance(strings, (bytes, Mapping)):
        raise TypeError(f"stop must be a string or a list of strings, got {type(value).__name__}")
    strings = tuple(strings)
    for text in strings:
        if not isinstance(text, str):
            raise TypeError(f"stop must be a string or a list of strings, got an element {text!r}")
        if not text:
            raise ValueError("stop strings must not be empty")
    return tuple(dict.fromkeys(strings))


def _check_logprobs(name: str, value: int | bool | None, top: int | None) -> int | None:
    """Joins the int form (k alternatives), the switch form (True) and the `top_logprobs` alias."""
    limit = {"low": 0, "high": MAX_LOGPROBS, "hint": "a number of alternatives, True for none, None for off"}
    count = None if value is None or isinstance(value, bool) else check_int(name, value, **limit)
    alias = None if top is None else check_int("top_logprobs", top, 0, MAX_LOGPROBS)
    if value is False and alias:
        raise ValueError(f"top_logprobs={alias} asks for log-probabilities that logprobs=False switches off")
    if count is not None and alias and count != alias:
        raise ValueError(f"{name} ({count}) and top_logprobs ({alias}) are the same option: give one of them")
    if count is not None:
        return count
    if alias or value is True:
        return alias or 0
    return None


def _check_allowed(value: Sequence[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = check_int_list("allowed_token_ids", value, 0, INT32_MAX)
    if not ids:
        raise ValueError("allowed_token_ids must not be empty; None allows every token")
    return tuple(sorted(set(ids)))


def _check_logit_bias(value: Mapping[int, float] | Iterable[tuple[int, float]] | None) -> tuple:
    if value is None:
        return ()
    if not isinstance(value, (Mapping, list, tuple)):
        raise TypeError(f"logit_bias must be a dict of token id to bias, got {type(value).__name__}")
    pairs = value.items() if isinstance(value, Mapping) else value
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(f"logit_bias must be a dict of token id to bias, got an element {pair!r}")
        token = check_int("logit_bias token id", pair[0], 0, INT32_MAX)
        if token in bias:
            raise ValueError(f"logit_bias names token {token} twice")
        name = f"logit_bias[{token}]"
        bias[token] = check_float(
            name, pair[1], -1e30, 1e30, allow_negative_infinity=True, hint="-inf forbids the token"
        )
    return tuple(sorted(bias.items()))


def _check_structured_output(so_args: Any, structured_outputs: Any) -> dict[str, Any]:
    """Both forms as they are kept, and the grammar that either asks for."""
    if so_args is not None and structured_outputs is not None:
        raise ValueError("give so_args or structured_outputs, not both: they say the same thing")
    grammar = None
    if so_args is not None:
        grammar, so_args = check_so_args(so_args)
        so_args = MappingProxyType(so_args)
    if structured_outputs is not None:
        structured_outputs = check_structured_outputs(structured_outputs)
        grammar = structured_outputs.spec
    return {"so_args": so_args, "structured_outputs": structured_outputs, "_grammar": grammar}
