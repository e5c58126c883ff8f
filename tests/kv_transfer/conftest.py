"""Connections over each transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.kv_transfer.connector import KVConnector
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.store_connector import StoreConnector
from tests.kv_transfer.toys import toy_layout
from tests.kv_transfer.transports import IDENTITY, STORE_TIMES, Transport, make_side


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
