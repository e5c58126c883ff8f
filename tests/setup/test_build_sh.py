"""build.sh against faked tools: what is missing or old is one clear line; what is done is not done again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TOOLS = ("bash", "cat", "chmod", "cp", "dirname", "grep", "head", "ln", "mkdir", "rm", "sed", "touch", "tr")
LISTED = "Available versions: 2.13.0{local}, 2.12.0"

# An interpreter that answers build.sh's questions from files in a folder, notes there what it is asked to do,
# and leaves plain computing to the real one.
FAKE_PYTHON = """#!/bin/bash
fake={fake}
version=$(cat "$fake/version")
case "$*" in
*"sys.version_info"*) [[ $version == 3.1[123].* ]]; exit ;;
*"platform.python_version()"*) echo "$version" ;;
*"import ensurepip, venv"*) [ ! -e "$fake/no-venv" ] ;;
*"Python.h"*) [ ! -e "$fake/no-headers" ] ;;
*"print(sys.prefix)"*) echo "$fake" ;;
"-m venv --clear "*) echo "venv $3 $4" >>"$fake/log"; mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-m pip --version") [ ! -e "$fake/no-pip" ] ;;
"-m pip index versions torch --index-url"*) cat "$fake/cpu-index" 2>/dev/null ;;
"-m pip index versions torch") cat "$fake/default-index" 2>/dev/null ;;
"-m pip install "*" -r "*) echo "pip $*" >>"$fake/log"; [ ! -e "$fake/requirements-fail" ] ;;
"-m pip install "*) echo "pip $*" >>"$fake/log"; [ ! -e "$fake/pip-fails" ] ;;
"setup.py --quiet build_ext")
    echo "build $DEEPINFER_ACCELERATOR" >>"$fake/log"
    [ ! -e "$fake/build-fails" ]
    ;;
"examples/"* | "-m pytest"*) echo "ran $*" ;;
*) exec {python} "$@" ;;
esac
"""
FAKE_COMPILER = """#!/bin/bash
case "$1" in
-dumpfullversion) cat {fake}/gcc-version ;;
--version) echo "g++ (Fake)" ;;
esac
"""


@dataclass
class Machine:
    """A faked machine: `tools` is all of PATH, `fake` holds what its interpreter says and has done."""

    tree: Path
    tools: Path
    fake: Path

    def script(self, name: str, text: str) -> Path:
        path = self.tools / name
        path.write_text(text.format(fake=self.fake, python=sys.executable))
        path.chmod(0o755)
        return path

    def says(self, name: str, text: str = "") -> None:
        (self.fake / name).write_text(text)

    def build(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.tree / "build.sh"), *arguments],
            cwd="/",
            env={"PATH": str(self.tools), "DEEPINFER_ACCELERATOR": "cpu", **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def refuses(self, *arguments: str, **env: str) -> str:
        """Run, expect one line of error and nothing installed; returns the line."""
        result = self.build(*arguments, **env)
        assert result.returncode == 1, result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith("build.sh: ")
        assert "pip" not in self.log()
        return result.stderr.strip()

    def log(self) -> str:
        """What was done since the last look."""
        path = self.fake / "log"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A fitting machine: Python 3.12, GCC 12, a CPU build of torch within reach, no active environment."""
    tree, tools, fake = (tmp_path / name for name in ("check out", "tools", "fake"))
    for folder in (tree / "deepinfer", tools, fake):
        folder.mkdir(parents=True)
    for path in [*ROOT.glob("requirements-*.txt"), ROOT / "build.sh", ROOT / "pyproject.toml"]:
        shutil.copy(path, tree)
    shutil.copy(ROOT / "deepinfer" / "native.py", tree / "deepinfer")
    for tool in TOOLS:
        os.symlink(shutil.which(tool), tools / tool)
    machine = Machine(tree, tools, fake)
    machine.script("python3", FAKE_PYTHON)
    machine.script("g++", FAKE_COMPILER)
    machine.script("uname", "#!/bin/bash\necho Linux x86_64\n")
    machine.says("version", "3.12.4")
    machine.says("gcc-version", "12.2.0\n")
    machine.says("default-index", LISTED.format(local="+cpu"))
    return machine


def test_set_up_says_what_to_run_next_and_is_quick_the_second_time(machine: Machine):
    result = machine.build()
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert (machine.tree / ".venv" / "bin" / "python").exists()
    for line in (
        "ready for cpu with Python 3.12.4",
        "./build.sh run",
        "./build.sh test",
        "source .venv/bin/activate",
    ):
        assert line in result.stdout
    log = machine.log().splitlines()
    assert log[0] == "venv --clear .venv"
    assert log[1].startswith("pip ") and "pybind11" in log[1] and "-r" not in log[1].split()
    build, install = sorted(log[2:4])  # side by side
    assert build == "build cpu"
    assert install.startswith("pip ")
    assert "-r requirements-cpu.txt" in install
    assert "pytest" in install
    assert "index" not in install
    assert log[4].endswith("--no-build-isolation --no-deps -e .")

    result = machine.build()
    assert result.returncode == 0
    assert machine.log() == "build cpu\n", "only the build is looked at again"


@pytest.mark.parametrize("name", ["requirements-cpu.txt", "pyproject.toml"])
def test_changed_requirements_are_installed_again(machine: Machine, name: str):
    assert machine.build().returncode == 0
    machine.log()
    with open(machine.tree / name, "a") as file:
        file.write("# another line\n")
    assert machine.build().returncode == 0
    assert "-r requirements-cpu.txt" in machine.log()
    assert machine.build().returncode == 0
    assert "pip" not in machine.log()


def test_the_active_environment_is_used(machine: Machine):
    environment = machine.tree.parent / "environment"
    (environment / "bin").mkdir(parents=True)
    shutil.copy(machine.tools / "python3", environment / "bin" / "python")
    (machine.tools / "python3").unlink()
    result = machine.build(VIRTUAL_ENV=str(environment))
    assert result.returncode == 0, result.stderr
    assert str(environment) in result.stdout
    assert "activate" not in result.stdout
    assert not (machine.tree / ".venv").exists()


def test_run_and_test_pass_their_arguments_on(machine: Machine):
    result = machine.build("run", "--prompt", "two words")
    assert result.returncode == 0, result.stderr
    assert "ran examples/offline_inference.py --prompt two words" in result.stdout
    result = machine.build("test", "-k", "a or b")
    assert result.returncode == 0, result.stderr
    assert "ran -m pytest --numprocesses auto --dist worksteal -k a or b" in result.stdout


def test_an_unknown_command_names_the_known_ones(machine: Machine):
    line = machine.refuses("tests")
    assert "'tests'" in line
    assert "./build.sh test" in line


def test_help_needs_nothing(machine: Machine):
    (machine.tools / "python3").unlink()
    result = machine.build("--help")
    assert result.returncode == 0
    assert "./build.sh test [ARGS]" in result.stdout


def test_old_python(machine: Machine):
    machine.says("version", "3.10.13")
    assert "python3 is Python 3.10.13; 3.11, 3.12 or 3.13 is needed" in machine.refuses()
    assert "PYTHON=python3 is Python 3.10.13" in machine.refuses(PYTHON="python3")


def test_python_that_is_too_new(machine: Machine):
    machine.says("version", "3.14.0")
    assert "python3 is Python 3.14.0; 3.11, 3.12 or 3.13 is needed" in machine.refuses()


def test_a_fitting_python_beside_an_old_one_is_found(machine: Machine):
    text = (machine.tools / "python3").read_text()
    (machine.tools / "python3.13").write_text(text.replace("/version", "/version-13"))
    (machine.tools / "python3.13").chmod(0o755)
    machine.says("version", "3.9.2")
    machine.says("version-13", "3.13.1")
    result = machine.build()
    assert result.returncode == 0, result.stderr
    assert "making .venv with Python 3.13.1" in result.stdout


def test_no_python(machine: Machine):
    (machine.tools / "python3").unlink()
    line = machine.refuses()
    assert "Python 3.11, 3.12 or 3.13 is needed" in line
    assert "apt-get install python3" in line
    assert "PYTHON=python3.12: no such program" in machine.refuses(PYTHON="python3.12")


def test_no_venv_module(machine: Machine):
    machine.says("no-venv")
    assert "lacks the venv module (Debian: apt-get install python3-venv)" in machine.refuses()


def test_no_python_headers(machine: Machine):
    machine.says("no-headers")
    assert "Python's headers are missing (Debian: apt-get install python3-dev)" in machine.refuses()


def test_old_gcc(machine: Machine):
    machine.says("gcc-version", "11.4.0\n")
    assert "g++ is GCC 11.4.0; 12 or newer is needed" in machine.refuses()


def test_no_gcc(machine: Machine):
    (machine.tools / "g++").unlink()
    line = machine.refuses()
    assert "no C++ compiler (g++)" in line
    assert "apt-get install g++" in line
    assert "no C++ compiler (my-cxx)" in machine.refuses(CXX="my-cxx -m64")


def test_an_environment_that_is_gone_or_old(machine: Machine):
    gone = machine.tree.parent / "gone"
    assert f"VIRTUAL_ENV={gone} holds no Python" in machine.refuses(VIRTUAL_ENV=str(gone))
    (gone / "bin").mkdir(parents=True)
    shutil.copy(machine.tools / "python3", gone / "bin" / "python")
    machine.says("version", "3.8.1")
    assert "the active environment has Python 3.8.1" in machine.refuses(VIRTUAL_ENV=str(gone))


def test_a_broken_environment_of_ours_is_made_again(machine: Machine):
    assert machine.build().returncode == 0
    python = machine.tree / ".venv" / "bin" / "python"
    python.write_text("#!/bin/bash\nexit 1\n")
    machine.log()
    assert machine.build().returncode == 0
    assert "venv --clear .venv" in machine.log()
    machine.says("no-pip")
    assert machine.build().returncode == 0
    assert "venv --clear .venv" in machine.log()


def test_accelerators(machine: Machine):
    assert "choose one of auto, cpu, nvidia, ascend" in machine.refuses(DEEPINFER_ACCELERATOR="tpu")
    assert machine.build(DEEPINFER_ACCELERATOR="nvidia").returncode == 0
    log = machine.log()
    assert "-r requirements-nvidia.txt" in log
    assert "build nvidia" in log
    machine.script("npu-smi", "#!/bin/bash\n")
    assert machine.build(DEEPINFER_ACCELERATOR="auto").returncode == 0
    assert "-r requirements-ascend.txt" in machine.log()


def test_failures_of_pip_and_of_the_build_are_not_recorded_as_done(machine: Machine):
    for failure in ("pip-fails", "requirements-fail"):  # the first is alone, the second beside the build
        machine.says(failure)
        result = machine.build()
        assert result.returncode == 1
        assert result.stderr == "build.sh: installing requirements-cpu.txt failed: see pip's message above\n"
        (machine.fake / failure).unlink()
    machine.says("build-fails")
    result = machine.build("run")
    assert result.returncode == 1
    assert "building the native extensions failed" in result.stderr
    assert "ran" not in result.stdout
    (machine.fake / "build-fails").unlink()
    machine.log()
    assert machine.build().returncode == 0
    assert "-r requirements-cpu.txt" in machine.log()


def test_where_pip_knows_no_cpu_torch_the_public_index_of_cpu_builds_is_asked(machine: Machine):
    machine.says("default-index", LISTED.format(local=""))
    machine.says("cpu-index", LISTED.format(local="+cpu"))
    assert machine.build().returncode == 0
    assert "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu" in machine.log()


def test_without_any_cpu_torch_the_default_build_is_taken(machine: Machine):
    machine.says("default-index", LISTED.format(local=""))
    result = machine.build()
    assert result.returncode == 0
    assert "taking the default build" in result.stdout
    log = machine.log()
    assert "-r requirements-cpu.txt" in log
    assert "index-url" not in log


def test_a_gpu_machine_takes_the_default_torch(machine: Machine):
    machine.says("default-index", LISTED.format(local=""))
    machine.says("cpu-index", LISTED.format(local="+cpu"))
    assert machine.build(DEEPINFER_ACCELERATOR="nvidia").returncode == 0
    assert "+cpu" not in machine.log()
