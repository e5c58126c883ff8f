"""SharedMemoryConnector: hand-off between two processes of one host, in shared memory.

A record lies in anonymous shared memory (`memfd`) of its own, whose descriptor travels through a Unix socket
beside a short message. The socket also brings answers and tells at once when the other process has died. The
memory has no name and lasts as long as somebody holds it, so nothing is left behind, however a process ends.

    sender    state {id, bytes} + descriptor  --->   receiver maps it, checks it, answers
              <---  taken {id}  or  refused {id, reason}
    both      note {kind, request_ids}        --->   what is announced, withdrawn, ended

The sender seals what it sent: its size and contents cannot change any more while the receiver reads it.
Answers and notes wait in a queue while the socket is full, so a side that reads nothing holds up nobody.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from deepinfer.kv_transfer.connector import (
    Failure,
    KVConnector,
    Ledger,
    PeerGoneError,
    TransferError,
    TransferTimeoutError,
)
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.sequence_state import SequenceState, SequenceStateError, num_bytes
from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

PROTOCOL = 2
_MAX_MESSAGE = 1 << 16
_LINGER_S = 1.0  # for which a side that closes waits for room for its last words
_MAX_PATH = 107  # bytes of a Unix socket's address
_ADD_SEALS, _GET_SEALS = 1033, 1034  # fcntl, not named before Python 3.13 everywhere
_SEALS = 1 | 2 | 4 | 8  # no more seals, no shrinking, no growing, no writing


class SharedMemoryConnector(KVConnector):
    """One end of a connection; made by `connect` or `SharedMemoryListener.accept`.

    Args:
        connection: a connected socket, which it owns from now on.
        identity: `Identity.digest` of this engine; both sides need the same.
        layout: of its caches.
        max_bytes_in_flight: sent and not taken; one record is always allowed.
        timeout_s: of the greeting.

    Raises:
        TransferError: the other side does not answer, or is an engine that this one cannot work with.
    """

    def __init__(
        self,
        connection: socket.socket,
        identity: bytes,
        layout: EntryLayout,
        *,
        max_bytes_in_flight: int = 1 << 30,
        timeout_s: float = 30.0,
    ) -> None:
        self._socket = connection
        self._identity = identity
        self._layout = layout
        self._max_bytes_in_flight = max_bytes_in_flight
        self._next_id = 0
        self._in_flight: dict[int, tuple[str, int]] = {}  # id -> (request, bytes)
        self._inbox: deque[tuple[int, SequenceState]] = deque()
        self._failures: list[Failure] = []
        self._ledger = Ledger()
        self._unsaid: deque[bytes] = deque()
        self._gone_because = ""
        self._is_gone = False
        self._is_greeted = False
        connection.setblocking(False)
        try:
            self._greet(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(
        cls,
        path: str | os.PathLike[str],
        identity: bytes,
        layout: EntryLayout,
        *,
        timeout_s: float = 30.0,
        **options: Any,
    ) -> SharedMemoryConnector:
        """Connect to a listener, waiting for it to appear. Raises TransferError."""
        deadline = time.monotonic() + timeout_s
        while True:
            connection = _new_socket()
            try:
                connection.connect(_address(path))
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise TransferTimeoutError(f"nobody listens at {path}") from error
                time.sleep(0.01)
            except OSError as error:
                connection.close()
                raise TransferError(f"cannot connect to {path}: {error}") from error
        return cls(connection, identity, layout, timeout_s=timeout_s, **options)

    def fileno(self) -> int:
        """For `select`: readable when there is something to receive, or the other side is gone."""
        return self._socket.fileno()

    def send(self, state: SequenceState, timeout_s: float = 30.0) -> None:
        state.check(self._identity, self._layout)
        deadline = time.monotonic() + timeout_s
        parts = state.encode()
        size = num_bytes(parts)
        self._pump()
        while self._in_flight and self._bytes_in_flight() + size > self._max_bytes_in_flight:
            self._check_peer()
            if not self._pump(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    f"request {state.request_id}: {self._bytes_in_flight()} bytes wait for the other side, "
                    f"{size} more exceed {self._max_bytes_in_flight}"
                )
        self._check_peer()
        memory = _fill_memory(parts, size)
        message = {"type": "state", "id": self._next_id, "bytes": size, "request_id": state.request_id}
        try:
            self._post(message, deadline, memory)
        finally:
            os.close(memory)
        self._in_flight[self._next_id] = state.request_id, size
        self._next_id += 1

    def receive(self, timeout_s: float = 0.0) -> SequenceState | None:
        deadline = time.monotonic() + timeout_s
        self._pump()
        while not self._inbox:
            self._check_peer()
            rest = deadline - time.monotonic()
            if not self._pump(max(rest, 0.0)) and rest <= 0:
                return None
        number, state = self._inbox.popleft()
        self._say({"type": "taken", "id": number})
        return state

    def take_failures(self) -> list[Failure]:
        self._pump()
        if self._is_gone and not self._inbox:
            self._failures += self._ledger.fail(self._gone_because)
        failures, self._failures = self._failures, []
        return failures

    def is_peer_alive(self) -> bool:
        self._pump()
        return not self._is_gone

    def close(self) -> None:
        deadline = time.monotonic() + _LINGER_S
        while self._unsaid and not self._is_gone and (rest := deadline - time.monotonic()) > 0:
            _wait(self._socket, select.POLLOUT, rest)
            self._flush()
        self._note_gone("this side closed the connection")
        self._ledger.clear()  # it goes on over there
        self._socket.close()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._socket.close()

    # ---- messages

    def _greet(self, deadline: float) -> None:
        hello = {"type": "hello", "protocol": PROTOCOL, "identity": self._identity.hex()}
        self._post(hello, deadline)
        while not self._is_greeted:
            self._check_peer()
            if not self._pump(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise TransferTimeoutError("the other side does not answer")

    def _post(self, message: dict[str, Any], deadline: float, memory: int | None = None) -> None:
        """Send a message, reading others while there is no room for it."""
        data = json.dumps(message).encode()
        if len(data) > _MAX_MESSAGE:
            raise TransferError(f"a message of {len(data)} bytes: the request's id is too long")
        while True:
            try:
                self._send_unsaid()
                if memory is None:
                    self._socket.send(data, socket.MSG_NOSIGNAL)
                else:
                    socket.send_fds(self._socket, [data], [memory], socket.MSG_NOSIGNAL)
                return
            except BlockingIOError as error:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise TransferTimeoutError("the other side reads nothing") from error
                _wait(self._socket, select.POLLIN | select.POLLOUT, rest)
                self._pump()
                self._check_peer()
            except OSError as error:
                self._pump()  # what it sent before it went
                self._note_gone(f"the other side went away: {error}")
                raise PeerGoneError(f"the other side went away: {error}") from error

    def _note(self, kind: str, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._say({"type": "note", "kind": kind, "request_ids": [request_id]}, flush=False)
        self._flush()

    def _say(self, message: dict[str, Any], flush: bool = True) -> None:
        """Send a message as soon as there is room; who is gone needs none."""
        data = json.dumps(message).encode()
        if self._is_gone or len(data) > _MAX_MESSAGE:  # `send` refuses a request with such an id
            return
        self._unsaid.append(data)
        if flush:
            self._flush()

    def _flush(self) -> None:
        try:
            self._send_unsaid()
        except BlockingIOError:
            pass
        except OSError as error:
            self._drain()
            self._note_gone(f"the other side went away: {error}")

    def _send_unsaid(self) -> None:
        while self._unsaid:
            self._socket.send(self._unsaid[0], socket.MSG_NOSIGNAL)
            self._unsaid.popleft()

    def _pump(self, timeout_s: float = 0.0) -> bool:
        """Take in what has arrived, waiting for the first message; whether there was any."""
        if self._is_gone or self._socket.fileno() < 0:
            return False
        self._flush()
        if timeout_s > 0:
            _wait(self._socket, select.POLLIN, timeout_s)
        return self._drain() > 0

    def _drain(self) -> int:
        """Take in what has arrived; how many messages."""
        count, was_reset = 0, False
        while not self._is_gone:
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE, 4)
            except BlockingIOError:
                break
            except ConnectionResetError as error:  # it left something unread; what it sent is still here
                if was_reset:
                    self._note_gone(f"the other side went away: {error}")
                was_reset = True
                continue
            except OSError as error:
                self._note_gone(f"the other side went away: {error}")
                break
            try:
                if not data:
                    self._note_gone("the other side went away")
                else:
                    self._take_in(data, files)
            finally:
                for file in files:
                    os.close(file)
            count += 1
        return count

    def _take_in(self, data: bytes, files: list[int]) -> None:
        try:
            message = json.loads(data)
            kind = message["type"]
            if kind == "hello":
                self._check_hello(message)
            elif kind == "state":
                self._take_state(int(message["id"]), str(message["request_id"]), int(message["bytes"]), files)
            elif kind == "taken":
                request_id, _ = self._in_flight.pop(int(message["id"]), (None, 0))
                if request_id is not None:
                    self._ledger.took(request_id)
            elif kind == "note":
                self._ledger.note(message["kind"], message["request_ids"])
            elif kind == "refused":
                request_id, _ = self._in_flight.pop(int(message["id"]), (None, 0))
                if request_id is not None:
                    self._failures.append(Failure(request_id, str(message["reason"])))
            else:
                raise ValueError(f"unknown message {kind!r}")
        except (ValueError, KeyError, TypeError) as error:
            self._note_gone(f"the other side sends what this one does not understand: {error!r}")

    def _check_hello(self, message: dict[str, Any]) -> None:
        if message["protocol"] != PROTOCOL:
            self._note_gone(f"the other side speaks protocol {message['protocol']}, this one {PROTOCOL}")
            raise TransferError(f"the other side speaks protocol {message['protocol']}, not {PROTOCOL}")
        theirs, ours = message["identity"], self._identity.hex()
        if theirs != ours:
            self._note_gone("the other side has another model, arithmetic, bounded replay or cache layout")
            raise TransferError(
                "the other side has another model, arithmetic, bounded replay or cache layout "
                f"({theirs[:12]}, this one {ours[:12]})"
            )
        self._is_greeted = True

    def _take_state(self, number: int, request_id: str, size: int, files: list[int]) -> None:
        self._ledger.arrived(request_id)
        try:
            if len(files) != 1 or fcntl.fcntl(files[0], _GET_SEALS) & _SEALS != _SEALS:
                raise SequenceStateError(f"request {request_id}: its memory is missing or not sealed")
            if os.fstat(files[0]).st_size != size or size < 1:
                raise SequenceStateError(f"request {request_id}: its memory has another size than was said")
            state = SequenceState.decode(memoryview(mmap.mmap(files[0], size, prot=mmap.PROT_READ)))
            state.check(self._identity, self._layout)
        except (SequenceStateError, OSError) as error:
            logger.warning("a sequence that was handed over is refused: %s", error)
            self._say({"type": "refused", "id": number, "reason": str(error)[:1000]})
            return
        self._inbox.append((number, state))

    def _check_peer(self) -> None:
        if self._is_gone:
            raise PeerGoneError("the other side of the connection is gone")

    def _note_gone(self, reason: str) -> None:
        """What was sent and not taken has failed."""
        self._gone_because = self._gone_because or reason
        self._is_gone = True
        self._unsaid.clear()
        for request_id, _ in self._in_flight.values():
            self._failures.append(Failure(request_id, f"{reason} before it took the request's state"))
        self._in_flight.clear()

    def _bytes_in_flight(self) -> int:
        return sum(size for _, size in self._in_flight.values())


class SharedMemoryListener:
    """Waits for connections at a path in the file system, which only this user can reach.

    Args:
        path: of the socket; what a dead listener has left there is taken over.

    Raises:
        TransferError: somebody listens there already, or the path cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._socket = _new_socket()
        try:
            self._bind()
            os.chmod(self._path, 0o600)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise TransferError(f"cannot listen at {path}: {error}") from error
        except TransferError:
            self._socket.close()
            raise

    def accept(
        self, identity: bytes, layout: EntryLayout, *, timeout_s: float = 30.0, **options: Any
    ) -> SharedMemoryConnector:
        """The next connection. Raises TransferTimeoutError, or TransferError when it does not fit."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError as error:
            raise TransferTimeoutError(f"nobody connected to {self._path}") from error
        return SharedMemoryConnector(connection, identity, layout, timeout_s=timeout_s, **options)

    def close(self) -> None:
        """Stop listening; connections stay."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def __enter__(self) -> SharedMemoryListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self) -> None:
        address = _address(self._path)
        try:
            self._socket.bind(address)
            return
        except OSError:
            if not os.path.exists(self._path):
                raise
        probe = _new_socket()
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(self._path)
            self._socket.bind(address)
        else:
            raise TransferError(f"another process listens at {self._path}")
        finally:
            probe.close()


def _wait(connection: socket.socket, events: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(connection, events)
    poll.poll(1e3 * timeout_s)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(path: str | os.PathLike[str]) -> str:
    address = os.fspath(path)
    if len(os.fsencode(address)) > _MAX_PATH:
        raise TransferError(
            f"{address} has more than {_MAX_PATH} bytes; choose a shorter path for the socket"
        )
    return address


def _fill_memory(parts: list[memoryview], size: int) -> int:
    """A descriptor of sealed memory with these bytes."""
    memory = os.memfd_create("deepinfer-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, size)
        for part in parts:
            rest = part
            while rest.nbytes:
                rest = rest[os.write(memory, rest) :]
        fcntl.fcntl(memory, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory
