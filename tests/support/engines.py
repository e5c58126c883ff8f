"""Engines over the bundled models. They share one copy of weights and tokenizer, so a test can make several.

llm = make_llm("v41-tiny", max_num_seqs=4, max_num_batched_tokens=129)
facts(llm.generate(prompts, params, use_tqdm=False))     # all that has to be equal between two runs
assert_idle(llm)                                         # nothing runs, nothing is leaked
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from deepinfer.engine import parts
from deepinfer.entrypoints.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.paths import MODELS

# One token per request and step, committed at once: for tests that count steps or stop between them.
PLAIN_STEPS = Settings(num_draft_tokens=0, use_async_scheduling=False)

_load_model, _load_tokenizer = parts.load_model, parts.load_tokenizer
_loaded: dict[Any, Any] = {}


def _load_once(checkpoint: Any, arithmetic: Any, **options: Any) -> Any:
    key = checkpoint.path, arithmetic, options.get("with_drafter")
    if key not in _loaded:
        _loaded[key] = _load_model(checkpoint, arithmetic, **options)
    return _loaded[key]


def _load_tokenizer_once(checkpoint: Any, *which: Any) -> Any:
    key = checkpoint.path, which
    if key not in _loaded:
        _loaded[key] = _load_tokenizer(checkpoint, *which)
    return _loaded[key]


def shared_weights() -> Any:
    """While it is entered, engines take the one copy of a model's weights, and of its tokenizer."""
    return mock.patch.multiple(parts, load_model=_load_once, load_tokenizer=_load_tokenizer_once)


def make_llm(name: str = "v41-tiny", *, settings: Settings | None = None, **kwargs: Any) -> LLM:
    """An `LLM` over "v41-tiny" or "tiny-quant"; small pools unless `kwargs` say otherwise."""
    kwargs.setdefault("max_num_seqs", 32)
    kwargs.setdefault("max_model_len", 1024)
    settings = dataclasses.replace(settings or Settings(), kernel_library=Settings.from_env().kernel_library)
    with shared_weights():
        return LLM(str(MODELS[name]), settings=settings, **kwargs)


def make_cold_llm(name: str = "v41-tiny", **options: Any) -> LLM:
    """`make_llm` without a prefix cache: nothing is found, everything is computed."""
    return make_llm(name, enable_prefix_caching=False, **options)


def generate(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[RequestOutput]:
    """`llm.generate` without a bar; the engine has to be idle afterwards."""
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    assert_idle(llm)
    return outputs


def facts(outputs: Sequence[RequestOutput]) -> list[Any]:
    """What a request's result says, without times and request ids: equal facts are equal bits."""
    return [
        (
            output.prompt_token_ids,
            output.prompt_token_logprobs,
            output.prompt_logprobs,
            [
                (
                    sample.index,
                    sample.token_ids,
                    sample.text,
                    sample.token_logprobs,
                    sample.logprobs,
                    sample.finish_reason,
                    sample.stop_reason,
                    sample.error,
                )
                for sample in output.outputs
            ],
        )
        for output in outputs
    ]


def assert_idle(llm: LLM) -> None:
    """No request is left, and every block and slot is free."""
    engine = llm.llm_engine
    core = engine.core
    core.check_integrity()
    assert not engine.has_unfinished_requests()
    assert (core.num_unfinished, core.num_in_flight) == (0, 0), (
        f"{core.num_unfinished=} {core.num_in_flight=}"
    )
    assert core.num_free_blocks == engine.cache_config.num_blocks - 1, f"{core.num_free_blocks=}"
    assert core.num_free_slots == engine.cache_config.num_state_slots - 1, f"{core.num_free_slots=}"


class WatchedCore:
    """An engine's core that keeps the plans it made and can act before each.

    Attributes:
        plans: every plan, in order.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self.plans: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def schedule(self, *args: Any) -> Any:
        self.before_plan()
        plan = self._core.schedule(*args)
        if plan is not None:
            self.plans.append(plan)
        return plan

    def before_plan(self) -> None:
        """Called before each plan; for subclasses."""


@contextmanager
def watched(llm: LLM, kind: type[WatchedCore] = WatchedCore, *args: Any) -> Iterator[Any]:
    """Put `kind(core, *args)` between the engine and its core for a while."""
    engine = llm.llm_engine
    core = engine.core
    engine.core = kind(core, *args)
    try:
        yield engine.core
    finally:
        engine.core = core


@functools.cache
def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids of a prompt, the same ones for the same numbers; every id is a token of both models."""
    order = random.Random(f"{length} {seed}")
    return tuple(order.randrange(16, 1800) for _ in range(length))


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    """Greedy parameters that go on after EOS."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)
