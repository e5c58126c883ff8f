"""The engine's forwards read the pools and nothing else: live bytes matter, free blocks and slots do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.runtime.caches import Caches
from deepinfer.settings import Settings
from tests.engine.equalities import Outcome, cases_of, differences, run_alone, run_together
from tests.engine.faults import faulty
from tests.support.engines import (
    PLAIN_STEPS,
    WatchedCore,
    assert_idle,
    generate,
    greedy,
    make_llm,
    prompt_of,
    watched,
)
from tests.support.models import load_config

MODELS = ("v41-tiny", "tiny-quant")
CASES = tuple(cases_of((1, 8, 64, 127, 129, 200, 258, 30, 65, 3)))


@functools.cache
def expected(model: str) -> Outcome:
    """Each case alone, token by token."""
    with make_llm(model, settings=PLAIN_STEPS) as llm:
        return run_alone(llm, CASES)


class ScribblingCore(WatchedCore):
    """Fills every block and slot that belongs to nobody with NaNs before each plan."""

    def __init__(self, core: Any, caches: Caches) -> None:
        super().__init__(core)
        self._caches = caches
        self.num_scribbled = 0

    def before_plan(self) -> None:
        for pool, free in (
            (self._caches.blocks, self.free_blocks()),
            (self._caches.slots, self.free_slots()),
        ):
            pool[0] = 0xFF
            pool[torch.from_numpy(free).long()] = 0xFF
            self.num_scribbled += len(free)


@pytest.mark.parametrize(
    "settings", [PLAIN_STEPS, Settings(use_async_scheduling=True)], ids=["plain", "async"]
)
@pytest.mark.parametrize("model", MODELS)
def test_free_blocks_and_slots_are_not_read(model, settings):
    """Requests come and go, so that every block and slot is used, freed, scribbled over and used again."""
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 70, "max_model_len": 384}
    with make_llm(model, settings=settings, **limits) as llm:
        caches = llm.llm_engine.model_runner._caches
        with watched(llm, ScribblingCore, caches) as core:
            actual = run_together(llm, CASES)
        assert core.num_scribbled > 100
        assert_idle(llm)
    assert not differences(CASES, actual, expected(model))


@pytest.mark.parametrize("model", MODELS)
def test_one_live_byte_changes_the_logits(model):
    """In a step of the engine, each kind of record of the running request in turn, one byte at a time."""
    config = load_config(model)
    length = 61  # everything is selected; the newest token closes a group of two
    logits: dict[str, Tensor] = {}

    def probe(forward, batch, caches, **options):
        if batch.is_prefill or logits:
            return forward(batch, caches, **options)
        table, slot = batch.block_tables[0].tolist(), int(batch.state_slots[0])
        saved = caches.blocks.clone(), caches.slots.clone()
        assert int(batch.positions[0]) == length

        def attempt(name: str, part: Tensor | None = None, mask: int = 0) -> None:
            caches.blocks.copy_(saved[0])
            caches.slots.copy_(saved[1])
            if part is not None:
                part ^= mask
            logits[name] = head(forward(batch, caches, **options).hidden_states)

        attempt("clean")
        for layer in range(config.num_hidden_layers):
            record = caches.window(layer)[slot, length - 2]
            attempt(f"window code of layer {layer}", record[5:6], 0x44)
            attempt(f"window scale of layer {layer}", record[-3:-2], 0x01)
        for layer in config.kv_source_layer_ids:
            main = caches.main(layer)[table[0], 7]
            attempt(f"main code of layer {layer}", main[5:6], 0xFF)
            attempt(f"main scale of layer {layer}", main[-3:-2], 0x08)
            if config.ratio(layer) > 1:
                ring = caches.compression(layer)
                open_token = ring[slot, (length - 1) % ring.shape[1], 1].view(torch.uint8)
                attempt(f"open group of layer {layer}", open_token[39:40], 0x40)  # an exponent
        caches.blocks.copy_(saved[0])
        caches.slots.copy_(saved[1])
        return forward(batch, caches, **options)

    with make_llm(model, settings=PLAIN_STEPS, max_num_seqs=2, max_model_len=256) as llm:
        head = llm.llm_engine.model_runner._model.compute_logits
        want = generate(llm, [prompt_of(length)], greedy(4))[0].outputs[0].token_ids
        with faulty(llm, on_forward=probe):
            found = generate(llm, [prompt_of(length)], greedy(4))[0].outputs[0].token_ids
    assert found == want
    clean = logits.pop("clean")
    assert len(logits) > 2 * config.num_hidden_layers + 3
    unread = [name for name, values in logits.items() if torch.equal(values, clean)]
    assert not unread


@pytest.mark.parametrize("model", MODELS)
def test_one_index_key_changes_the_logits(model):
    """With more entries than a query takes, the scale of one key decides whether it is among them."""
    config = load_config(model)
    changed: dict[int, int] = {}

    def probe(forward, batch, caches, **options):
        if batch.is_prefill or changed:
            return forward(batch, caches, **options)
        block = int(batch.block_tables[0, 0])
        saved = caches.blocks.clone(), caches.slots.clone()

        def attempt() -> Tensor:
            values = head(forward(batch, caches, **options).hidden_states)
            caches.blocks.copy_(saved[0])
            caches.slots.copy_(saved[1])
            return values

        clean = attempt()
        for layer in config.kv_source_layer_ids:
            changed[layer] = 0
            for entry in range(0, 60, 3):
                caches.index_scales(layer)[block, entry, 0] += 9  # 512 times as large
                changed[layer] += not torch.equal(attempt(), clean)
        return forward(batch, caches, **options)

    with make_llm(model, settings=PLAIN_STEPS, max_num_seqs=2, max_model_len=512) as llm:
        head = llm.llm_engine.model_runner._model.compute_logits
        with faulty(llm, on_forward=probe):
            generate(llm, [prompt_of(301)], greedy(3))
    assert set(changed) == set(config.kv_source_layer_ids)
    assert min(changed.values()) > 0, changed
