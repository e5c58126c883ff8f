"""Roles: two engines in two processes give what one engine gives."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine_type import EngineType
from deepinfer.kv_transfer.connector import KVConnector
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.shared_memory import SharedMemoryListener
from deepinfer.kv_transfer.store_connector import StoreConnector
from deepinfer.sampling_params import SamplingParams
from tests.engine.test_roles import TEXT, requests
from tests.support.engines import generate, make_llm
from tests.support.paths import V41_TINY
from tests.support.process import clean_env
from tests.support.roles import check_idle, make_engine

CHILD = """
import functools, os, sys
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector
from deepinfer.kv_transfer.store_connector import StoreConnector

model, transport, place = sys.argv[1:]
args = EngineArgs.from_kwargs(model=model, engine_type=EngineType.COMPLETION, max_num_seqs=32,
                              max_model_len=1024, disable_log_stats=True)
engine = LLMEngine.from_engine_args(args)
if transport == "store":
    store = DirectoryStore(place)
    engine.connect(lambda identity, layout: StoreConnector(store, "c", "completion", identity, layout,
                                                           timeout_s=60))
else:
    engine.connect(functools.partial(SharedMemoryConnector.connect, place))
while engine.wait_for_requests(0.0 if engine.has_unfinished_requests() else 0.5) or \\
        engine.has_unfinished_requests():
    for output in engine.step():
        sample = output.outputs[0]
        print(repr((output.request_id, sample.token_ids, sample.text, sample.token_logprobs,
                    sample.finish_reason, sample.stop_reason)), flush=True)
engine.settle()
engine.core.check_integrity()
stats = engine.hand_off_stats
print(os.getpid(), stats.num_sequences, stats.num_bytes, engine.stats.num_prefill_tokens, flush=True)
"""


def start_child(tmp_path: Path, transport: str) -> tuple[Any, subprocess.Popen[str]]:
    """A connected PROMPT engine, and a process that completes."""
    prompt = make_engine(EngineType.PROMPT)
    place = tmp_path / "place"
    listener = None if transport == "store" else SharedMemoryListener(place)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(V41_TINY), transport, str(place)],
        env=clean_env(),
        stdout=subprocess.PIPE,
        text=True,
    )

    def connect(identity: bytes, layout: EntryLayout) -> KVConnector:
        if listener is not None:
            return listener.accept(identity, layout, timeout_s=120)
        return StoreConnector(DirectoryStore(place), "c", "prompt", identity, layout, timeout_s=120)

    try:
        prompt.connect(connect)
    except BaseException:
        child.kill()
        raise
    finally:
        if listener is not None:
            listener.close()
    return prompt, child


@functools.cache
def rows_of_one_engine() -> dict[str, tuple[Any, ...]]:
    """What it gives for each request."""
    cases = requests()
    with make_llm() as llm:
        outputs = generate(llm, [prompt for prompt, _ in cases.values()], [p for _, p in cases.values()])
        return {name: row(output) for name, output in zip(cases, outputs, strict=True)}


@pytest.mark.parametrize("transport", ["shared memory", "store"])
def test_two_processes(transport: str, tmp_path: Path) -> None:
    """Every kind of request; the other process prefills nothing and has the bytes that this one has sent."""
    cases, wanted = requests(), rows_of_one_engine()
    prompt, child = start_child(tmp_path, transport)
    try:
        results = {}
        for name, (text, params) in cases.items():
            prompt.add_request(name, text, params)
        while prompt.has_unfinished_requests():
            for output in prompt.step():
                if output.outputs[0].finish_reason != "handed_off":
                    results[output.request_id] = row(output)
        check_idle(prompt)
        sent = prompt.hand_off_stats
        lines = [child.stdout.readline() for _ in range(sent.num_sequences)]
        prompt.close()
        last, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    for line in lines:
        name, *facts_of_one = eval(line, {"nan": float("nan")})
        results[name] = tuple(facts_of_one)
    assert results == wanted and sent.num_sequences < len(cases)
    assert last.split() == [str(n) for n in (child.pid, sent.num_sequences, sent.num_bytes, 0)]
    assert child.pid != os.getpid() and sent.num_bytes > 0


def row(output: Any) -> tuple[Any, ...]:
    sample = output.outputs[0]
    return sample.token_ids, sample.text, sample.token_logprobs, sample.finish_reason, sample.stop_reason


def test_the_other_process_is_killed(tmp_path: Path) -> None:
    prompt, child = start_child(tmp_path, "shared memory")
    try:
        prompt.add_request("before", TEXT, SamplingParams(temperature=0, max_tokens=5))
        while prompt.has_unfinished_requests():
            prompt.step()
        assert child.stdout.readline().startswith("('before'")
    finally:
        child.kill()
        child.wait()
    prompt.add_request("after", TEXT, SamplingParams(temperature=0, max_tokens=5))
    results = []
    while prompt.has_unfinished_requests():
        results += prompt.step()
    (output,) = results
    assert output.outputs[0].error.kind == "transfer" and "request after" in output.outputs[0].error.message
    check_idle(prompt)
    prompt.close()
