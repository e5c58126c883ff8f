"""The transport through a KV store: damaged records, a full store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepinfer.kv_transfer.connector import TransferError
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.store_connector import StoreConnector
from tests.kv_transfer.toys import toy_layout, toy_state
from tests.kv_transfer.transports import IDENTITY, STORE_TIMES, eventually, make_side


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
