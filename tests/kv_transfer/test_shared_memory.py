"""The shared-memory transport: what it takes from a peer, what it leaves behind, and its listener."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from deepinfer.kv_transfer import shared_memory
from deepinfer.kv_transfer.connector import PeerGoneError, TransferError, TransferTimeoutError
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from tests.kv_transfer.toys import assert_same_state, toy_layout, toy_state
from tests.kv_transfer.transports import IDENTITY


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
