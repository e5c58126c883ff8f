"""Fixtures of all rooms: a clean environment, seeds from the test's id, devices, models and golden data."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: no test reaches a hub, and the caller's own settings change no result.
os.environ["HF_HUB_OFFLINE"] = "1"
_KEPT = ("DEEPINFER_ACCELERATOR", "DEEPINFER_KERNEL_LIBRARY")  # where tests run
for _name in [name for name in os.environ if name.startswith("DEEPINFER_") and name not in _KEPT]:
    del os.environ[_name]
# A shell starts what runs in its background deaf to Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Processes that test side by side share the cores; threads of all of them on each would only wait.
if _workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))

if sys.platform == "linux":  # freed memory is kept: new engines take it, and no pages have to be made anew
    _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
    _mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    _mallopt(_M_MMAP_THRESHOLD, 128 << 20)
    _mallopt(_M_TRIM_THRESHOLD, 512 << 20)

from tests.support.golden import Golden, TensorFile, golden, golden_units  # noqa: E402
from tests.support.paths import TINY_QUANT, V41_TINY  # noqa: E402


def seed_of(test_id: str) -> int:
    """A test's seed: the same for every run and order, different between tests."""
    return zlib.crc32(test_id.encode())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process runs one when the others have nothing left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What is there by now stays until the end: the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds Python, numpy and torch (where the test's modules have loaded them) and gives the number."""
    value = seed_of(request.node.nodeid)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)
    return value


@pytest.fixture(params=["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that operators are tested on."""
    return request.param


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Restores torch's thread count after a test that changes it."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_quant() -> Path:
    """Directory of the random model in the release's number formats."""
    return TINY_QUANT


@pytest.fixture(scope="session")
def v41_tiny() -> Path:
    """Directory of the bundled trained model."""
    return V41_TINY


@pytest.fixture(scope="session", params=["tiny-quant", "v41-tiny"])
def golden_model(request: pytest.FixtureRequest) -> Golden:
    """Golden data and checkpoint of each model in turn."""
    return golden(request.param)


@pytest.fixture(scope="session")
def units() -> TensorFile:
    """Golden data of single blocks."""
    return golden_units()
