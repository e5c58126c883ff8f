"""Backends are chosen by device, loaded late, and never replaced silently."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tilelang_ops.common.dispatch import UnsupportedOpError, backend, register
from tilelang_ops.kv_index import select_entries


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a reference, a backend whose import fails inside, and no third one."""
    name = f"ops_of_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "reference.py").write_text("def run():\n    return 'reference'\n")
    (folder / "cuda.py").write_text("import a_kernel_library_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_the_cpu_runs_the_reference(package: str) -> None:
    assert backend(package, torch.device("cpu")).run() == "reference"
    assert f"{package}.cuda" not in sys.modules


@pytest.mark.parametrize("device", ["npu", "mps", "meta"])
def test_a_missing_backend_is_named(package: str, device: str) -> None:
    # A device object cannot be made for a plug-in that is not loaded, hence the stand-in.
    stand_in = type("Device", (), {"type": device})
    with pytest.raises(UnsupportedOpError, match=f"{package}.*{device}") as caught:
        backend(package, stand_in)
    assert (caught.value.op, caught.value.device) == (package, device)


def test_a_broken_backend_is_not_taken_for_a_missing_one(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_kernel_library_that_is_not_installed"):
        backend(package, torch.device("cuda"))


def test_a_registered_function_takes_the_place_of_the_module(package: str) -> None:
    assert backend(package, torch.device("cpu")).run() == "reference"
    for answer in ("first", "second"):
        register(package, "cpu", lambda answer=answer: answer)
        assert backend(package, torch.device("cpu")).run() == answer
    register(package, "cuda", lambda: "kernel")
    assert backend(package, torch.device("cuda")).run() == "kernel"


def test_an_operator_says_what_it_lacks() -> None:
    with pytest.raises(UnsupportedOpError, match=r"select_entries.*meta"):
        select_entries(torch.empty(2, 3, device="meta"), 2)
