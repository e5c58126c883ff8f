"""GrammarBuilder: compiled grammars for requests. Equal ones are built once and kept, up to a limit."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.grammar import Vocabulary
from deepinfer.structured_output.process import Build, BuilderProcess, BuildLimits
from deepinfer.structured_output.request import GrammarSpec

__all__ = ["BuildLimits", "BuilderStats", "GrammarBuilder", "GrammarError", "Ticket"]


@dataclass
class BuilderStats:
    """Totals since the start.

    Attributes:
        num_requests: grammars asked for.
        num_hits: of these, found compiled; num_joined: found being compiled for somebody else.
        num_builds, num_failed: builds that ended, and those of them without a grammar.
        build_seconds: from start to end, summed.
        num_evicted: grammars dropped to stay within the limit.
    """

    num_requests: int = 0
    num_hits: int = 0
    num_joined: int = 0
    num_builds: int = 0
    num_failed: int = 0
    build_seconds: float = 0.0
    num_evicted: int = 0


class Ticket:
    """A request's claim to a grammar."""

    def __init__(self, builder: GrammarBuilder, key: str, build: Build | None, grammar: Any = None) -> None:
        self._builder = builder
        self._key = key
        self._grammar = grammar
        self.build = build

    def done(self) -> bool:
        """Whether `result` has something to say; never blocks."""
        return self.build is None or self.build.result.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """The `xgrammar.CompiledGrammar`, once it is there.

        Raises:
            GrammarError: there is none, and why.
            TimeoutError: not yet.
        """
        if self._grammar is None:
            self._grammar = self.build.result.result(timeout_s)[0]
        return self._grammar

    def give_up(self) -> None:
        """The request has gone: what nobody else waits for is not built."""
        if self.build is not None:
            self._builder.leave(self._key, self.build)


class GrammarBuilder:
    """Builds grammars in processes of their own, beside the steps.

    The first request starts the builder's process. `request` never blocks and may be called by any thread.

    Args:
        vocabulary: makes what grammars are compiled for, when the first one is; called by another thread.
        limits: of each build.
        cache_bytes: most bytes of compiled grammars that are kept; 0 keeps none, negative keeps all.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: BuildLimits, cache_bytes: int) -> None:
        self.stats = BuilderStats()
        self.process = BuilderProcess(vocabulary, limits)
        # A thread keeps the process object, so nobody else has to keep this one.
        self._finalizer = weakref.finalize(self, self.process.stop)
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # the newest use last
        self._num_bytes = 0
        self._building: dict[str, tuple[Build, int]] = {}  # with the number of requests that wait
        self._news = threading.Event()

    @property
    def num_bytes(self) -> int:
        """Of the grammars that are kept."""
        return self._num_bytes

    @property
    def num_building(self) -> int:
        """Grammars that are queued or being built."""
        return len(self._building)

    def request(self, spec: GrammarSpec) -> Ticket:
        """A claim to a compiled grammar, which may be fulfilled at once."""
        key = spec.cache_key
        with self._lock:
            self.stats.num_requests += 1
            if key in self._cache:
                self.stats.num_hits += 1
                self._cache.move_to_end(key)
                return Ticket(self, key, None, self._cache[key][0])
            if key in self._building:
                self.stats.num_joined += 1
                build, count = self._building[key]
                self._building[key] = build, count + 1
                return Ticket(self, key, build)
            build = self.process.submit(spec.kind, spec.source)
            self._building[key] = build, 1
        this = weakref.ref(self)

        def finish(_: Any) -> None:
            builder = this()
            if builder is not None:
                builder._finish(key, build)

        build.result.add_done_callback(finish)
        return Ticket(self, key, build)

    def leave(self, key: str, build: Build) -> None:
        """A request that waited has gone."""
        with self._lock:
            known, count = self._building.get(key, (None, 0))
            if known is not build:
                return
            if count > 1:
                self._building[key] = build, count - 1
                return
            del self._building[key]  # who asks now gets a new build
        self.process.give_up(build)

    def wait(self, timeout_s: float) -> None:
        """Until a build has ended since the last call, or the time is over."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        """End everything; grammars that were handed out stay usable."""
        self._finalizer.detach()
        self.process.close()
        with self._lock:
            self._cache.clear()
            self._num_bytes = 0

    def _finish(self, key: str, build: Build) -> None:
        with self._lock:
            if self._building.get(key, (None, 0))[0] is build:
                del self._building[key]
            self.stats.num_builds += 1
            self.stats.build_seconds += build.seconds
            if build.result.exception() is not None:
                self.stats.num_failed += 1
            else:
                self._keep(key, *build.result.result())
        self._news.set()

    def _keep(self, key: str, grammar: Any, num_bytes: int) -> None:
        limit = self._cache_bytes
        if limit == 0 or 0 < limit < num_bytes or key in self._cache:
            return
        self._cache[key] = grammar, num_bytes
        self._num_bytes += num_bytes
        while 0 < limit < self._num_bytes:
            self._num_bytes -= self._cache.popitem(last=False)[1][1]
            self.stats.num_evicted += 1
