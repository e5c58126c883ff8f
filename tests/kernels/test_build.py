"""Kernels built ahead of time, on a machine without a GPU, and loaded without a compiler."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.compile_checks import covering
from tests.support.paths import V41_TINY
from tilelang_ops import build
from tilelang_ops.build import factories, programs
from tilelang_ops.common import kernels
from tilelang_ops.common.kernels import KernelFactory, Program, load, use_library
from tilelang_ops.common.sizes import RELEASE, ModelSizes
from tilelang_ops.engram.hash_ngrams import cuda

TARGET = "sm_90a"
TINY = V41_TINY / "config.json"


def run_build(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    """`python -m tilelang_ops.build` for one kernel; its exit status or message."""
    command = ["build", "--target", TARGET, "--only", "engram.hash_ngrams", "--jobs", "1"]
    command += map(str, arguments)  # later ones win
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit:
        build.main()
    return exit.value.code


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with one kernel in it."""
    directory = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_build(monkeypatch, "--out", directory) == 0
    return directory


def release_program() -> Program:
    """The one in the library."""
    return cuda.kernel(**cuda.kernel.builds(RELEASE)[0])


def test_a_second_run_builds_nothing(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [path.name for path in library.iterdir()] == [release_program().file_name(TARGET)]
    monkeypatch.setattr(build, "compile_program", lambda *args: pytest.fail("compiled again"))
    assert run_build(monkeypatch, "--out", library) == 0
    assert capsys.readouterr().out == f"{TARGET}: 0 kernels built, 1 kept, 0 failed\n"


def test_jobs_are_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "compile_program", lambda *args: pytest.fail("compiled here"))
    arguments = ("--only", "kv_index.ring_index", "--jobs", "2", "--out", tmp_path)
    assert run_build(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out == f"{TARGET}: 2 kernels built, 0 kept, 0 failed\n"
    names = {
        p.file_name(TARGET) for p in programs(TARGET, RELEASE) if p.factory.name == "kv_index.ring_index"
    }
    assert {path.name for path in tmp_path.iterdir()} == names and len(names) == 2


def test_a_prebuilt_kernel_loads_without_a_compiler(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compile_program", lambda *args: pytest.fail("compiled"))
    use_library(library)
    try:
        launch = load(release_program(), TARGET)
    finally:
        use_library(None)
    ids, constants = torch.zeros(1, 4, dtype=torch.int32), torch.ones(2, 24, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="ngram_ids device_type mismatch, expected cuda"):
        launch(ids, constants[:, :4].contiguous(), constants, constants, ids.new_zeros(2, 1, 24))


def test_a_kernel_that_the_library_lacks_is_compiled(
    library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = []
    monkeypatch.setattr(kernels, "compile_program", lambda *args: compiled.append(args))
    other = cuda.kernel(max_ngram=3, columns=8)
    use_library(library)
    try:
        load(other, TARGET)
    finally:
        use_library(None)
    assert compiled == [(other, TARGET)]
    assert "compiling it" in caplog.text


def test_names_change_with_all_that_decides_a_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = release_program()
    names = {program.file_name("sm_90a"), program.file_name("sm_100a")}
    names.add(cuda.kernel(max_ngram=3, columns=24).file_name("sm_90a"))
    factory = cuda.kernel
    with_option = KernelFactory(
        factory.make, factory.name, factory.targets, factory.builds, {"tl.enable_fast_math": True}
    )
    names.add(with_option(**program.sizes).file_name("sm_90a"))
    source = tmp_path / "cuda.py"
    monkeypatch.setattr(kernels, "_imported_files", lambda module: (source,))
    for text in ("one", "two"):
        source.write_text(text)
        names.add(program.file_name("sm_90a"))
    assert len(names) == 6


def test_sources_are_those_that_a_factory_imports() -> None:
    names = {path.name for path in cuda.kernel.source_files}
    assert {"cuda.py", "kernels.py"} <= names
    assert not names & {"op.py", "build.py"}
    assert all(path.exists() for path in cuda.kernel.source_files)


def test_sources_of_a_package_are_all_its_files() -> None:
    """A package that re-exports, such as the macros of rows of scores, is more than one file."""
    files = kernels._imported_files("tilelang_ops.sampling.sample_tokens.cuda")
    folder = next(path for path in files if path.name == "cut.py").parent
    assert set(folder.glob("*.py")) <= set(files)


def test_the_configuration_of_a_model_decides_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSizes.from_config(json.loads(TINY.read_text()))
    sizes = [p.sizes for p in programs(TARGET, model) if p.factory is cuda.kernel]
    assert sizes == [{"max_ngram": model.engram_max_ngram_size, "columns": model.engram_columns}]
    built = []
    monkeypatch.setattr(build, "build", lambda program, *args: built.append(program.sizes))
    assert run_build(monkeypatch, "--config", TINY, "--out", tmp_path / "new" / "library") == 0
    assert built == sizes


def test_failures_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(build, "compile_program", fail)
    code = run_build(monkeypatch)
    assert "engram.hash_ngrams(" in str(code) and "no nvcc" in str(code)
    assert "1 failed" in capsys.readouterr().out


def test_programs_of_the_tiny_model_trace() -> None:
    """Its sizes are no multiples of anything; kernels compile for it on demand."""
    model = ModelSizes.from_config(json.loads(TINY.read_text()))
    traced = {program.factory.name: program.trace(TARGET) for program in covering(programs(TARGET, model))}
    names = {factory.name for factory in factories(TARGET) if factory.builds(model)}
    assert traced.keys() == names and len(names) > 50, f"{len(names)} operators"
