"""Sides of a connection over each transport, for tests."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deepinfer.kv_transfer.connector import Failure, KVConnector
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from deepinfer.kv_transfer.store_connector import StoreConnector
from tests.kv_transfer.toys import toy_identity, toy_layout

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


Pair = tuple[KVConnector, KVConnector]


def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
    return value


def reasons(failures: list[Failure]) -> list[tuple[str, str]]:
    """What failed, and which case it was."""
    cases = ("before it took", "after it took", "before it handed")
    return [(f.request_id, next(case for case in cases if case in f.reason)) for f in failures]
