"""Builds the two native extensions into `deepinfer/_so/<accelerator>-<arch>/`.

`_core` is the scheduler (`csrc/core`), `_cpu_ops` the CPU kernels (`csrc/cpu`); both are plain C++20 behind
pybind11 and need neither torch nor a device toolkit. Compilation is parallel and incremental: an object is
rebuilt when its command line, its source or any header it included has changed.

    python setup.py build_ext                   both extensions, in place
    python setup.py build_ext --only=_core      one of them
    CXX=g++-13 CXXFLAGS=-g python setup.py build_ext
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MIN_GCC = 12

# -ffp-contract=off: a fused multiply-add exists where the source says so, and only there
CXX_FLAGS = [
    *"-std=c++20 -O3 -ffp-contract=off -fPIC -pthread -fvisibility=hidden".split(),
    *"-Wall -Wextra -Wpedantic -Werror".split(),
]
BINDING_FLAGS = ["-O1"]  # they only call the code whose speed matters, and would take most of the time
# A statically linked libstdc++ must stay private: mixed with the one that torch loads, exceptions crash.
PRIVATE_LIBS = ["-Wl,--exclude-libs,ALL"] if sys.platform == "linux" else []
LINK_FLAGS = [*"-shared -pthread".split(), *PRIVATE_LIBS]


def _load_native():
    """`deepinfer/native.py` by path: it decides where modules lie, and nothing is installed yet."""
    spec = importlib.util.spec_from_file_location("deepinfer_native", ROOT / "deepinfer" / "native.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


native = _load_native()


class BuildError(Exception):
    """A failure that one line explains."""


@dataclass(frozen=True)
class Compile:
    """One translation unit: its object is current when the recorded command and all recorded inputs are."""

    source: Path
    object: Path
    command: list[str]

    @property
    def depfile(self) -> Path:
        return self.object.with_suffix(".d")

    @property
    def record(self) -> Path:
        return self.object.with_suffix(".cmd")

    def inputs(self) -> list[Path]:
        """Every file the last compilation read, from the compiler's own list."""
        # "out.o: a.cpp a.hpp \<newline> b.hpp": blanks in paths are escaped, which shlex undoes
        listing = self.depfile.read_text().replace("\\\n", " ").split(": ", 1)[1]
        return [(ROOT / name).resolve() for name in shlex.split(listing)]

    def is_current(self) -> bool:
        try:
            if self.record.read_text() != shlex.join(self.command):
                return False
            built = self.object.stat().st_mtime_ns
            return all(path.stat().st_mtime_ns <= built for path in self.inputs())
        except OSError:
            return False

    def run(self) -> str:
        """Compile; returns the compiler's output when it failed, else an empty string."""
        self.object.parent.mkdir(parents=True, exist_ok=True)
        self.record.unlink(missing_ok=True)
        result = subprocess.run(
            self.command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if result.returncode != 0:
            return result.stdout or f"{shlex.join(self.command)}: exit status {result.returncode}"
        self.record.write_text(shlex.join(self.command))
        return ""


@functools.cache
def compiler() -> tuple[str, ...]:
    """The C++ compiler's command; raises BuildError when it is absent or too old."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    try:
        version = subprocess.run(
            [*command, "-dumpfullversion", "-dumpversion"], text=True, capture_output=True, check=True
        ).stdout.strip()
        banner = subprocess.run([*command, "--version"], text=True, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"no working C++ compiler ({' '.join(command)}): install GCC {MIN_GCC} or newer, or set CXX"
        ) from error
    if "clang" not in banner and int(version.split(".")[0]) < MIN_GCC:
        raise BuildError(
            f"{' '.join(command)} is GCC {version}; version {MIN_GCC} or newer is needed (or set CXX)"
        )
    return tuple(command)


def include_flags() -> list[str]:
    try:
        import pybind11
    except ImportError as error:
        raise BuildError("pybind11 is not installed in this environment: run ./build.sh") from error
    python_header = Path(sysconfig.get_path("include")) / "Python.h"
    if not python_header.exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise BuildError(
            f"{python_header} is missing: install Python's headers (Debian: python{version}-dev)"
        )
    # -isystem: warnings in headers that are not ours are not errors of ours
    return ["-Icsrc", "-isystem", pybind11.get_include(), "-isystem", str(python_header.parent)]


class BuildNative(build_ext):
    """`build_ext` with our own compile loop; always builds in the source tree, then copies for a wheel."""

    user_options = [*build_ext.user_options, ("only=", None, "build just this extension (_core or _cpu_ops)")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.only: str | None = None

    def run(self) -> None:
        names = [name for name in native.MODULES if self.only in (None, name)]
        if not names:
            raise SystemExit(f"setup.py: --only={self.only}: the extensions are {', '.join(native.MODULES)}")
        try:
            failed = [name for name in names if not self._build(name)]
        except BuildError as error:
            raise SystemExit(f"setup.py: {error}") from None
        if failed:
            raise SystemExit(f"setup.py: building {', '.join(failed)} failed")
        in_place = self.inplace or self.editable_mode or "build_ext" in self.distribution.commands
        if not in_place:
            for name in names:
                for path in (self._target(name), native.record_path(self._target(name))):
                    destination = Path(self.build_lib) / path.relative_to(ROOT)
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, destination)

    def _target(self, name: str) -> Path:
        return native.module_path(native.build_accelerator(), name)

    def _build(self, name: str) -> bool:
        """Bring one extension up to date; False (with the compiler's output printed) when that failed."""
        if not native.module_sources(name):
            print(f"setup.py: csrc/ holds no sources of {name}: the checkout is incomplete", file=sys.stderr)
            return False
        start_ns = time.time_ns()
        target = self._target(name)
        work = ROOT / "build" / target.parent.name / sysconfig.get_config_var("SOABI") / name
        work.mkdir(parents=True, exist_ok=True)
        with open(work / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree take turns
            units = self._units(name, work)
            is_changed = self._needs_link(units, target, work)
            if is_changed and not self._compile_and_link(name, units, target, work):
                return False
            self._write_record(name, units, target, start_ns if is_changed else None)
        if is_changed or self.distribution.verbose:
            print(f"setup.py: {name}: {target.relative_to(ROOT)}", flush=True)
        return True

    def _units(self, name: str, work: Path) -> list[Compile]:
        start = [*compiler(), *CXX_FLAGS, *include_flags(), *shlex.split(os.environ.get("CXXFLAGS", ""))]
        units = []
        for source in native.module_sources(name):
            relative = source.relative_to(ROOT)
            out = work / relative.with_suffix(".o")
            flags = BINDING_FLAGS if source.parent.name == "bindings" else []
            files = ["-MF", str(out.with_suffix(".d")), "-c", str(relative), "-o", str(out)]
            units.append(Compile(source, out, [*start, "-MMD", *flags, *files]))
        return units

    def _link_command(self, units: list[Compile]) -> list[str]:
        objects = [str(unit.object) for unit in units]
        return [*compiler(), *LINK_FLAGS, *objects, *shlex.split(os.environ.get("LDFLAGS", "")), "-o"]

    def _needs_link(self, units: list[Compile], target: Path, work: Path) -> bool:
        record = work / "link.cmd"
        is_linked = target.exists() and record.exists()
        if not is_linked or record.read_text() != shlex.join(self._link_command(units)):
            return True
        return bool(self.force) or not all(unit.is_current() for unit in units)

    def _compile_and_link(self, name: str, units: list[Compile], target: Path, work: Path) -> bool:
        record = work / "link.cmd"
        record.unlink(missing_ok=True)  # until all of it succeeds, the next run has to link
        todo = [unit for unit in units if self.force or not unit.is_current()]
        print(f"setup.py: {name}: compiling {len(todo)} of {len(units)} files", flush=True)
        with ThreadPoolExecutor(int(self.parallel or len(os.sched_getaffinity(0)))) as pool:
            errors = [text for text in pool.map(Compile.run, todo) if text]
        if errors:
            print("\n".join(errors), file=sys.stderr, flush=True)
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")  # put in place whole: another process may have the old one open
        link = self._link_command(units)
        if subprocess.run([*link, str(fresh)], cwd=ROOT).returncode != 0:
            return False
        os.replace(fresh, target)
        record.write_text(shlex.join(link))
        return True

    def _write_record(self, name: str, units: list[Compile], target: Path, start_ns: int | None) -> None:
        """Note what the module was made from; `start_ns` is when this build began, None when it was idle."""
        csrc = ROOT / "csrc"
        inputs = {path for unit in units for path in unit.inputs() if path.is_relative_to(csrc)}
        headers = sorted(str(path.relative_to(csrc)) for path in inputs - {unit.source for unit in units})
        # an edit while the compiler ran leaves a module that matches no state of the tree: noted as stale
        is_edited = start_ns is not None and any(path.stat().st_mtime_ns > start_ns for path in inputs)
        digest = "" if is_edited else native.source_digest(name, headers)
        flags = shlex.join(units[0].command[: units[0].command.index("-MMD")])
        record = {"digest": digest, "headers": headers, "compiled with": flags}
        native.record_path(target).write_text(json.dumps(record, indent=1) + "\n")

    # What setuptools asks while it packs a wheel or an editable install.
    def get_source_files(self) -> list[str]:
        return [str(s.relative_to(ROOT)) for name in native.MODULES for s in native.module_sources(name)]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    ext_modules=[Extension(f"deepinfer.{name}", []) for name in native.MODULES],
    cmdclass={"build_ext": BuildNative},
)
