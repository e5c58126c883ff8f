"""Swap: preempted sequences wait in host memory and go on with the bytes that they had, without a prefill.

    core         preempts: keeps the sequence's tokens and drafts, gives its blocks and its slot to others
    copy_out     executor.run(read)     behind the steps that wrote them, in front of who writes to them next
    core         gives blocks and a slot again
    copy_in      executor.run(write)    behind the copy out, in front of the plan that goes on with it

Which sequences are worth it, and that they stay below the limit, is the core's decision
(csrc/core/swap_pool.hpp).
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from deepinfer.engine.executor import Executor, WatchedWork
from deepinfer.runtime.sequence_bytes import SequenceBytes, SequenceCopies


class HostSwap:
    """The host's copies of preempted sequences.

    Args:
        core: the engine's core.
        executor: its device queue.
        pools: what the device keeps of sequences.

    Attributes:
        out_bytes, in_bytes: copied since the start.
    """

    def __init__(self, core: Any, executor: Executor, pools: SequenceBytes) -> None:
        self.out_bytes = self.in_bytes = 0
        self._core = core
        self._executor = executor
        self._pools = pools
        self._held: dict[int, Future[SequenceCopies]] = {}  # by sequence id
        self._writes = WatchedWork()

    @property
    def num_held(self) -> int:
        """Sequences that are here."""
        return len(self._held)

    def copy_out(self) -> None:
        """Queue copies of what was preempted. Call before anybody takes blocks and before a launch."""
        outs, drops = self._core.take_swaps()
        for seq_id, blocks, slot, num_scores in outs:
            self._held[seq_id] = self._executor.run(self._read, blocks, slot, num_scores)
        for seq_id in drops:
            self._held.pop(seq_id, None)

    def copy_in(self) -> None:
        """Give room to whom there is room for, before a plan."""
        if not self._held:
            return
        for seq_id, blocks, slot in self._core.admit_swapped():
            self._writes.add(self._executor.run(self._write, blocks, slot, self._held.pop(seq_id)))
        self.check()

    def check(self) -> None:
        """Raise what a copy has raised. Call before the commit of a step: those in front of it have run."""
        self._writes.check()

    def after_interruption(self) -> None:
        """A step ended early: what was not copied to its end is recomputed. Nothing may be queued."""
        whole = [seq_id for seq_id, copies in self._held.items() if copies.done() and not copies.exception()]
        kept = self._core.keep_swaps(whole)
        self._writes.clear()  # the core restarts whoever was to have them
        self._held = {seq_id: self._held[seq_id] for seq_id in kept}

    def close(self) -> None:
        """Let go of everything."""
        self._held.clear()
        self._writes.clear()

    def _read(self, blocks: np.ndarray, slot: int, num_scores: int) -> SequenceCopies:
        copies = self._pools.read(blocks, slot, num_scores)
        self.out_bytes += _num_bytes(copies)
        return copies

    def _write(self, blocks: np.ndarray, slot: int, read: Future[SequenceCopies]) -> None:
        copies = rows, state, scores = read.result()  # it ran before in the same queue
        self._pools.write(blocks, slot, rows, state, scores)
        self.in_bytes += _num_bytes(copies)


def _num_bytes(copies: SequenceCopies) -> int:
    return sum(array.nbytes for array in copies)


def measure_copy_rate(pools: SequenceBytes, num_blocks: int = 8, rounds: int = 3) -> float:
    """Bytes per second between the pools and the host, both ways; of the fastest of some rounds.

    Copies what belongs to nobody, block 0 and slot 0, so call it while nothing runs.
    """
    blocks = np.zeros(num_blocks, np.int32)
    rate = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        rows, state, scores = pools.read(blocks, 0, 0)
        pools.write(blocks, 0, rows, state, scores)
        rate = max(rate, 2 * _num_bytes((rows, state, scores)) / (time.perf_counter() - start))
    return rate
