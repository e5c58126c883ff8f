"""KVConnector: the hand-off of sequences from an engine that runs prompts to one that completes them.

A connector joins two sides and carries records (`SequenceState`), and notes about the requests behind them.
No request is lost silently. It rests with the side that has announced it until that sends its record, then
with the side that takes the record until it says that the request has ended; what rests with a side that goes
away comes to the other one as a `Failure`, and so does what was refused or not taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.kv_transfer.sequence_state import SequenceState


class TransferError(RuntimeError):
    """A hand-off did not happen."""


class PeerGoneError(TransferError):
    """The other side has closed the connection or died."""


class TransferTimeoutError(TransferError):
    """The other side did not answer in time."""


@dataclass(frozen=True)
class Failure:
    """A request that was sent, or is due, and will not be continued over there."""

    request_id: str
    reason: str


ANNOUNCED, WITHDRAWN, ENDED = "announced", "withdrawn", "ended"  # kinds of notes


class Ledger:
    """Requests that rest with the other side. Records and notes may overtake each other: counts settle it."""

    def __init__(self) -> None:
        self._announced: Counter[str] = Counter()  # to be sent by the other side
        self._taken: Counter[str] = Counter()  # sent to it, not ended

    def note(self, kind: str, request_ids: Sequence[str]) -> None:
        """A note of the other side. Raises KeyError for an unknown kind."""
        counts, change = {
            ANNOUNCED: (self._announced, 1),
            WITHDRAWN: (self._announced, -1),
            ENDED: (self._taken, -1),
        }[kind]
        for request_id in request_ids:
            _add(counts, request_id, change)

    def arrived(self, request_id: str) -> None:
        """The other side has sent a record."""
        _add(self._announced, request_id, -1)

    def took(self, request_id: str) -> None:
        """The other side has taken a record."""
        _add(self._taken, request_id, 1)

    def fail(self, reason: str) -> list[Failure]:
        """The other side is gone: all that rests with it, once."""
        failures = [
            Failure(request_id, f"{reason} {when}")
            for counts, when in (
                (self._taken, "after it took the request's state, before the request ended"),
                (self._announced, "before it handed the request over"),
            )
            for request_id in (+counts).elements()
        ]
        self.clear()
        return failures

    def clear(self) -> None:
        """Forget everything."""
        self._announced.clear()
        self._taken.clear()


def _add(counts: Counter[str], request_id: str, change: int) -> None:
    counts[request_id] += change
    if counts[request_id] == 0:
        del counts[request_id]


class KVConnector(ABC):
    """One side of a connection; both sides can send. For one thread at a time."""

    @abstractmethod
    def send(self, state: SequenceState, timeout_s: float = 30.0) -> None:
        """Hand a sequence over. Its arrays are the caller's again afterwards.

        Raises:
            PeerGoneError: nobody is there to take it.
            TransferTimeoutError: the other side has too much that it has not taken; nothing was sent.
        """

    @abstractmethod
    def receive(self, timeout_s: float = 0.0) -> SequenceState | None:
        """The next sequence that was handed over; None when none arrives in time.

        A record that does not fit to this side is refused, which its sender is told, and passed over.

        Raises:
            PeerGoneError: the other side is gone, and all it has sent is received.
        """

    @abstractmethod
    def take_failures(self) -> list[Failure]:
        """What was refused, and when the other side is gone what it had not taken, had taken and not ended,
        or had announced and not sent; each named once. What can still be received has not failed."""

    def announce(self, request_ids: Sequence[str]) -> None:
        """Records of these requests are to come; an id is given once for each record."""
        self._note(ANNOUNCED, request_ids)

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Announced records that will not come: their requests have ended here."""
        self._note(WITHDRAWN, request_ids)

    def end(self, request_ids: Sequence[str]) -> None:
        """Requests whose records this side has received have ended, once for each record."""
        self._note(ENDED, request_ids)

    @abstractmethod
    def _note(self, kind: str, request_ids: Sequence[str]) -> None:
        """Tell the other side, now or as soon as there is room; never waits."""

    @abstractmethod
    def is_peer_alive(self) -> bool:
        """Whether the other side is there, as far as is known now."""

    @abstractmethod
    def close(self) -> None:
        """Tell the other side and let go of everything; a second call does nothing."""

    def __enter__(self) -> KVConnector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
