"""Hand-offs over each transport: order, refusals, limits, and what happens when one side closes."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from deepinfer.kv_transfer.connector import Failure, PeerGoneError, TransferError, TransferTimeoutError
from deepinfer.kv_transfer.sequence_state import SequenceState, SequenceStateError
from tests.kv_transfer.toys import assert_same_state, toy_identity, toy_state
from tests.kv_transfer.transports import Pair, Transport, eventually, reasons


def test_states_arrive_in_order(pair: Pair) -> None:
    prompt, completion = pair
    assert completion.receive() is None and prompt.is_peer_alive() and completion.is_peer_alive()
    for number in range(20):
        prompt.send(toy_state(number))
    for number in range(20):
        assert_same_state(completion.receive(5.0), toy_state(number))
    assert completion.receive(0.02) is None and prompt.take_failures() == []


def test_both_directions(pair: Pair) -> None:
    prompt, completion = pair
    completion.send(toy_state(1))
    prompt.send(toy_state(2))
    assert prompt.receive(5.0).request_id == "request 1"
    assert completion.receive(5.0).request_id == "request 2"


def test_receiving_waits(pair: Pair) -> None:
    prompt, completion = pair
    threading.Timer(0.1, prompt.send, [toy_state()]).start()
    start = time.monotonic()
    assert completion.receive(10.0) is not None
    assert 0.05 < time.monotonic() - start < 5
    start = time.monotonic()
    assert completion.receive(0.1) is None
    assert 0.09 < time.monotonic() - start < 5


def test_arrays_outlive_the_connection(pair: Pair) -> None:
    prompt, completion = pair
    prompt.send(toy_state())
    state = completion.receive(5.0)
    prompt.close()
    completion.close()
    gc.collect()
    assert_same_state(state, toy_state())


def test_other_engines_are_refused_at_once(transport: Transport) -> None:
    with ThreadPoolExecutor(2) as threads:
        sides = [
            threads.submit(transport.prompt, timeout_s=5.0),
            threads.submit(transport.completion, identity=toy_identity(model="b").digest(), timeout_s=5.0),
        ]
        errors = [side.exception(30) for side in sides]
    assert all(isinstance(error, TransferError) for error in errors)
    assert any("another model" in str(error) for error in errors)


def test_nobody_there(transport: Transport) -> None:
    for make in (transport.prompt, transport.completion):
        with pytest.raises(TransferTimeoutError):
            make(timeout_s=0.1)


def test_senders_check_their_own(pair: Pair) -> None:
    with pytest.raises(SequenceStateError, match="another model"):
        pair[0].send(toy_state(identity=bytes(32)))
    with pytest.raises(SequenceStateError, match="blocks do not hold"):
        pair[0].send(toy_state(num_blocks=1))


def test_a_refused_state_comes_back_as_a_failure(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The states around it arrive."""
    prompt, completion = pair
    real = SequenceState.check

    def check(self: SequenceState, identity: bytes, layout: Any) -> None:
        real(self, identity, layout)
        if layout is completion._layout and self.request_id == "request 1":
            raise SequenceStateError("request 1: not here")

    completion._layout = replace(completion._layout)
    monkeypatch.setattr(SequenceState, "check", check)
    for number in range(3):
        prompt.send(toy_state(number))
    assert [completion.receive(5.0).request_id for _ in range(2)] == ["request 0", "request 2"]
    failures = eventually(prompt.take_failures)
    assert failures == [Failure("request 1", "request 1: not here")]
    assert prompt.take_failures() == [] and "refused" in caplog.text


def test_bytes_in_flight_are_bounded(transport: Transport) -> None:
    """One is always allowed; the next waits until it is taken."""
    prompt, completion = transport.pair(max_bytes_in_flight=100)
    prompt.send(toy_state(0))
    with pytest.raises(TransferTimeoutError, match="wait for the other side"):
        prompt.send(toy_state(1), timeout_s=0.05)
    receiver = threading.Timer(0.1, completion.receive, [5.0])
    receiver.start()
    prompt.send(toy_state(2), timeout_s=10.0)
    receiver.join()  # a connector serves one thread at a time
    assert completion.receive(5.0).request_id == "request 2"
    prompt.close()
    completion.close()


def test_the_receiver_closes(pair: Pair) -> None:
    """What it has taken is its own; the rest has failed, and sending fails at once."""
    prompt, completion = pair
    for number in range(3):
        prompt.send(toy_state(number))
    assert completion.receive(5.0).request_id == "request 0"
    completion.close()
    completion.close()
    eventually(lambda: not prompt.is_peer_alive())
    failures = prompt.take_failures()
    assert sorted(reasons(failures)) == [
        ("request 0", "after it took"),
        ("request 1", "before it took"),
        ("request 2", "before it took"),
    ]
    assert prompt.take_failures() == []
    with pytest.raises(PeerGoneError):
        prompt.send(toy_state(3))
    with pytest.raises(PeerGoneError):
        prompt.receive(1.0)


def test_the_sender_closes(transport: Transport, pair: Pair) -> None:
    """Through a socket what was sent still arrives; a store connector takes back what nobody took."""
    prompt, completion = pair
    prompt.send(toy_state(0))
    prompt.close()
    if transport.name == "shared_memory":
        assert completion.receive(5.0).request_id == "request 0"
    else:
        assert [failure.request_id for failure in prompt.take_failures()] == ["request 0"]
    with pytest.raises(PeerGoneError):
        eventually(lambda: completion.receive(1.0))


def test_ended_requests_are_no_failures(pair: Pair) -> None:
    """Of what was taken, what has not ended when the receiver goes."""
    prompt, completion = pair
    for number in range(4):
        prompt.announce([f"request {number}"])
        prompt.send(toy_state(number))
    for _ in range(3):
        completion.receive(5.0)
    completion.end(["request 2", "request 0"])
    eventually(lambda: not prompt.take_failures() and len(prompt._in_flight) == 1)
    completion.close()
    eventually(lambda: not prompt.is_peer_alive())
    assert sorted(reasons(prompt.take_failures())) == [
        ("request 1", "after it took"),
        ("request 3", "before it took"),
    ]
    assert completion.take_failures() == []


def test_announced_requests_fail_with_the_sender(pair: Pair) -> None:
    """Of what was announced, what was neither sent nor withdrawn; a refused record has been sent."""
    prompt, completion = pair
    prompt.announce([f"request {number}" for number in range(5)])
    prompt.send(toy_state(1))
    assert completion.receive(5.0).request_id == "request 1"
    prompt.withdraw(["request 0", "request 4"])
    prompt.close()
    with pytest.raises(PeerGoneError):
        eventually(lambda: completion.receive(1.0))
    expected = [("request 2", "before it handed"), ("request 3", "before it handed")]
    assert sorted(reasons(completion.take_failures())) == expected
    assert completion.take_failures() == []


def test_notes_never_wait(pair: Pair) -> None:
    """More than a socket holds, to a side that reads nothing for now; it learns of all of them."""
    prompt, completion = pair
    names = [f"request {number}" for number in range(3000)]
    for name in names:
        prompt.announce([name])
    prompt.withdraw(names[:2999])
    assert completion.receive(0.0) is None
    eventually(lambda: completion.receive(0.0) is None and not prompt.take_failures() and not prompt._unsaid)
    prompt.close()
    with pytest.raises(PeerGoneError):
        eventually(lambda: completion.receive(1.0))
    assert reasons(completion.take_failures()) == [("request 2999", "before it handed")]
