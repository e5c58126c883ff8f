"""Builds the two native extensions into `deepinfer/_so/<accelerator>-<arch>/`.

`_core` is the scheduler (`csrc/core`), `_cpu_ops` the CPU kernels (`csrc/cpu`); both are plain C++20 behind
pybind11 and need neither torch nor a device toolkit. Compilation is parallel and incremental: an object is
rebuilt when its command line, its source or any header it included has changed.

    python setup.py build_ext                   both extensions, in place
    python setup.py build_ext --only=_core      one of them
    CXX=g++-13 CXXFLAGS=-g python setup.py build_ext
"""

from __future__ import annotations

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

CXX_FLAGS = "-std=c++20 -O3 -fPIC -pthread -fvisibility=hidden -Wall -Wextra -Wpedantic -Werror".split()
LINK_FLAGS = "-shared -pthread".split()


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


def compiler() -> list[str]:
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
    return command


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
        sources = native.module_sources(name)
        if not sources:
            print(f"setup.py: {name}: no sources yet, skipped")
            return True
        start_ns = time.time_ns()
        target = self._target(name)
        work = ROOT / "build" / target.parent.name / sysconfig.get_config_var("SOABI") / name
        cxx, extra = compiler(), shlex.split(os.environ.get("CXXFLAGS", ""))
        includes = include_flags()
        units = []
        for source in sources:
            relative = source.relative_to(ROOT)
            out = work / relative.with_suffix(".o")
            dependency_flags = ["-MMD", "-MF", str(out.with_suffix(".d"))]
            command = [
                *cxx,
                *CXX_FLAGS,
                *includes,
                *extra,
                *dependency_flags,
                "-c",
                str(relative),
                "-o",
                str(out),
            ]
            units.append(Compile(source, out, command))
        todo = [unit for unit in units if self.force or not unit.is_current()]
        objects = [str(unit.object) for unit in units]
        link = [*cxx, *LINK_FLAGS, *objects, *shlex.split(os.environ.get("LDFLAGS", "")), "-o"]
        link_record = work / "link.cmd"
        is_linked = target.exists() and link_record.exists() and link_record.read_text() == shlex.join(link)
        if todo or not is_linked:
            link_record.unlink(missing_ok=True)  # until all of it succeeds, the next run has to link
            print(f"setup.py: {name}: compiling {len(todo)} of {len(units)} files", flush=True)
            with ThreadPoolExecutor(int(self.parallel or os.cpu_count() or 1)) as pool:
                errors = [text for text in pool.map(Compile.run, todo) if text]
            if errors:
                print("\n".join(errors), file=sys.stderr, flush=True)
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.with_name(
                f".{target.name}.{os.getpid()}"
            )  # replaced whole: another process may have it open
            result = subprocess.run([*link, str(fresh)], cwd=ROOT)
            if result.returncode != 0:
                return False
            os.replace(fresh, target)
            link_record.write_text(shlex.join(link))
        inputs = {path for unit in units for path in unit.inputs() if path.is_relative_to(ROOT / "csrc")}
        headers = sorted(str(path.relative_to(ROOT / "csrc")) for path in inputs - set(sources))
        # an edit while the compiler ran leaves a module that matches no state of the tree: recorded as stale
        is_edited = todo and any(path.stat().st_mtime_ns > start_ns for path in inputs)
        digest = "" if is_edited else native.source_digest(name, headers)
        record = {
            "digest": digest,
            "headers": headers,
            "compiler": shlex.join(cxx),
            "flags": shlex.join([*CXX_FLAGS, *extra]),
        }
        native.record_path(target).write_text(json.dumps(record, indent=1) + "\n")
        print(f"setup.py: {name}: {target.relative_to(ROOT)}")
        return True

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
