"""Hand-offs between two processes with memory of their own, one of which may be killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer.kv_transfer.connector import PeerGoneError
from tests.kv_transfer.toys import assert_same_state, toy_state
from tests.kv_transfer.transports import SPAWN, eventually, make_side, reasons


def serve(name: str, place: str, plan: str, results: Any) -> None:
    """The prompt side in a process of its own."""
    prompt = make_side(name, place, "prompt")
    if plan == "send":
        for number in range(5):
            prompt.send(toy_state(number, num_tokens=5000, num_blocks=1250))
        results.put(("pid", os.getpid()))
        eventually(lambda: prompt.take_failures() == [] and not prompt._in_flight)
        prompt.close()
    elif plan == "send and hang":
        prompt.announce([f"request {number}" for number in range(5)])
        for number in range(3):
            prompt.send(toy_state(number))
        prompt.withdraw(["request 4"])
        results.put(("pid", os.getpid()))
        time.sleep(60)


@pytest.mark.parametrize("name", ["shared_memory", "directory"])
def test_two_processes(name: str, tmp_path: Path) -> None:
    """States of 250 KB from another process with memory of its own."""
    results = SPAWN.Queue()
    child = SPAWN.Process(target=serve, args=(name, str(tmp_path), "send", results), daemon=True)
    child.start()
    with make_side(name, str(tmp_path), "completion") as completion:
        for number in range(5):
            expected = toy_state(number, num_tokens=5000, num_blocks=1250)
            assert_same_state(completion.receive(20.0), expected)
        assert results.get(timeout=10)[1] == child.pid != os.getpid()
        with pytest.raises(PeerGoneError):
            eventually(lambda: completion.receive(5.0))
    child.join(10)
    assert child.exitcode == 0


@pytest.mark.parametrize("name", ["shared_memory", "directory"])
def test_a_sender_that_is_killed(name: str, tmp_path: Path) -> None:
    """What it has sent arrives whole, then its death is told; nothing stays behind in shared memory."""
    before = set(os.listdir("/dev/shm"))
    results = SPAWN.Queue()
    child = SPAWN.Process(target=serve, args=(name, str(tmp_path), "send and hang", results), daemon=True)
    child.start()
    with make_side(name, str(tmp_path), "completion") as completion:
        results.get(timeout=30)
        assert_same_state(completion.receive(5.0), toy_state(0))
        os.kill(child.pid, signal.SIGKILL)
        child.join(10)
        start = time.monotonic()
        assert_same_state(completion.receive(5.0), toy_state(1))
        assert_same_state(completion.receive(5.0), toy_state(2))
        with pytest.raises(PeerGoneError):
            completion.receive(10.0)
        assert time.monotonic() - start < (0.5 if name == "shared_memory" else 5)
        assert not completion.is_peer_alive()
        assert reasons(completion.take_failures()) == [("request 3", "before it handed")]
    new = {file for file in set(os.listdir("/dev/shm")) - before if "deepinfer" in file}
    assert not new
    if name == "directory":
        left = [path for path in tmp_path.rglob("*.message") if path.stat().st_size > 2000]
        assert not left  # records; two signs of life are all that stays


def take(name: str, place: str, results: Any) -> None:
    """The completion side in a process of its own: takes two states, ends the first and hangs."""
    completion = make_side(name, place, "completion")
    taken = [completion.receive(20.0).request_id for _ in range(2)]
    completion.end(taken[:1])
    results.put(taken)
    time.sleep(60)


@pytest.mark.parametrize("name", ["shared_memory", "directory"])
def test_a_receiver_that_is_killed(name: str, tmp_path: Path) -> None:
    """The sender learns which requests have failed, and a new receiver can take its place."""
    results = SPAWN.Queue()
    child = SPAWN.Process(target=take, args=(name, str(tmp_path), results), daemon=True)
    child.start()
    prompt = make_side(name, str(tmp_path), "prompt")
    for number in range(3):
        prompt.send(toy_state(number))
    assert results.get(timeout=20) == ["request 0", "request 1"]
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    eventually(lambda: not prompt.is_peer_alive())
    assert sorted(reasons(prompt.take_failures())) == [
        ("request 1", "after it took"),
        ("request 2", "before it took"),
    ]
    with pytest.raises(PeerGoneError):
        prompt.send(toy_state(3))
    prompt.close()
    results = SPAWN.Queue()  # the old one's lock may have died with the child
    again = SPAWN.Process(target=take, args=(name, str(tmp_path), results), daemon=True)
    again.start()
    with make_side(name, str(tmp_path), "prompt") as prompt:
        prompt.send(toy_state(7))
        prompt.send(toy_state(8))
        assert results.get(timeout=20) == ["request 7", "request 8"]
    again.kill()
    again.join(10)
