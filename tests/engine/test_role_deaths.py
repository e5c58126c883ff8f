"""One of two engines is killed: the other ends the requests that were over there with an error, no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.shared_memory import SharedMemoryListener
from deepinfer.kv_transfer.store_connector import StoreConnector
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from tests.support.engines import generate, greedy, make_llm, prompt_of
from tests.support.paths import V41_TINY
from tests.support.process import clean_env
from tests.support.roles import check_idle, make_engine

TRANSPORTS = ("shared memory", "store")
PROMPT_IDS = list(prompt_of(200))

# The other engine: its role, the transport and its place, the model. It says "ready" and hangs.
CHILD = """
import functools, json, sys, time
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector
from deepinfer.kv_transfer.store_connector import StoreConnector
from deepinfer.sampling_params import SamplingParams

role, transport, place, model, prompt = sys.argv[1:]
args = EngineArgs.from_kwargs(model=model, engine_type=EngineType[role], max_num_seqs=4, max_model_len=1024,
                              disable_log_stats=True)
engine = LLMEngine.from_engine_args(args)
if transport == "store":
    store = DirectoryStore(place)
    engine.connect(lambda identity, layout: StoreConnector(store, "c", role.lower(), identity, layout,
                                                           beat_s=0.05, peer_timeout_s=60, timeout_s=60))
else:
    engine.connect(functools.partial(SharedMemoryConnector.connect, place))
results = []
if role == "COMPLETION":
    while engine.hand_off_stats.num_sequences < 2 or "short" not in results:
        engine.wait_for_requests(0.1)
        results += [output.request_id for output in engine.step()]
else:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name, changes in (("sent", {}), ("local", {"max_tokens": 1}), ("dropped", {})):
        engine.add_request(name, json.loads(prompt), params.clone(**changes))
    engine.drop_request(["dropped", "unknown"])
    while engine.has_unfinished_requests():
        results += [(output.request_id, output.outputs[0].finish_reason) for output in engine.step()]
    engine.add_request("waiting", json.loads(prompt), params)
print("ready", sorted(results), flush=True)
time.sleep(300)
"""


@contextmanager
def engine_and_child(
    role: EngineType, transport: str, place: Path
) -> Iterator[tuple[LLMEngine, subprocess.Popen[str]]]:
    """An engine of this process, connected with a child that has the other role."""
    other = EngineType.COMPLETION if role is EngineType.PROMPT else EngineType.PROMPT
    engine = make_engine(role, max_num_seqs=4)
    at = place / ("store" if transport == "store" else "socket")
    listener = None if transport == "store" else SharedMemoryListener(at)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, other.name, transport, str(at), str(V41_TINY), str(PROMPT_IDS)],
        env=clean_env(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if listener is not None:
            engine.connect(lambda identity, layout: listener.accept(identity, layout, timeout_s=120))
        else:
            store = DirectoryStore(at)
            engine.connect(
                lambda identity, layout: StoreConnector(
                    store,
                    "c",
                    role.name.lower(),
                    identity,
                    layout,
                    beat_s=0.05,
                    peer_timeout_s=2.0,
                    timeout_s=120,
                )
            )
        yield engine, child
    finally:
        child.kill()
        child.wait()
        if listener is not None:
            listener.close()
        engine.close()


def kill(child: subprocess.Popen[str]) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


def results_of(engine: LLMEngine, count: int) -> dict[str, RequestOutput]:
    """Step until so many results are there, and a while longer: each comes once."""
    results: dict[str, RequestOutput] = {}
    deadline = time.monotonic() + 60
    left = 20
    while left > 0:
        assert time.monotonic() < deadline, f"{sorted(results)} of {count} results"
        for output in engine.step():
            if output.outputs[0].finish_reason != "handed_off":
                assert output.request_id not in results
                results[output.request_id] = output
        left -= len(results) >= count
    return results


def error_of(output: RequestOutput) -> Any:
    assert output.outputs[0].finish_reason == "error" and output.outputs[0].error.kind == "transfer"
    return output.outputs[0].error.message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_completion_engine_is_killed(transport: str, tmp_path: Path) -> None:
    """What it had taken and not ended, what it had not taken, and what comes later; not what it had ended."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with engine_and_child(EngineType.PROMPT, transport, tmp_path) as (prompt, child):
        prompt.add_request("short", PROMPT_IDS, params)
        prompt.add_request("long", PROMPT_IDS, params.clone(max_tokens=800))
        while prompt.has_unfinished_requests():
            assert {output.outputs[0].finish_reason for output in prompt.step()} <= {"handed_off"}
        assert child.stdout.readline() == "ready ['short']\n"
        prompt.add_request("untaken", PROMPT_IDS, params)
        while prompt.has_unfinished_requests():
            assert {output.outputs[0].finish_reason for output in prompt.step()} <= {"handed_off"}
        kill(child)
        results = results_of(prompt, 2)
        assert set(results) == {"long", "untaken"} and prompt.hand_off_stats.num_failed == 2
        message = error_of(results["long"])
        assert "request long: the completion engine does not go on with it: " in message
        assert "after it took the request's state, before the request ended" in message
        assert "before it took the request's state" in error_of(results["untaken"])
        prompt.add_request("later", PROMPT_IDS, params)
        prompt.add_request("local", PROMPT_IDS, params.clone(max_tokens=1))
        results = results_of(prompt, 2)
        assert "request later: the completion engine" in error_of(results["later"])
        assert results["local"].outputs[0].finish_reason == "length"
        check_idle(prompt)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prompt_engine_is_killed(transport: str, tmp_path: Path) -> None:
    """What it had handed over is completed; what it still had ends with an error; what had ended is over."""
    with make_llm() as llm:
        wanted = generate(llm, [PROMPT_IDS], greedy(12))[0].outputs[0].token_ids
    with engine_and_child(EngineType.COMPLETION, transport, tmp_path) as (completion, child):
        assert child.stdout.readline() == "ready [('local', 'length'), ('sent', 'handed_off')]\n"
        kill(child)
        deadline = time.monotonic() + 60
        while completion.wait_for_requests(0.05):
            assert time.monotonic() < deadline
        assert completion.has_unfinished_requests()
        results = results_of(completion, 2)
        assert set(results) == {"sent", "waiting"}
        assert results["sent"].outputs[0].token_ids == wanted
        message = error_of(results["waiting"])
        assert "request waiting: the prompt engine does not hand it over: " in message
        assert "before it handed the request over" in message
        assert completion.hand_off_stats.num_failed == 1 and not completion.has_unfinished_requests()
        check_idle(completion)
