"""Finds and loads the two native modules; the only place that knows where they lie and what made them.

Standard library only: `setup.py` loads this file by path before anything is installed. A module that is
absent, built for another Python or older than its sources is one `NativeBuildError` that names `./build.sh`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

ACCELERATORS = ("cpu", "nvidia", "ascend")

# module -> patterns below csrc/ of the files compiled into it; `bind_cpu*` belongs to _cpu_ops only
MODULES: dict[str, tuple[str, ...]] = {
    "_core": ("core/*.cpp", "bindings/*.cpp"),
    "_cpu_ops": ("cpu/*.cpp", "bindings/bind_cpu*.cpp"),
}

_PACKAGE = Path(__file__).resolve().parent
_CSRC = _PACKAGE.parent / "csrc"


class NativeBuildError(ImportError):
    """A native module is absent or does not fit; the message says what to run."""


def load_core() -> ModuleType:
    """The scheduler, `csrc/core` (numpy arrays in, numpy arrays out)."""
    return _load("_core")


def load_cpu_ops() -> ModuleType:
    """The CPU kernels, `csrc/cpu` (addresses or numpy arrays)."""
    return _load("_cpu_ops")


def detect_accelerator() -> str:
    """What this machine has: "ascend" or "nvidia" by device files or their tools, else "cpu"."""
    if os.path.exists("/dev/davinci_manager") or shutil.which("npu-smi"):
        return "ascend"
    if os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi"):
        return "nvidia"
    return "cpu"


def build_accelerator() -> str:
    """The accelerator a build is for: `DEEPINFER_ACCELERATOR`; unset or "auto" is what the machine has."""
    name = os.environ.get("DEEPINFER_ACCELERATOR") or "auto"
    if name == "auto":
        return detect_accelerator()
    if name not in ACCELERATORS:
        raise ValueError(f"DEEPINFER_ACCELERATOR={name}: choose one of auto, {', '.join(ACCELERATORS)}")
    return name


def module_path(accelerator: str, name: str) -> Path:
    """Where a module of this interpreter and machine lies, built or not."""
    folder = f"{accelerator}-{platform.machine()}"
    return _PACKAGE / "_so" / folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def record_path(module: Path) -> Path:
    """The note beside a built module that says what it was built from."""
    return module.with_suffix(".json")


def module_sources(name: str) -> list[Path]:
    """The .cpp files of a module as they are in the tree now, sorted; empty where there is no tree."""
    found = {path for pattern in MODULES[name] for path in _CSRC.glob(pattern)}
    return sorted(path for path in found if name == "_cpu_ops" or not path.name.startswith("bind_cpu"))


def source_digest(name: str, headers: list[str]) -> str:
    """SHA-256 over names and bytes of a module's sources and of the headers (relative to csrc/) they include.

    Raises FileNotFoundError when one of the headers is gone.
    """
    digest = hashlib.sha256()
    for path in [*module_sources(name), *(_CSRC / header for header in sorted(headers))]:
        data = path.read_bytes()
        digest.update(f"{path.relative_to(_CSRC)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


@functools.cache
def _load(name: str) -> ModuleType:
    path = _find(name)
    full_name = f"deepinfer.{name}"
    spec = importlib.util.spec_from_file_location(full_name, path)
    assert spec is not None and spec.loader is not None, f"{path=}"
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NativeBuildError(f"{path} does not load ({error}); run ./build.sh") from error
    sys.modules[full_name] = module
    return module


def _find(name: str) -> Path:
    """The built module; the accelerator's own folder first, then any other of this machine type.

    The modules are host code, so a build made for another accelerator serves as well.
    """
    order = dict.fromkeys((build_accelerator(), *ACCELERATORS))
    path = next((p for p in (module_path(a, name) for a in order) if p.exists()), None)
    if path is None:
        others = sorted(p.name for p in (_PACKAGE / "_so").glob(f"*-{platform.machine()}/{name}.*.so"))
        python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        if others:
            raise NativeBuildError(
                f"native module {name} is not built for {python} (only {', '.join(others)} exists); "
                "run ./build.sh in this environment"
            )
        raise NativeBuildError(f"native module {name} is not built; run ./build.sh")
    if is_stale(name, path):
        raise NativeBuildError(f"native module {name} is older than its sources in csrc/; run ./build.sh")
    return path


def is_stale(name: str, path: Path) -> bool:
    """Whether a built module differs from the sources beside it; a wheel has none and is never stale."""
    if not module_sources(name):
        return False
    try:
        record = json.loads(record_path(path).read_text())
        return record["digest"] != source_digest(name, record["headers"])
    except (OSError, ValueError, KeyError):
        return True
