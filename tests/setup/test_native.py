"""Finding the native modules: absent, for another Python, older than its sources; and the build."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT
from tests.support.process import clean_env, run

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# Without pybind11, which would take most of the time.
MODULE = """
#include <Python.h>
#include "{room}/answer.hpp"
static PyObject* call(PyObject*, PyObject*) {{ return PyLong_FromLong(answer()); }}
static PyMethodDef methods[] = {{{{"answer", call, METH_NOARGS, nullptr}}, {{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef definition = {{
    PyModuleDef_HEAD_INIT, "{name}", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr}};
PyMODINIT_FUNC PyInit_{name}() {{ return PyModule_Create(&definition); }}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with native sources of a few lines: `_core.answer()` is 1, `_cpu_ops.answer()` is 2."""
    (tmp_path / "deepinfer").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("native.py", "__init__.py"):
        shutil.copy(ROOT / "deepinfer" / name, tmp_path / "deepinfer")
    for name, room, binding, value in (("_core", "core", "module", 1), ("_cpu_ops", "cpu", "bind_cpu", 2)):
        write(tmp_path / f"csrc/{room}/answer.hpp", "#pragma once\nint answer();\n")
        write(
            tmp_path / f"csrc/{room}/answer.cpp",
            f'#include "answer.hpp"\nint answer() {{ return {value}; }}\n',
        )
        write(tmp_path / f"csrc/bindings/{binding}.cpp", MODULE.format(room=room, name=name))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def load_native(tree: Path) -> ModuleType:
    """`deepinfer/native.py` of a tree, under a name of its own."""
    name = f"native_of_{tree.name}"
    spec = importlib.util.spec_from_file_location(name, tree / "deepinfer" / "native.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def build(tree: Path, *arguments: str, **env: str):
    return run(
        [sys.executable, "setup.py", "build_ext", *arguments],
        cwd=tree,
        env=clean_env(DEEPINFER_ACCELERATOR="cpu", **env),
    )


def answer(tree: Path, name: str) -> int:
    """Load a module in a new process, as a user would."""
    code = f"from deepinfer import native; print(native._load({name!r}).answer())"
    result = run([sys.executable, "-c", code], cwd=tree, env=clean_env(PYTHONPATH=str(tree)))
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_build_load_edit_rebuild(tree: Path):
    result = build(tree)
    assert result.returncode == 0, result.stderr
    assert "compiling 2 of 2" in result.stdout
    folder = tree / "deepinfer" / "_so" / f"cpu-{platform.machine()}"
    assert (folder / f"_core{SUFFIX}").exists()
    assert answer(tree, "_core") == 1
    assert answer(tree, "_cpu_ops") == 2

    assert "compiling" not in build(tree).stdout, "nothing changed"

    native = load_native(tree)
    core = native.module_path("cpu", "_core")
    assert not native.is_stale("_core", core)
    write(tree / "csrc/core/answer.hpp", "#pragma once\n// the answer\nint answer();\n")
    assert native.is_stale("_core", core), "an included header counts"
    assert not native.is_stale("_cpu_ops", native.module_path("cpu", "_cpu_ops"))
    result = build(tree)
    assert "_core: compiling 2 of 2" in result.stdout
    assert "_cpu_ops: compiling" not in result.stdout
    assert not native.is_stale("_core", core)

    write(tree / "csrc/core/answer.cpp", '#include "answer.hpp"\nint answer() { return 11; }\n')
    assert native.is_stale("_core", core)
    assert "_core: compiling 1 of 2" in build(tree).stdout
    assert answer(tree, "_core") == 11

    write(tree / "csrc/core/more.cpp", "int unused(int value);\nint unused(int value) { return value; }\n")
    assert native.is_stale("_core", core), "a new source counts"
    assert "_core: compiling 1 of 3" in build(tree).stdout
    (tree / "csrc/core/more.cpp").unlink()
    assert native.is_stale("_core", core), "a removed source counts"
    assert "_core: compiling 0 of 2" in build(tree).stdout
    assert not native.is_stale("_core", core)


def test_a_compile_error_leaves_the_other_module_alone(tree: Path):
    write(tree / "csrc/core/answer.cpp", "int answer() { return 1; int unused; }\n")
    result = build(tree)
    assert result.returncode != 0
    assert "unused" in result.stderr, "warnings are errors"
    assert result.stderr.splitlines()[-1] == "setup.py: building _core failed"
    assert answer(tree, "_cpu_ops") == 2
    assert build(tree, "--only=_cpu_ops").returncode == 0
    result = build(tree, "--only=_cpu")
    assert result.returncode != 0
    assert "_core, _cpu_ops" in result.stderr


def test_missing_sources_are_named(tree: Path):
    shutil.rmtree(tree / "csrc" / "cpu")
    (tree / "csrc" / "bindings" / "bind_cpu.cpp").unlink()
    result = build(tree)
    assert result.returncode != 0
    assert "holds no sources of _cpu_ops" in result.stderr
    assert answer(tree, "_core") == 1


def fake_compiler(folder: Path, version: str) -> str:
    path = folder / "fake-g++"
    write(path, f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


def test_compiler_that_is_old_or_absent_is_one_line(tree: Path):
    result = build(tree, CXX=fake_compiler(tree, "11.4.0"))
    assert result.returncode != 0
    assert "is GCC 11.4.0; version 12 or newer is needed" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = build(tree, CXX="no-such-compiler")
    assert result.returncode != 0
    assert "no working C++ compiler (no-such-compiler)" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def native(tree: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    return load_native(tree)


def place(native: ModuleType, name: str, accelerator: str = "cpu", file: str | None = None) -> Path:
    """A file where a built module would be, recorded as made from the present sources."""
    path = native.module_path(accelerator, name)
    path = path.with_name(file) if file else path
    write(path, "not a module")
    record = {"digest": native.source_digest(name, []), "headers": []}
    native.record_path(path).write_text(json.dumps(record))
    return path


def test_an_absent_module_names_build_sh(native: ModuleType):
    with pytest.raises(native.NativeBuildError, match=r"_core is not built; run \./build\.sh"):
        native.load_core()


def test_a_module_for_another_python_is_named(native: ModuleType):
    place(native, "_cpu_ops", file="_cpu_ops.cpython-39-x86_64-linux-gnu.so")
    with pytest.raises(
        native.NativeBuildError, match=r"not built for Python 3\.\d+ .*cpython-39.*\./build\.sh"
    ):
        native.load_cpu_ops()


def test_a_stale_module_is_refused(native: ModuleType, tree: Path):
    path = place(native, "_core")
    write(tree / "csrc/core/answer.cpp", "int answer();\n")
    with pytest.raises(native.NativeBuildError, match=r"_core is older than its sources .*\./build\.sh"):
        native.load_core()
    native.record_path(path).unlink()
    with pytest.raises(native.NativeBuildError, match="older"):
        native.load_core()


def test_a_module_that_does_not_load_is_named(native: ModuleType):
    place(native, "_core")
    with pytest.raises(native.NativeBuildError, match=r"does not load .*\./build\.sh"):
        native.load_core()


def test_without_sources_nothing_is_stale(native: ModuleType, tree: Path):
    path = place(native, "_core")
    shutil.rmtree(tree / "csrc")
    assert not native.is_stale("_core", path)


def test_another_accelerators_build_serves_as_well(native: ModuleType):
    path = place(native, "_core", accelerator="nvidia")
    assert native._find("_core") == path
    own = place(native, "_core")
    assert native._find("_core") == own


def test_accelerator_of_the_build(native: ModuleType, monkeypatch: pytest.MonkeyPatch):
    assert native.build_accelerator() == "cpu"
    monkeypatch.setattr(native.os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    for value in ("auto", ""):
        monkeypatch.setenv("DEEPINFER_ACCELERATOR", value)
        assert native.build_accelerator() == "nvidia"
    monkeypatch.setattr(native.shutil, "which", lambda name: "/bin/npu-smi" if name == "npu-smi" else None)
    assert native.build_accelerator() == "ascend"
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "gpu")
    with pytest.raises(
        ValueError, match="DEEPINFER_ACCELERATOR=gpu: choose one of auto, cpu, nvidia, ascend"
    ):
        native.build_accelerator()
