"""Roles: how requests and engines come to an end, what waits meanwhile, and which engines do not fit."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine_type import EngineType
from deepinfer.entrypoints.llm import LLM
from deepinfer.kv_transfer.connector import TransferError
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.test_roles import TEXT
from tests.support.engines import prompt_of
from tests.support.paths import V41_TINY
from tests.support.roles import check_idle, connect, engine_pair, make_engine


def test_several_completions_come_to_an_end() -> None:
    """Aborted and dropped on either side while some of them are here and some there."""
    params = SamplingParams(temperature=1.0, seed=1, n=6, max_tokens=40, ignore_eos=True)
    with engine_pair(max_num_seqs=2) as (prompt, completion):
        for name in ("aborted here", "dropped here", "aborted there", "dropped there"):
            prompt.add_request(name, list(prompt_of(50, len(name))), params)
            results: dict[str, Any] = {}
            while not prompt._hand_off._begun:
                prompt.step()
                completion.step()
            side = prompt if name.endswith("here") else completion
            if name.startswith("aborted"):
                side.abort_request(name)
            else:
                side.drop_request([name])
            deadline = time.monotonic() + 60
            while any(engine.has_unfinished_requests() for engine in (prompt, completion)):
                assert time.monotonic() < deadline, name
                if prompt.has_unfinished_requests():
                    prompt.step()
                results |= {output.request_id: output for output in completion.step()}
                if name == "dropped there" and not prompt.has_unfinished_requests():
                    completion.abort_request(name)  # what came later is a request once more
            if name != "dropped there":
                reasons = {sample.finish_reason for sample in results[name].outputs}
                assert len(results[name].outputs) == 6 and "abort" in reasons


def test_streaming_and_aborts() -> None:
    """A streamed request goes on streaming; aborted ones end on the side where they are."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with engine_pair() as (prompt, completion):
        prompt.add_request("streamed", TEXT, params, stream=True)
        prompt.add_request("early", TEXT, params)
        prompt.add_request("late", TEXT + " and a boy", params)
        assert prompt.abort_request("early") == 1
        lengths, reasons = [], {}
        while len(reasons) < 3:
            for engine in (prompt, completion):
                for output in engine.step():
                    sample = output.outputs[0]
                    if output.request_id == "streamed":
                        lengths.append(len(sample.token_ids))
                    if output.finished and sample.finish_reason != "handed_off":
                        reasons[output.request_id] = sample.finish_reason
            completion.abort_request("late")
        assert reasons == {"streamed": "length", "early": "abort", "late": "abort"}
        assert lengths == sorted(lengths) and len(set(lengths)) > 5


def test_waiting_for_the_other_side_to_take() -> None:
    """Until it takes something, the prompt engine's pools are the limit of what waits."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompt = make_engine(EngineType.PROMPT, max_num_seqs=4, max_model_len=512, num_blocks=5)
    completion = make_engine(EngineType.COMPLETION, max_num_seqs=4)
    connect(prompt, completion, max_bytes_in_flight=1)
    for row in range(9):
        prompt.add_request(str(row), list(prompt_of(50, row)), params)
    handed_off = []
    for _ in range(12):
        handed_off += prompt.step()
        prompt.core.check_integrity()
    assert len(handed_off) == 1 and prompt.core.num_waiting > 0
    results = []
    while len(results) < 9:
        prompt.step()
        results += completion.step()
    for engine in (prompt, completion):
        check_idle(engine)
        engine.close()


def test_the_completion_engine_goes() -> None:
    """What it has not taken ends with an error, so does what comes later; the prompt engine stays usable."""
    params = SamplingParams(temperature=0, max_tokens=5)
    prompt, completion = make_engine(EngineType.PROMPT), make_engine(EngineType.COMPLETION)
    connect(prompt, completion)
    prompt.add_request("sent", TEXT, params)
    while prompt.has_unfinished_requests():
        (output,) = prompt.step() or [None]
    assert output.outputs[0].finish_reason == "handed_off"
    completion.close()
    prompt.add_request("later", TEXT, params)
    prompt.add_request("short", TEXT, params.clone(max_tokens=1))
    results = {}
    while prompt.has_unfinished_requests() or "sent" not in results:
        results |= {output.request_id: output.outputs[0] for output in prompt.step()}
    for name in ("sent", "later"):
        assert results[name].finish_reason == "error" and results[name].error.kind == "transfer"
        assert f"request {name}: the completion engine" in results[name].error.message
    assert results["short"].finish_reason == "length"
    check_idle(prompt)
    prompt.close()


def test_the_prompt_engine_goes() -> None:
    """What it had handed off is completed."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt, completion = make_engine(EngineType.PROMPT), make_engine(EngineType.COMPLETION)
    connect(prompt, completion)
    for name in ("a", "b"):
        prompt.add_request(name, TEXT + name, params)
    while prompt.has_unfinished_requests():
        prompt.step()
    assert completion.wait_for_requests(5.0)
    prompt.close()
    results = []
    while len(results) < 2:
        results += completion.step()
    assert {len(output.outputs[0].token_ids) for output in results} == {12}
    assert not completion.wait_for_requests(0.0)
    check_idle(completion)
    completion.close()


def test_what_roles_refuse() -> None:
    with pytest.raises(ValueError, match="LLM runs whole requests"):
        LLM(str(V41_TINY), engine_type=EngineType.PROMPT)
    prompt, completion = make_engine(EngineType.PROMPT), make_engine(EngineType.COMPLETION)
    with pytest.raises(RuntimeError, match="connect the PROMPT engine"):
        prompt.add_request("a", TEXT)
    connect(prompt, completion)
    with pytest.raises(RuntimeError, match="takes its requests from a PROMPT engine"):
        completion.add_request("a", TEXT)
    for engine in (prompt, completion):
        with pytest.raises(ValueError, match="connect"):
            engine.connect(lambda identity, layout: None)
        engine.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"num_draft_tokens": 0}, {}),
        ({}, {"replay_mode": "compact", "replay_keep_tokens": 140}),
        (
            {"replay_mode": "compact", "replay_keep_tokens": 140},
            {"replay_mode": "compact", "replay_keep_tokens": 141},
        ),
    ],
)
def test_engines_that_do_not_fit(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Another cache layout, and other windows under bounded replay, are refused when the two meet."""
    prompt = make_engine(EngineType.PROMPT, Settings(**one))
    completion = make_engine(EngineType.COMPLETION, Settings(**other))
    failures = []

    def accept() -> None:
        try:
            completion.connect(listener.accept)
        except TransferError as error:
            failures.append(error)

    with SharedMemoryListener(tmp_path / "socket") as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(TransferError):
            prompt.connect(functools.partial(SharedMemoryConnector.connect, tmp_path / "socket"))
        thread.join()
    assert failures
    prompt.close()
    completion.close()
