"""StoreConnector: hand-off through a KVStore, between threads, processes or hosts that share one.

Each side keeps an entry that says it is alive, and renews it on a thread of its own. Records are entries with
running numbers, and so are the answers to them:

    hello, side                     {protocol, identity, session, beat, is_closed}
    state, side, session, number    a record; whoever takes it removes it
    answer, side, session, number   {taken} or {reason}; the sender of the record removes it
    note, side, session, number     requests by kind of note; whoever reads it removes it

A side counts as gone when it says so, starts a new session, or renews nothing for `peer_timeout_s` on the
observer's own clock. The store should have no limit, or one that records in flight never reach.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from deepinfer.kv_transfer.connector import (
    Failure,
    KVConnector,
    Ledger,
    PeerGoneError,
    TransferError,
    TransferTimeoutError,
)
from deepinfer.kv_transfer.entry import MESSAGE, DamagedEntryError, EntryHeader, EntryKey, EntryLayout
from deepinfer.kv_transfer.sequence_state import SequenceState, SequenceStateError, num_bytes
from deepinfer.kv_transfer.store import Buffer, KVStore
from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

PROTOCOL = 2
SIDES = ("prompt", "completion")


class StoreConnector(KVConnector):
    """One side of a channel.

    Args:
        store: where entries go; stays the caller's.
        channel: names the connection; both sides give the same.
        side: "prompt" or "completion".
        identity: `Identity.digest` of this engine; both sides need the same.
        layout: of its caches.
        max_bytes_in_flight: sent and not taken; one record is always allowed.
        beat_s: between two signs of life.
        peer_timeout_s: without one the other side counts as gone.
        poll_s: between two looks at the store while waiting.
        timeout_s: to wait for the other side at the start.

    Raises:
        TransferError: the other side does not come, or is an engine that this one cannot work with.
    """

    def __init__(
        self,
        store: KVStore,
        channel: str,
        side: str,
        identity: bytes,
        layout: EntryLayout,
        *,
        max_bytes_in_flight: int = 1 << 30,
        beat_s: float = 0.5,
        peer_timeout_s: float = 10.0,
        poll_s: float = 0.005,
        timeout_s: float = 30.0,
    ) -> None:
        if side not in SIDES:
            raise ValueError(f"side is {side!r}; choose one of {', '.join(SIDES)}")
        self._store = store
        self._channel = channel
        self._side, self._other = side, SIDES[1 - SIDES.index(side)]
        self._identity = identity
        self._layout = layout
        self._max_bytes_in_flight = max_bytes_in_flight
        self._poll_s = poll_s
        self._peer_timeout_s = peer_timeout_s
        self._session = secrets.token_hex(8)
        self._peer_session = ""
        self._peer_beat: Any = None
        self._peer_seen_at = 0.0
        self._peer_looked_at = float("-inf")
        self._num_sent = 0
        self._num_received = 0
        self._in_flight: dict[int, tuple[str, int]] = {}  # number -> (request, bytes)
        self._failures: list[Failure] = []
        self._ledger = Ledger()
        self._unsaid: list[tuple[str, list[str]]] = []  # notes that the store would not take
        self._num_notes = 0
        self._num_notes_read = 0
        self._gone_because = ""
        self._beat_s = beat_s
        self._num_beats = 0
        self._is_closed = False
        self._stop = threading.Event()
        self._beat()
        self._beater = threading.Thread(target=self._keep_beating, name="kv-beat", daemon=True)
        self._beater.start()
        try:
            self._wait_for_peer(timeout_s)
        except BaseException:
            self.close()
            raise

    def send(self, state: SequenceState, timeout_s: float = 30.0) -> None:
        state.check(self._identity, self._layout)
        deadline = time.monotonic() + timeout_s
        parts = state.encode()
        size = num_bytes(parts)
        self._read_answers()
        while self._in_flight and self._bytes_in_flight() + size > self._max_bytes_in_flight:
            self._check_peer()
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    f"request {state.request_id}: {self._bytes_in_flight()} bytes wait for the other side, "
                    f"{size} more exceed {self._max_bytes_in_flight}"
                )
            time.sleep(self._poll_s)
            self._read_answers()
        self._check_peer()
        number = self._num_sent
        names = [f"part{place}" for place in range(len(parts))]
        if not self._put(("state", self._side, self._session, number), dict(zip(names, parts))):
            raise TransferError(f"request {state.request_id}: the store does not take its state")
        self._in_flight[number] = state.request_id, size
        self._num_sent += 1

    def receive(self, timeout_s: float = 0.0) -> SequenceState | None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._write_notes()
            is_gone = not self._look_at_peer()
            state, is_there = self._take_next()
            if state is not None:
                return state
            if is_there:
                continue
            if is_gone:
                self._check_peer()
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(self._poll_s, max(0.0, deadline - time.monotonic())))

    def take_failures(self) -> list[Failure]:
        self._write_notes()
        self._read_answers()
        self._read_notes()
        if not self._look_at_peer():
            self._fail_in_flight()
        failures, self._failures = self._failures, []
        return failures

    def is_peer_alive(self) -> bool:
        return self._look_at_peer()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        self._beater.join()
        self._write_notes()
        self._gone_because = self._gone_because or "this side closed the connection"
        self._fail_in_flight()
        self._beat()

    # ---- records

    def _take_next(self) -> tuple[SequenceState | None, bool]:
        """The next record, and whether there was one; a bad one is refused."""
        address = ("state", self._other, self._peer_session, self._num_received)
        if not self._peer_session or not self._store.contains(self._key(address)):
            return None, False
        answer: dict[str, Any] = {"taken": True}
        state, request_id = None, None
        try:
            data = self._get(address)
            if data is None:
                raise SequenceStateError("the store has lost or damaged the state of a sequence")
            state = SequenceState.decode(data)
            request_id = state.request_id
            state.check(self._identity, self._layout)
        except SequenceStateError as error:
            logger.warning("a sequence that was handed over is refused: %s", error)
            answer, state = {"reason": str(error)[:1000]}, None
        self._store.remove(self._key(address))
        self._put_json(("answer", self._side, self._session, self._num_received), answer)
        self._num_received += 1
        if request_id is not None:  # of one that is lost the sender will tell
            self._ledger.arrived(request_id)
        return state, True

    def _read_answers(self) -> None:
        for number in list(self._in_flight):
            address = ("answer", self._other, self._peer_session, number)
            if not self._store.contains(self._key(address)):
                break  # they come in order
            answer = self._get_json(address)
            self._store.remove(self._key(address))
            request_id, _ = self._in_flight.pop(number)
            if answer is not None and "taken" not in answer:
                self._failures.append(Failure(request_id, str(answer.get("reason"))))
            else:
                self._ledger.took(request_id)

    def _note(self, kind: str, request_ids: Sequence[str]) -> None:
        if request_ids and not self._gone_because:
            self._unsaid.append((kind, list(request_ids)))
            self._write_notes()

    def _write_notes(self) -> None:
        address = ("note", self._side, self._session, self._num_notes)
        if self._unsaid and not self._gone_because and self._put_json(address, {"notes": self._unsaid}):
            self._num_notes += 1
            self._unsaid = []

    def _read_notes(self) -> None:
        while self._peer_session:
            address = ("note", self._other, self._peer_session, self._num_notes_read)
            if not self._store.contains(self._key(address)):
                return
            value = self._get_json(address)
            self._store.remove(self._key(address))
            self._num_notes_read += 1
            for kind, request_ids in value["notes"] if value is not None else ():
                self._ledger.note(kind, request_ids)

    def _fail_in_flight(self) -> None:
        """The other side is gone, or this one goes."""
        self._read_answers()
        self._read_notes()
        if not self._is_closed:  # else what rests with the other side goes on, and it reads the last words
            self._remove_last("note", self._num_notes)
            self._remove_last("answer", self._num_received)
            next_one = ("state", self._other, self._peer_session, self._num_received)
            if not self._store.contains(self._key(next_one)):
                self._failures += self._ledger.fail(self._gone_because)
        for number, (request_id, _) in self._in_flight.items():
            self._store.remove(self._key(("state", self._side, self._session, number)))
            reason = f"{self._gone_because} before it took the request's state"
            self._failures.append(Failure(request_id, reason))
        self._in_flight.clear()

    def _bytes_in_flight(self) -> int:
        return sum(size for _, size in self._in_flight.values())

    # ---- the other side

    def _wait_for_peer(self, timeout_s: float) -> None:
        """Wait for a hello whose beat changes: one that stands still was left by the dead."""
        deadline = time.monotonic() + timeout_s
        first = self._get_json(("hello", self._other))
        while True:
            hello = self._get_json(("hello", self._other))
            if hello is not None and hello != first:
                self._check_hello(hello)
                if not hello.get("is_closed"):
                    break
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(f"channel {self._channel}: the {self._other} side does not come")
            time.sleep(self._poll_s)
        self._peer_session, self._peer_beat = str(hello.get("session")), hello.get("beat")
        self._peer_seen_at = time.monotonic()

    def _check_hello(self, hello: dict[str, Any]) -> None:
        if hello.get("protocol") != PROTOCOL:
            raise TransferError(f"the other side speaks protocol {hello.get('protocol')}, not {PROTOCOL}")
        theirs, ours = str(hello.get("identity")), self._identity.hex()
        if theirs != ours:
            raise TransferError(
                "the other side has another model, arithmetic, bounded replay or cache layout "
                f"({theirs[:12]}, this one {ours[:12]})"
            )

    def _look_at_peer(self) -> bool:
        """Whether it lives; looks at its sign of life now and then."""
        now = time.monotonic()
        if self._gone_because or now - self._peer_looked_at < self._beat_s / 4:
            return not self._gone_because
        self._peer_looked_at = now
        hello = self._get_json(("hello", self._other))
        if hello is not None and hello.get("session") != self._peer_session:
            self._gone_because = "the other side started anew"
        elif hello is not None and hello.get("is_closed"):
            self._gone_because = "the other side closed the connection"
        elif hello is not None and hello.get("beat") != self._peer_beat:
            self._peer_beat, self._peer_seen_at = hello.get("beat"), now
        elif now - self._peer_seen_at > self._peer_timeout_s:
            self._gone_because = f"the other side gave no sign of life for {self._peer_timeout_s:g} s"
        return not self._gone_because

    def _check_peer(self) -> None:
        if not self._look_at_peer():
            self._fail_in_flight()
            raise PeerGoneError(f"channel {self._channel}: {self._gone_because}")

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._beat_s):
            self._beat()

    def _beat(self) -> None:
        self._num_beats += 1
        hello = {
            "protocol": PROTOCOL,
            "identity": self._identity.hex(),
            "session": self._session,
            "beat": self._num_beats,
            "is_closed": self._is_closed,
        }
        self._put_json(("hello", self._side), hello)

    # ---- entries

    def _key(self, address: tuple[Any, ...]) -> EntryKey:
        text = json.dumps(["deepinfer.kv.channel", self._channel, *address])
        return EntryKey(MESSAGE, hashlib.sha256(text.encode()).digest())

    def _put(self, address: tuple[Any, ...], parts: dict[str, Buffer]) -> bool:
        sizes = tuple((name, memoryview(data).nbytes) for name, data in parts.items())
        header = EntryHeader(self._key(address), bytes(32), bytes(32), 0, b"", sizes)
        return self._store.put(header, list(parts.values()), replace=True)

    def _get(self, address: tuple[Any, ...]) -> bytearray | None:
        """All bytes of an entry; None when it is not there or damaged."""
        entry = self._store.get(self._key(address))
        if entry is None:
            return None
        with entry:
            data = bytearray(entry.header.num_bytes)
            view, offset = memoryview(data), 0
            try:
                for number, (_, size) in enumerate(entry.header.sections):
                    entry.read_into(number, view[offset : offset + size])
                    offset += size
            except DamagedEntryError:
                return None
        return data

    def _remove_last(self, kind: str, count: int) -> None:
        """Take back the newest of `count` entries of this side that nobody has removed."""
        for number in range(count - 1, -1, -1):
            if not self._store.remove(self._key((kind, self._side, self._session, number))):
                return

    def _put_json(self, address: tuple[Any, ...], value: dict[str, Any]) -> bool:
        return self._put(address, {"json": json.dumps(value).encode()})

    def _get_json(self, address: tuple[Any, ...]) -> dict[str, Any] | None:
        data = self._get(address)
        try:
            value = None if data is None else json.loads(data)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None
