"""The grammar builder's process: python -m deepinfer.structured_output.worker <pid of the engine>.

It loads xgrammar once and forks for every grammar, so that a build can crash, hang or eat memory without
harming anything but itself, and ending it costs nothing.

    engine --- build id, kind, source ------>  this process  --- fork --->  a build
           <-- outcome of a build ----------                 <-- pipe ----

It ends with the engine, however that ends: its end of the pipe closes, or its parent is another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.machinery
import os
import resource
import selectors
import signal
import sys
import time
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.frames import FrameReader, write_frame
from deepinfer.structured_output.grammar import Vocabulary, compile_source, error_text
from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.source import prepare

if TYPE_CHECKING:
    import xgrammar

PARENT_CHECK_S = 1.0  # between two looks at whether the engine is still there
STACK_BYTES = 4 << 20  # of a build: half of what the engine's threads have, for it does the same later
NICENESS = 5  # builds give way to steps
TRIAL_TOKENS = 48
TRIAL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


@dataclass
class _Build:
    """A forked process.

    Attributes:
        ended: why it was killed, if it was.
    """

    id: int
    pid: int
    pipe: int
    deadline: float
    max_bytes: int
    reader: FrameReader = field(default_factory=FrameReader)
    outcome: tuple[dict[str, Any], bytes] | None = None
    ended: str | None = None


class Server:
    """Runs builds at the engine's word.

    Args:
        requests, results: pipes from and to the engine.
        parent: the engine's process.
    """

    def __init__(self, requests: int, results: int, parent: int) -> None:
        self._requests = requests
        self._results = results
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, None)
        self._reader = FrameReader()
        self._builds: dict[int, _Build] = {}
        self._info: xgrammar.TokenizerInfo | None = None

    def run(self) -> None:
        """Serve until the engine is gone."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(self._patience()):
                if key.data is None:
                    data = os.read(self._requests, 1 << 20)
                    if not data:
                        return
                    for header, payload in self._reader.feed(data):
                        self._take(header, payload)
                else:
                    self._read(key.data)
            now = time.monotonic()
            for build in self._builds.values():
                if build.ended is None and now >= build.deadline:
                    self._kill(build, "timeout")

    def _patience(self) -> float:
        now = time.monotonic()
        waits = [build.deadline - now for build in self._builds.values() if build.ended is None]
        return max(0.0, min([PARENT_CHECK_S, *waits]))

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        if header["op"] == "hello":
            tokens, start = [], 0
            for length in header["lengths"]:
                tokens.append(payload[start : start + length])
                start += length
            self._info = Vocabulary(tokens, header["size"], header["eos_token_id"]).info()
            gc.freeze()  # or every build would copy what a collection touches
            write_frame(self._results, {"op": "ready"})
        elif header["op"] == "build":
            self._start(header, payload)
        elif header["op"] == "kill" and header["id"] in self._builds:
            self._kill(self._builds[header["id"]], "killed")

    def _start(self, header: dict[str, Any], payload: bytes) -> None:
        pipe, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(pipe)
            os.close(self._requests)
            os.close(self._results)
            run_build(self._info, header, payload.decode(), end)
        os.close(end)
        deadline = time.monotonic() + header["timeout_s"]
        build = _Build(header["id"], pid, pipe, deadline, header["max_bytes"])
        self._builds[build.id] = build
        self._selector.register(pipe, selectors.EVENT_READ, build)
        write_frame(self._results, {"op": "started", "id": build.id, "pid": pid})

    def _read(self, build: _Build) -> None:
        data = os.read(build.pipe, 1 << 20)
        if data:
            frames = build.reader.feed(data)
            build.outcome = frames[-1] if frames else build.outcome
            if build.reader.num_bytes > build.max_bytes:
                self._kill(build, "size")
            return
        self._selector.unregister(build.pipe)
        os.close(build.pipe)
        del self._builds[build.id]
        status = os.waitstatus_to_exitcode(os.waitpid(build.pid, 0)[1])
        if build.ended is not None:
            header, payload = {"status": build.ended}, b""
        elif build.outcome is not None:
            header, payload = build.outcome
        else:
            header, payload = {"status": "crash", "code": status}, b""
        write_frame(self._results, {**header, "op": "outcome", "id": build.id}, payload)

    def _kill(self, build: _Build, reason: str) -> None:
        """Not reaped before its pipe closes, so its id is its own."""
        build.ended = build.ended or reason
        os.kill(build.pid, signal.SIGKILL)


def run_build(info: xgrammar.TokenizerInfo, header: dict[str, Any], source: str, pipe: int) -> None:
    """In a process of its own: compile, show that the result can be used, hand it over, and end."""
    try:
        _die_with_parent()
        os.nice(NICENESS)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_STACK, STACK_BYTES)
        _limit(resource.RLIMIT_AS, _address_space() + header["memory_bytes"])
        outcome = _outcome(info, header["kind"], source, header["max_bytes"])
        write_frame(pipe, *outcome)
    finally:
        os._exit(0)


def _outcome(
    info: xgrammar.TokenizerInfo, kind: str, source: str, max_bytes: int
) -> tuple[dict[str, Any], bytes]:
    import xgrammar

    try:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        text = compile_source(compiler, prepare(GrammarSpec(kind, source))).serialize_json()
        if len(text) > max_bytes:
            return {"status": "size"}, b""
        trial(xgrammar.CompiledGrammar.deserialize_json(text, info), info)
        return {"status": "ok"}, text.encode()
    except GrammarError as error:
        return {"status": "refused", "message": str(error)}, b""
    except (MemoryError, RecursionError):
        return {"status": "memory"}, b""
    except Exception as error:
        message = error_text(error)
        if "bad_alloc" in message or "length_error" in message:
            return {"status": "memory"}, b""
        return {"status": "error", "message": message}, b""


def trial(grammar: xgrammar.CompiledGrammar, info: xgrammar.TokenizerInfo) -> None:
    """Walk a little way through a grammar: what crashes a matcher should do so here."""
    import random

    import numpy as np
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    choose = random.Random(0)
    words = np.zeros((1, (info.vocab_size + 31) // 32), dtype=np.int32)
    start = time.monotonic()
    for _ in range(TRIAL_TOKENS):
        matcher.fill_next_token_bitmask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: info.vocab_size])
        if not len(allowed):
            raise ValueError("it can be neither continued nor ended with this vocabulary")
        matcher.accept_token(int(choose.choice(allowed)))
        if matcher.is_terminated() or time.monotonic() - start > TRIAL_SECONDS:
            return


def load_library() -> None:
    """Import xgrammar without torch and transformers.

    Compiling needs nothing of them, and they take most of the import's time and memory. Only this process
    does so; should they be needed after all, they are imported.
    """
    try:
        sys.modules["torch"] = None  # then tvm_ffi does without
        import tvm_ffi  # noqa: F401

        for name in ("torch", "transformers"):
            sys.modules[name] = _StandIn(name)
        import xgrammar
    except Exception:
        for name in list(sys.modules):
            if name.partition(".")[0] in ("torch", "transformers", "xgrammar"):
                del sys.modules[name]
        import xgrammar  # noqa: F401


class _StandIn(types.ModuleType):
    """A module of which any name can be imported and called, and nothing works."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def _die_with_parent() -> None:
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # where there is no prctl the pipes do it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    parent = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine
    results = os.dup(1)
    os.dup2(2, 1)  # whatever is printed is no frame
    try:
        load_library()  # before the first fork
    except ImportError as error:
        write_frame(results, {"op": "missing", "message": str(error)})
        return
    Server(0, results, parent).run()


if __name__ == "__main__":
    main()
