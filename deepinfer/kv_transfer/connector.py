"""KVConnector: the hand-off of sequences from an engine that runs prompts to one that completes them.

A connector joins two sides and carries records (`SequenceState`). It never loses one silently: what the other
side has not taken when it goes away, or refuses, comes back as a `Failure` to the side that sent it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    """A request that was sent and will not be continued over there."""

    request_id: str
    reason: str


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
        """What was sent and came to nothing, each named once."""

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
