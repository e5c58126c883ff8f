"""Two engines that share their requests: one runs prompts, the other completes them."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from deepinfer.kv_transfer.store_connector import StoreConnector
from deepinfer.outputs import RequestOutput
from deepinfer.settings import Settings
from tests.support.engines import shared_weights
from tests.support.paths import MODELS


def make_engine(role: EngineType, settings: Settings | None = None, **kwargs: Any) -> LLMEngine:
    """An engine over "v41-tiny" with small pools."""
    kwargs = {"max_num_seqs": 32, "max_model_len": 1024, "disable_log_stats": True, **kwargs}
    with shared_weights():
        args = EngineArgs.from_kwargs(model=str(MODELS["v41-tiny"]), engine_type=role, **kwargs)
        return LLMEngine.from_engine_args(args, settings or Settings())


def connect(
    prompt: LLMEngine, completion: LLMEngine, transport: str = "shared memory", **options: Any
) -> None:
    """Join two engines of this process."""
    if transport == "store":
        store = MemoryStore(1 << 30)
        make = [
            lambda identity, layout, side=side: StoreConnector(store, "c", side, identity, layout, **options)
            for side in ("prompt", "completion")
        ]
        listener = None
    else:
        path = Path(tempfile.mkdtemp()) / "socket"
        listener = SharedMemoryListener(path)
        make = [functools.partial(SharedMemoryConnector.connect, path, **options), listener.accept]
    other = threading.Thread(target=completion.connect, args=(make[1],))
    other.start()
    prompt.connect(make[0])
    other.join()
    if listener is not None:
        listener.close()


@contextmanager
def engine_pair(
    transport: str = "shared memory",
    settings: Settings | None = None,
    other: Settings | None = None,
    **kwargs: Any,
) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """A connected pair; afterwards both have to be idle. `other` are the COMPLETION engine's settings."""
    prompt = make_engine(EngineType.PROMPT, settings, **kwargs)
    completion = make_engine(EngineType.COMPLETION, other or settings, **kwargs)
    connect(prompt, completion, transport)
    try:
        yield prompt, completion
        for engine in (prompt, completion):
            check_idle(engine)
    finally:
        prompt.close()
        completion.close()


def check_idle(engine: LLMEngine) -> None:
    """No request is left, and every block and slot is free."""
    assert not engine.has_unfinished_requests()
    engine.settle()
    core = engine.core
    core.check_integrity()
    assert (core.num_unfinished, core.num_in_flight) == (0, 0)
    assert core.num_free_blocks == engine.cache_config.num_blocks - 1
    assert core.num_free_slots == engine.cache_config.num_state_slots - 1


def run_pair(
    prompt: LLMEngine, completion: LLMEngine, requests: dict[str, tuple[Any, Any]]
) -> dict[str, RequestOutput]:
    """Results by request, of whichever side ended it; a request is a prompt and parameters."""
    for name, (text, params) in requests.items():
        prompt.add_request(name, text, params)
    results: dict[str, RequestOutput] = {}
    deadline = time.monotonic() + 120
    while len(results) < len(requests):
        assert time.monotonic() < deadline, f"{len(results)} of {len(requests)} results"
        for output in prompt.step() if prompt.has_unfinished_requests() else ():
            if output.outputs[0].finish_reason != "handed_off":
                results[output.request_id] = output
        for output in completion.step():
            assert output.request_id not in results
            results[output.request_id] = output
        for engine in (prompt, completion):
            engine.core.check_integrity()
    return results
