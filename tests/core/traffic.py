"""Requests that come, are preempted and go at random, for traces that compare outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from tests.core.fake_device import Loop
from tests.core.harness import VOCAB
from tests.core.test_whole_traces import Request, make_requests

MAX_STEPS = 20_000


def related_requests(rng: random.Random, count: int) -> list[Request]:
    """Requests whose prompts repeat, begin alike, or go on from one another."""
    made: list[Request] = []
    for request in make_requests(rng, count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
        if made and rng.random() < 0.8:
            older = rng.choice(made[-6:]).prompt.tolist()
            prompt = older
            if rng.random() < 0.5:
                prompt = older[: rng.randint(len(older) // 2, len(older))] + prompt[: rng.randint(1, 9)]
        made.append(Request(request.seed, np.array(prompt[:70], np.int32), request.fields))
    return made


class Traffic:
    """Adds, preempts and aborts the requests of a loop.

    Args:
        preempted: share of steps in front of which a request is preempted.

    Attributes:
        ids: requests that were added and not aborted.
    """

    def __init__(self, rng: random.Random, loop: Loop, requests: list[Request], preempted: float) -> None:
        self.ids: dict[int, Request] = {}
        self._rng = rng
        self._loop = loop
        self._requests = requests
        self._preempted = preempted

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to run, until nothing is left to do."""
        rng, engine = self._rng, self._loop.engine
        for number in range(MAX_STEPS):
            if not (self._requests or engine.has_unfinished or self._loop.in_flight is not None):
                return
            for _ in range(rng.choice([0, 0, 0, 1, 8])):
                if self._requests:
                    request = self._requests.pop(0)
                    self.ids[self._loop.add(request.seed, request.prompt, **request.fields)] = request
            if self.ids and rng.random() < self._preempted:
                engine.preempt(rng.choice(list(self.ids)))
            if self.ids and rng.random() < 0.02:
                victim = rng.choice(list(self.ids))
                if engine.abort(victim):
                    del self.ids[victim]
            yield number
        raise AssertionError(f"not at an end after {MAX_STEPS} steps")
