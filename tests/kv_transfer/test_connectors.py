"""Hand-offs over both transports: order, refusals, limits, and what happens when one side goes away."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.kv_transfer import shared_memory
from deepinfer.kv_transfer.connector import (
    Failure,
    KVConnector,
    PeerGoneError,
    TransferError,
    TransferTimeoutError,
)
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.sequence_state import SequenceState, SequenceStateError
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from deepinfer.kv_transfer.store_connector import StoreConnector
from tests.kv_transfer.toys import assert_same_state, toy_identity, toy_layout, toy_state

SPAWN = multiprocessing.get_context("spawn")
IDENTITY = toy_identity().digest()
STORE_TIMES = {"beat_s": 0.05, "peer_timeout_s": 1.0}


@dataclass(frozen=True)
class Transport:
    """How to make the sides of a connection.

    Attributes:
        name: "memory", "directory" (both through a store) or "shared_memory".
        prompt, completion: make a side; they wait for each other.
    """

    name: str
    prompt: Callable[..., KVConnector]
    completion: Callable[..., KVConnector]

    def pair(self, **options: Any) -> tuple[KVConnector, KVConnector]:
        with ThreadPoolExecutor(2) as threads:
            prompt = threads.submit(self.prompt, **options)
            completion = threads.submit(self.completion, **options)
            return prompt.result(30), completion.result(30)


def make_side(name: str, place: str, side: str, **options: Any) -> KVConnector:
    """A side of a connection at a place in the file system; also what child processes call."""
    options.setdefault("identity", IDENTITY)
    options.setdefault("layout", toy_layout())
    if name == "directory":
        return StoreConnector(DirectoryStore(place), "channel", side, **STORE_TIMES, **options)
    if side == "prompt":
        return SharedMemoryConnector.connect(os.path.join(place, "s"), **options)
    with SharedMemoryListener(os.path.join(place, "s")) as listener:
        return listener.accept(**options)


@pytest.fixture(params=["shared_memory", "directory", "memory"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    name = request.param
    if name == "memory":
        store = MemoryStore(1 << 26)

        def make(side: str, **options: Any) -> KVConnector:
            fixed = {"identity": IDENTITY, "layout": toy_layout(), **STORE_TIMES}
            return StoreConnector(store, "channel", side, **{**fixed, **options})
    else:

        def make(side: str, **options: Any) -> KVConnector:
            return make_side(name, str(tmp_path), side, **options)

    return Transport(
        name,
        prompt=lambda **options: make("prompt", **options),
        completion=lambda **options: make("completion", **options),
    )


@pytest.fixture
def pair(transport: Transport) -> Iterator[tuple[KVConnector, KVConnector]]:
    prompt, completion = transport.pair()
    yield prompt, completion
    prompt.close()
    completion.close()


Pair = tuple[KVConnector, KVConnector]


def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
    return value


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


def reasons(failures: list[Failure]) -> list[tuple[str, str]]:
    """What failed, and which case it was."""
    cases = ("before it took", "after it took", "before it handed")
    return [(f.request_id, next(case for case in cases if case in f.reason)) for f in failures]


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


# ---- two processes


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


# ---- shared memory


def sockets(tmp_path: Path) -> tuple[SharedMemoryConnector, socket.socket]:
    """A connector, and the bare socket at its other end, which has said hello."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hello = b'{"type": "hello", "protocol": %d, "identity": "%s"}' % (
        shared_memory.PROTOCOL,
        IDENTITY.hex().encode(),
    )
    theirs.send(hello)
    return SharedMemoryConnector(ours, IDENTITY, toy_layout()), theirs


def memory_of(data: bytes, sealed: bool = True) -> int:
    if sealed:
        return shared_memory._fill_memory([memoryview(data)], len(data))
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(memory, data)
    return memory


def test_memory_has_to_be_sealed_and_whole(tmp_path: Path) -> None:
    """Else its sender could change or shrink it while it is read."""
    connector, theirs = sockets(tmp_path)
    data = b"".join(toy_state().encode())
    message = b'{"type": "state", "id": 3, "bytes": %d, "request_id": "x"}'
    good, open_one = memory_of(data), memory_of(data, sealed=False)
    bad = memory_of(data[:-1])
    theirs.recv(1 << 16)  # its hello
    for size, files in (
        (len(data), [open_one]),
        (len(data), []),
        (len(data), [good, good]),
        (len(data) + 1, [good]),
        (len(data) - 1, [bad]),
    ):
        socket.send_fds(theirs, [message % size], files)
        assert connector.receive() is None
        assert b'"refused"' in theirs.recv(1 << 16)
    with pytest.raises(OSError, match="not permitted"):
        os.write(good, b"x")
    socket.send_fds(theirs, [message % len(data)], [good])
    assert_same_state(connector.receive(5.0), toy_state())
    assert b'"taken"' in theirs.recv(1 << 16)
    for file in (good, open_one, bad):
        os.close(file)
    connector.close()
    theirs.close()


@pytest.mark.parametrize(
    "data", [b"nonsense", b"[]", b'{"type": "dance"}', b'{"type": "taken"}', b"\xff\xff"]
)
def test_a_peer_that_talks_nonsense_is_left(tmp_path: Path, data: bytes) -> None:
    connector, theirs = sockets(tmp_path)
    connector.send(toy_state())
    theirs.send(data)
    with pytest.raises(PeerGoneError):
        connector.receive(5.0)
    assert [failure.request_id for failure in connector.take_failures()] == ["request 0"]
    connector.close()
    theirs.close()


def test_no_descriptors_are_left(tmp_path: Path) -> None:
    connector, theirs = sockets(tmp_path)
    other = SharedMemoryConnector.__new__(SharedMemoryConnector)
    del other  # an unfinished one goes quietly
    theirs.recv(1 << 16)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        connector.send(toy_state(number))
        _, files, _, _ = socket.recv_fds(theirs, 1 << 16, 4)
        assert len(files) == 1
        os.close(files[0])
    assert len(os.listdir("/proc/self/fd")) == before
    connector.close()
    theirs.close()


def test_a_peer_that_reads_nothing(tmp_path: Path) -> None:
    """The socket fills up; sending gives up in time."""
    connector, theirs = sockets(tmp_path)

    def send_many() -> None:
        for number in range(10_000):
            connector.send(toy_state(number), timeout_s=0.1)

    with pytest.raises(TransferTimeoutError, match="reads nothing"):
        send_many()
    connector.close()
    theirs.close()


def test_listeners(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with SharedMemoryListener(path), pytest.raises(TransferError, match="another process listens"):
        SharedMemoryListener(path)
    assert not path.exists()
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(path))
    dead.close()
    with SharedMemoryListener(path) as listener, pytest.raises(TransferTimeoutError):
        listener.accept(IDENTITY, toy_layout(), timeout_s=0.05)
    with pytest.raises(TransferError, match="shorter path"):
        SharedMemoryListener(tmp_path / ("x" * 120))
    with pytest.raises(TransferError, match="cannot listen"):
        SharedMemoryListener(tmp_path / "nowhere" / "s")


# ---- through a store


def test_a_damaged_record_fails_alone(tmp_path: Path) -> None:
    """One record in the directory is changed on its way."""
    with ThreadPoolExecutor(2) as threads:
        sides = [
            threads.submit(make_side, "directory", str(tmp_path), side) for side in ("prompt", "completion")
        ]
        prompt, completion = (side.result(30) for side in sides)
    prompt.send(toy_state(0))
    (path,) = [path for path in tmp_path.rglob("*.message") if path.stat().st_size > 2000]
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)
    prompt.send(toy_state(1))
    assert completion.receive(5.0).request_id == "request 1"
    failures = eventually(prompt.take_failures)
    assert [failure.request_id for failure in failures] == ["request 0"] and "damaged" in failures[0].reason
    prompt.close()
    completion.close()


def test_a_full_store(tmp_path: Path) -> None:
    store = MemoryStore(1500)
    with ThreadPoolExecutor(2) as threads:
        sides = [
            threads.submit(StoreConnector, store, "c", side, IDENTITY, toy_layout(), **STORE_TIMES)
            for side in ("prompt", "completion")
        ]
        prompt, completion = (side.result(30) for side in sides)
    with pytest.raises(TransferError, match="does not take"):
        prompt.send(toy_state())
    prompt.close()
    completion.close()


def test_sides_have_names() -> None:
    with pytest.raises(ValueError, match="prompt, completion"):
        StoreConnector(MemoryStore(1000), "c", "left", IDENTITY, toy_layout())
