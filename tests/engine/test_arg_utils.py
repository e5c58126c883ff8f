"""EngineArgs: every field's type and range, and what wins where several places could decide."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepinfer.engine import parts
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.settings import Settings
from tests.support.models import load_config

BAD = {
    "max_model_len": [0, -1, 1.5, "8", True, 2**31],
    "max_num_seqs": [0, None, 2.0, False, 2**40],
    "max_num_batched_tokens": [0, "all", 2**31],
    "num_blocks": [0, 2**31, 1e3],
    "cache_bytes": [0, -5, "1G"],
    "lookahead_tokens": [-1, None, "a"],
    "seed": [-1, "x", 2**63, 1.0],
    "max_prefill_tflops": [-1.0, math.nan, math.inf, "x", True],
    "chunked_prefill": ["no", None, 1],
    "stop_preempted_request": [0, "yes"],
    "disable_log_stats": [1, None],
    "batch_invariant": ["yes", 1],
    "model": [None, 5],
    "tokenizer": [5],
    "load_format": [None, "pickle"],
    "tokens_per_block": [0, 64],
    "logprobs_mode": [None, "RAW"],
    "arithmetic": ["fp32", 5],
    "engine_type": [3, "a"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_values_that_do_not_fit(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: |{value!r} is not a valid EngineType"):
        EngineArgs(**{"model": "somewhere", name: value})


def test_values_at_the_edges():
    EngineArgs("m", max_model_len=1, max_num_seqs=2**31 - 1, lookahead_tokens=0, seed=2**63 - 1)
    EngineArgs("m", max_prefill_tflops=0, cache_bytes=2**62, batch_invariant=None, load_format="AUTO")
    args = EngineArgs(Path("some") / "where", tokenizer=Path("else"))
    assert (args.model, args.tokenizer) == ("some/where", "else")


@pytest.mark.parametrize(("wrong", "near"), [("max_num_seq", "max_num_seqs"), ("arithmetics", "arithmetic")])
def test_unknown_names(wrong, near):
    with pytest.raises(TypeError, match=f"{wrong!r}; the nearest one is {near!r}"):
        EngineArgs.from_kwargs(model="m", **{wrong: 1})


def test_who_decides_about_batch_invariance():
    """The argument, then the environment, then: on."""
    for argument in (None, False, True):
        for variable in (None, False, True):
            decided = argument if argument is not None else variable if variable is not None else True
            args = EngineArgs("m", batch_invariant=argument)
            assert args.resolve_arithmetic(Settings(batch_invariant=variable)).batch_invariant is decided


def test_arithmetic_of_a_gpu():
    settings = Settings()
    assert EngineArgs("m").resolve_arithmetic(settings, "cuda").name == "w8a8"
    assert EngineArgs("m", arithmetic="bfloat16").resolve_arithmetic(settings, "cuda").name == "bfloat16"
    for asked in (False, True):
        with_codes = EngineArgs("m").resolve_arithmetic(
            Settings(fp8_products=asked), "cuda", multiplies_codes=True
        )
        assert with_codes.fp8_products is asked
    for name, has_them in (("w8a8", False), ("bfloat16", True)):
        with pytest.raises(ValueError, match=f"DEEPINFER_FP8_PRODUCTS=1.*{name}.*need an SM90 GPU"):
            EngineArgs("m", arithmetic=name).resolve_arithmetic(
                Settings(fp8_products=True), "cuda", multiplies_codes=has_them
            )
    assert not EngineArgs("m").resolve_arithmetic(Settings(fp8_products=True)).fp8_products  # a CPU
    for name in ("float32", "plain"):
        with pytest.raises(ValueError, match=f"{name}.*w8a8 or bfloat16.*DEEPINFER_ACCELERATOR=cpu"):
            EngineArgs("m", arithmetic=name).resolve_arithmetic(settings, "cuda")


def test_memory_of_a_gpu():
    """A GPU's caches come out of its own memory, 90 % of it unless told otherwise."""
    assert EngineArgs("m").memory_limit() is None
    assert EngineArgs("m").memory_limit(1000) == 900
    assert EngineArgs("m", gpu_memory_utilization=0.5).memory_limit(1000) == 500
    assert EngineArgs("m", cache_bytes=10).memory_limit(1000) is None


@pytest.mark.parametrize(
    ("options", "drafts", "expected"),
    [
        ({}, 0, (4096, 4096)),
        ({}, 5, (4096, 4096)),
        ({"max_model_len": 100}, 0, (100, 4096)),
        ({"max_num_seqs": 1000}, 5, (4096, 6000)),
        ({"max_num_batched_tokens": 256}, 0, (4096, 256)),
    ],
)
def test_tokens_of_a_step(options, drafts, expected):
    """As many as the longest prompt, a full decode step, or 4,096 take, unless the caller says."""
    scheduler = EngineArgs("m", **options).resolve_scheduler(Settings(), 8192, drafts)
    assert (scheduler.max_model_len, scheduler.max_num_batched_tokens) == expected


def test_the_models_own_limit():
    assert EngineArgs("m").resolve_scheduler(Settings(), 512, 0).max_model_len == 512
    with pytest.raises(ValueError, match="exceeds the model's own limit of 512"):
        EngineArgs("m", max_model_len=513).resolve_scheduler(Settings(), 512, 0)


def test_pools_hold_every_running_request_or_what_memory_allows():
    args = EngineArgs("m", max_num_seqs=10, max_model_len=1000, enable_prefix_caching=False)
    scheduler = args.resolve_scheduler(Settings(), 4096, 0)
    cache = args.resolve_cache(scheduler, Settings(), 1000, 500, 6)
    assert (cache.num_blocks, cache.num_state_slots) == (10 * 8 + 1, int(10 * 1.2) + 1)
    small = dataclasses.replace(args, cache_bytes=13 * 500 + 20 * 1000)
    assert small.resolve_cache(scheduler, Settings(), 1000, 500, 6).num_blocks == 21
    tiny = dataclasses.replace(args, cache_bytes=13 * 500 + 7 * 1000)
    with pytest.raises(ValueError, match=r"7 usable cache blocks .* which takes 8 blocks of 1000 bytes"):
        tiny.resolve_cache(scheduler, Settings(), 1000, 500, 6)
    slots = args.resolve_cache(scheduler, Settings(num_state_slots_ratio=2.0), 1000, 500, 6)
    assert slots.num_state_slots == 21


def test_the_prefix_cache_has_slots_of_its_own():
    args = EngineArgs("m", max_num_seqs=10, max_model_len=1000)
    scheduler = args.resolve_scheduler(Settings(), 4096, 0)

    def resolve(**changes):
        return dataclasses.replace(args, **changes).resolve_cache(scheduler, Settings(), 1000, 500, 6)

    assert resolve().prefix_caching and resolve().num_prefix_states == 64
    assert resolve().num_state_slots == 13 + 64
    assert resolve(num_prefix_states=3).num_state_slots == 13 + 3
    assert resolve(cache_bytes=16 * 5 * 500).num_prefix_states == 5, "a sixteenth of the memory"
    assert resolve(prefix_state_interval=256).prefix_state_interval == 256
    with pytest.raises(ValueError, match="prefix_state_interval=100: expected a multiple of 128"):
        resolve(prefix_state_interval=100)


def test_what_multiplies_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of SM90, where the rows of a model are whole units of 128 channels."""
    config = load_config("v41-tiny")
    for capability, widths, expected in (
        ((9, 0), config.scaled_widths, True),
        ((9, 0), (128, 96), False),
        ((10, 0), (128,), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        checkpoint = SimpleNamespace(config=SimpleNamespace(scaled_widths=widths))
        assert parts._multiplies_codes(torch.device("cuda"), checkpoint) is expected
    assert not parts._multiplies_codes(torch.device("cpu"), SimpleNamespace(config=config))
