"""The engine's end of the grammar builder: a thread that keeps the process, its builds and their deadlines.

Nothing here blocks a step: requests are queued, results are futures. The thread alone touches the pipes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.frames import FrameReader, frame_bytes
from deepinfer.structured_output.grammar import Vocabulary
from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

START_SECONDS = 120.0  # the process may take to load its libraries
GRACE_SECONDS = 5.0  # it may take to end a build whose time is over
MAX_ATTEMPTS = 2  # of a build whose process went away


@dataclass(frozen=True)
class BuildLimits:
    """What one build may use.

    Attributes:
        num_processes: builds at once.
        timeout_s: seconds of a build, from its start.
        memory_bytes: address space beside the libraries.
        result_bytes: of a compiled grammar as text.
    """

    num_processes: int
    timeout_s: float
    memory_bytes: int
    result_bytes: int = 128 << 20


@dataclass
class Build:
    """A grammar to be built.

    Attributes:
        result: `xgrammar.CompiledGrammar` and the bytes it takes, or a GrammarError.
        pid: of the process that builds it, once it runs.
        seconds: from its start to its end.
    """

    id: int
    kind: str
    source: str
    result: Future[tuple[Any, int]] = field(default_factory=Future)
    pid: int | None = None
    start: float = 0.0
    seconds: float = 0.0
    num_attempts: int = 0
    is_given_up: bool = False
    is_killed: bool = False


class BuilderProcess:
    """Keeps one builder process running while there is anything to build.

    Args:
        vocabulary: makes what grammars are compiled for; called by the thread. A ValueError of it is every
            build's.
        limits: of each build.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: BuildLimits) -> None:
        self._make_vocabulary = vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: deque[Build] = deque()
        self._running: dict[int, Build] = {}
        self._num_builds = 0
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._wake_read = self._wake_write = -1  # a pipe as long as the thread runs
        # Of the thread alone:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._reader = FrameReader()
        self._out = bytearray()
        self._deadline = 0.0  # of the process's start
        self._vocabulary: Vocabulary | None = None
        self._info: Any = None  # the vocabulary as xgrammar sees it

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, kind: str, source: str) -> Build:
        """Queue a build; never blocks."""
        with self._lock:
            self._num_builds += 1
            build = Build(self._num_builds, kind, source)
            if self._is_stopping:
                build.result.set_exception(GrammarError("the engine is closed"))
                return build
            self._waiting.append(build)
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe()
                os.set_blocking(self._wake_write, False)
                self._thread = threading.Thread(target=self._run, name="deepinfer-grammars", daemon=True)
                self._thread.start()
        self._wake()
        return build

    def give_up(self, build: Build) -> None:
        """Nobody wants the result any more: end the build."""
        build.is_given_up = True
        self._wake()

    def close(self) -> None:
        """End the process and everything it builds."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """`close` without waiting, for an engine that nobody closed."""
        with self._lock:
            self._is_stopping = True
        self._wake()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it is awake
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._start_builds()
                self._exchange()
                self._check_time()
        except BaseException as error:  # nobody may wait for ever
            with self._lock:
                self._is_stopping = True
            self._fail_all(f"the grammar builder failed: {error!r}")
            raise
        finally:
            self._end_process()
            self._fail_all("the engine is closed")
            with self._lock:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    def _start_builds(self) -> None:
        with self._lock:
            has_work = bool(self._waiting)
        if has_work and self._process is None:
            try:
                self._start_process()
            except (ValueError, OSError, ImportError) as error:
                self._end_process()
                self._fail_all(f"structured output cannot work here: {error}")
                return
        while self._is_ready and len(self._running) < self._limits.num_processes:
            with self._lock:
                if not self._waiting:
                    return
                build = self._waiting.popleft()
            if build.is_given_up:
                build.result.set_exception(GrammarError("given up"))
                continue
            build.start, build.pid = time.monotonic(), None
            build.num_attempts += 1
            self._running[build.id] = build
            header = {
                "op": "build",
                "id": build.id,
                "kind": build.kind,
                "timeout_s": self._limits.timeout_s,
                "memory_bytes": self._limits.memory_bytes,
                "max_bytes": self._limits.result_bytes,
            }
            self._send(header, build.source.encode())

    def _start_process(self) -> None:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        paths = [os.getcwd() if path == "" else path for path in sys.path]
        command = [sys.executable, "-P", "-m", "deepinfer.structured_output.worker", str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # the terminal's signals are for the engine
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        self._reader, self._out, self._is_ready = FrameReader(), bytearray(), False
        self._deadline = time.monotonic() + START_SECONDS
        vocabulary = self._vocabulary
        header = {
            "op": "hello",
            "size": vocabulary.size,
            "eos_token_id": vocabulary.eos_token_id,
            "lengths": [len(token) for token in vocabulary.tokens],
        }
        self._send(header, b"".join(vocabulary.tokens))
        if self._info is None:
            self._info = vocabulary.info()  # while the process loads the same

    def _send(self, header: dict[str, Any], data: bytes = b"") -> None:
        self._out += frame_bytes(header, data)

    def _exchange(self) -> None:
        """Wait for something to happen, and take it in."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            process = self._process
            if process is not None:
                selector.register(process.stdout, selectors.EVENT_READ)
                if self._out:
                    selector.register(process.stdin, selectors.EVENT_WRITE)
            events = {key.fileobj for key, _ in selector.select(None if process is None else 1.0)}
        if self._wake_read in events:
            os.read(self._wake_read, 1 << 12)
        if process is None:
            return
        try:
            if process.stdin in events:
                del self._out[: os.write(process.stdin.fileno(), self._out[: 1 << 20])]
            data = os.read(process.stdout.fileno(), 1 << 20) if process.stdout in events else None
        except BrokenPipeError:
            data = b""
        if data == b"":
            self._lose_process("the grammar builder's process has gone away")
        elif data is not None:
            for header, payload in self._reader.feed(data):
                self._take(header, payload)

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        """A frame of the process."""
        if header["op"] == "ready":
            self._is_ready = True
        elif header["op"] == "missing":
            message = f"structured output needs the package xgrammar: {header['message']}"
            self._end_process()
            self._fail_all(message)
        elif header["op"] == "started":
            self._running[header["id"]].pid = header["pid"]
        elif header["op"] == "outcome":
            build = self._running.pop(header["id"])
            build.seconds = time.monotonic() - build.start
            try:
                build.result.set_result(self._grammar(header, payload))
            except GrammarError as error:
                build.result.set_exception(error)

    def _grammar(self, header: dict[str, Any], payload: bytes) -> tuple[Any, int]:
        """The compiled grammar of an outcome."""
        status = header["status"]
        if status == "ok":
            import xgrammar

            grammar = xgrammar.CompiledGrammar.deserialize_json(payload.decode(), self._info)
            return grammar, max(grammar.memory_size_bytes, len(payload) // 4)
        limits = self._limits
        raise GrammarError(
            {
                "timeout": f"it did not compile within {limits.timeout_s:g} seconds "
                "(DEEPINFER_XGRAMMAR_TIMEOUT): make it smaller",
                "memory": f"it needs more than {limits.memory_bytes >> 20} MiB to compile: make it smaller",
                "size": f"compiled it takes more than {limits.result_bytes >> 20} MiB: make it smaller",
                "crash": f"the compiler crashed on it ({_signal_name(header.get('code', 0))}): "
                "make it smaller",
                "killed": "nobody waits for it any more",
                "refused": header.get("message"),
            }.get(status)
            or f"it does not compile: {header.get('message', status)}"
        )

    def _check_time(self) -> None:
        """End builds that nobody wants, and a process that does not do its part."""
        now = time.monotonic()
        late = now - self._limits.timeout_s - GRACE_SECONDS
        for build in self._running.values():
            if build.is_given_up and not build.is_killed:
                build.is_killed = True
                self._send({"op": "kill", "id": build.id})
        if self._process is not None and not self._is_ready and now > self._deadline:
            self._end_process()
            self._fail_all(f"the grammar builder did not start within {START_SECONDS:g} seconds")
        elif any(build.start < late for build in self._running.values()):
            self._lose_process("the grammar builder's process does not answer")

    def _lose_process(self, reason: str) -> None:
        """Whoever caused it gets no third try, and the others get a second one."""
        logger.warning("%s; %d grammars are affected", reason, len(self._running))
        was_starting = not self._is_ready
        self._end_process()
        for build in self._running.values():
            if build.num_attempts < MAX_ATTEMPTS:
                with self._lock:
                    self._waiting.append(build)
            else:
                build.result.set_exception(GrammarError(f"{reason} twice while it was compiled"))
        self._running.clear()
        if was_starting:
            self._fail_all(f"{reason} before it compiled anything")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        self._is_ready = False
        if process is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            builds = [*self._running.values(), *self._waiting]
            self._waiting.clear()
        self._running.clear()
        for build in builds:
            if not build.result.done():
                build.result.set_exception(GrammarError(reason))


def _signal_name(code: int) -> str:
    """Of an exit code as `os.waitstatus_to_exitcode` gives it."""
    try:
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"
