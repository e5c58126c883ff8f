"""Small tools for tests of the core: configurations, buffers as numpy arrays, a driver without a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.native import load_core

core = load_core()

VOCAB = 64
EOS = 1


def make_config(**changes: Any) -> Any:
    """A small configuration: 8-token blocks, 32 of them, 4 sequences."""
    fields: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "vocab_size": VOCAB,
        "block_size": 8,
        "num_blocks": 33,
        "num_state_slots": 7,
        "max_ngram": 4,
        "admission_headroom_tokens": 0,
    }
    fields.update(changes)
    return core.CoreConfig(**fields)


def make_engine(**changes: Any) -> Any:
    return core.EngineCore(make_config(**changes))


def make_params(**fields: Any) -> Any:
    return core.SequenceParams(**{"max_tokens": 8, **fields})


def tokens_of(length: int, first: int = 2) -> np.ndarray:
    """`length` token ids that are neither EOS nor out of the vocabulary."""
    return (np.arange(length) % (VOCAB - 4) + first).astype(np.int32)


def views(layout: Any, buffer: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a filled buffer by name."""
    arrays = {}
    for name, dtype, shape, offset in layout.entries:
        count = int(np.prod(shape))
        arrays[name] = buffer[offset : offset + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return arrays


def inputs(engine: Any, plan: Any) -> dict[str, np.ndarray]:
    """Both parts of a plan's inputs; the buffer starts out as garbage."""
    layout = engine.layout(plan)
    buffer = np.full(layout.nbytes, 0xA5, np.uint8)
    engine.fill(plan, buffer)
    return views(layout, buffer)


def batch_inputs(engine: Any, plan: Any) -> dict[str, np.ndarray]:
    layout = engine.batch_layout(plan)
    buffer = np.full(layout.nbytes, 0xA5, np.uint8)
    engine.fill_batch(plan, buffer)
    return views(layout, buffer)


def sampling_inputs(engine: Any, plan: Any) -> dict[str, np.ndarray]:
    layout = engine.sampling_layout(plan)
    buffer = np.full(layout.nbytes, 0xA5, np.uint8)
    engine.fill_sampling(plan, buffer)
    return views(layout, buffer)


def commit_token(engine: Any, plan: Any, token: int = 7, **results: Any) -> Any:
    """Commits `token` for every row."""
    wanted = plan.max_num_logprobs
    if wanted >= 0:
        results.setdefault("logprobs", np.zeros(plan.num_samples, np.float32))
    if wanted > 0:
        results.setdefault("top_ids", np.zeros((plan.num_samples, wanted), np.int32))
        results.setdefault("top_logprobs", np.zeros((plan.num_samples, wanted), np.float32))
    result = engine.commit(plan, np.full(plan.num_samples, token, np.int32), **results)
    engine.check_integrity()
    return result


def step(engine: Any, kind: Any = None, token: int = 7) -> Any:
    """Schedules and commits one step; the plan, or None."""
    plan = engine.schedule(kind)
    if plan is not None:
        commit_token(engine, plan, token)
    engine.check_integrity()
    return plan


def run_to_end(engine: Any, max_steps: int = 10_000) -> list[Any]:
    """Steps until nothing is unfinished; fails when the engine stands still."""
    plans = []
    while engine.has_unfinished:
        plan = step(engine)
        assert plan is not None, f"{engine.num_running=} {engine.num_waiting=} {engine.num_free_blocks=}"
        plans.append(plan)
        assert len(plans) <= max_steps
    return plans
