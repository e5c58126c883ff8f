"""StepGrammars: what grammars do in one step, seen from the thread that launches the device's work.

    before the forward    warm      first masks of new sequences
    sample                mask      masks of the rows, most of them made before
    choose                judge     rows that broke their grammar, tokens that end one
    verify                advance   by the emitted tokens, then the mask behind them
    draft                 masks     of each draft, chose: advance by it, then the mask behind it

Work that nothing waits for yet is done by one other thread: under the drafter's and the next step's forward.
A sequence's grammar is touched by that thread alone while something of it is queued there, and otherwise by
the device's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.inputs import SamplingInputs, TokenMasks
from deepinfer.sampling.sampler import Fault
from deepinfer.structured_output.matcher import allows
from deepinfer.structured_output.sequence import SequenceGrammar


class GrammarThread:
    """Does grammars' work in order, beside the thread that asks for it.

    Attributes:
        seconds: time it worked, with what the device's thread did itself.
        wait_seconds: of this, time for which the device's thread waited.
        num_steps: steps with structured rows.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self.seconds = 0.0
        self.wait_seconds = 0.0
        self.num_steps = 0

    def post(self, work: Callable[..., None], *args: Any) -> None:
        """Queue work; the caller may call `settle` at any time."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-masks")
        self._last = self._pool.submit(self._timed, work, *args)

    def settle(self) -> None:
        """Wait until everything queued is done."""
        last, self._last = self._last, None
        if last is not None:
            start = time.perf_counter()
            last.result()
            self.wait_seconds += time.perf_counter() - start

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """Do work now, behind what is queued."""
        self.settle()
        start = time.perf_counter()
        self._timed(work, *args)
        self.wait_seconds += time.perf_counter() - start

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def _timed(self, work: Callable[..., None], *args: Any) -> None:
        start = time.perf_counter()
        work(*args)
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class GrammarRows:
    """A structured sequence's part of a step.

    Attributes:
        place: of the sequence in the step.
        first_row: its first sampled row; num_rows of them.
        num_outputs: its committed output tokens.
        is_forced: some of its tokens may be forced.
    """

    grammar: SequenceGrammar
    place: int
    first_row: int
    num_rows: int
    num_outputs: int
    is_forced: bool


class StepGrammars:
    """The structured sequences of one step.

    Args:
        thread: the engine's.
        sequences: in ascending order of place.
    """

    def __init__(self, thread: GrammarThread, sequences: Sequence[GrammarRows]) -> None:
        self._thread = thread
        self._sequences = sequences
        self._masks: dict[int, np.ndarray] = {}  # by row
        self._owner: dict[int, SequenceGrammar] = {}  # likewise

    def mask(self, inputs: SamplingInputs) -> SamplingInputs:
        """The step's parameters with the masks of its rows."""
        self._thread.num_steps += 1
        self._thread.run(self._prepare, inputs.host["draft_ids"])
        ends = [row for row, mask in self._masks.items() if self._owner[row].must_end(mask)]
        if ends:  # a grammar that is complete ends the output, however short
            inputs = inputs.without_bans(ends)
        return inputs.with_masks(TokenMasks.of(self._masks, inputs.device))

    def judge(self, token_ids: Tensor, faults: Tensor) -> tuple[Tensor, np.ndarray | None]:
        """What the chosen tokens mean to the grammars.

        Args:
            token_ids: [R] int32.
            faults: [R] uint8.

        Returns:
            faults with the rows that cannot go on; and [R] uint8, 1 where the token ends a grammar and so the
            output, None where none does.
        """
        tokens = token_ids.cpu().numpy()
        broken = []
        for part in self._sequences:
            rows = range(part.first_row, part.first_row + part.num_rows)
            if part.grammar.failure is not None:
                broken += rows
            elif part.is_forced:
                broken += [row for row in rows if row in self._masks and not self._allows(row, tokens[row])]
        if broken:
            faults = faults.clone()
            rows = torch.tensor(broken, device=faults.device)
            faults[rows] = torch.where(faults[rows] == 0, int(Fault.GRAMMAR), faults[rows])
        ends = [row for row in self._masks if int(tokens[row]) in self._owner[row].stop_token_ids]
        if not ends:
            return faults, None
        marks = np.zeros(tokens.shape[0], dtype=np.uint8)
        marks[ends] = 1
        return faults, marks

    def advance(self, emitted: Tensor, num_emitted: Tensor) -> None:
        """Go on by what the step emitted: [S, k + 1] int32, of which the first [S] int32 count."""
        tokens, counts = emitted.cpu().numpy(), num_emitted.cpu().numpy()
        moves = [
            (part.grammar, tokens[part.place, : counts[part.place]].tolist()) for part in self._sequences
        ]
        self._thread.post(_advance, moves)

    def drafting(self, places: np.ndarray, device: torch.device) -> SequenceDrafts:
        """For the drafts of the sequences at some places [n] of the step, sampled on a device."""
        index = {part.place: part for part in self._sequences}
        chosen = [(n, index[place].grammar) for n, place in enumerate(places.tolist()) if place in index]
        return SequenceDrafts(self._thread, chosen, device)

    def _prepare(self, draft_ids: np.ndarray) -> None:
        for part in self._sequences:
            first = part.first_row
            drafts = draft_ids[first : first + part.num_rows - 1].tolist()
            if -1 in drafts:
                drafts = drafts[: drafts.index(-1)]
            for row, mask in enumerate(part.grammar.prepare(part.num_outputs, drafts), start=first):
                if mask is not None:
                    self._masks[row] = mask
                    self._owner[row] = part.grammar

    def _allows(self, row: int, token: int) -> bool:
        return allows(self._masks[row], int(token))


class SequenceDrafts:
    """The grammars of n drafting sequences; the `DraftGrammars` of a `DraftChooser`."""

    def __init__(
        self,
        thread: GrammarThread,
        sequences: Sequence[tuple[int, SequenceGrammar]],
        device: torch.device,
    ) -> None:
        self._thread = thread
        self._sequences = sequences
        self._device = device

    def masks(self, step: int) -> TokenMasks | None:
        """Of draft `step`; waits for what the draft before it has left to do."""
        self._thread.settle()
        masks = {n: grammar.draft_mask(step) for n, grammar in self._sequences}
        return TokenMasks.of({n: mask for n, mask in masks.items() if mask is not None}, self._device)

    def chose(self, step: int, tokens: Tensor) -> None:
        """[n] int32."""
        chosen = tokens.cpu().numpy()
        self._thread.post(_draft, step, [(grammar, int(chosen[n])) for n, grammar in self._sequences])


def warm(thread: GrammarThread, sequences: Sequence[tuple[SequenceGrammar, int]]) -> None:
    """Make the first masks of sequences with so many outputs, while nobody waits for them."""
    thread.post(_warm, sequences)


def _warm(sequences: Sequence[tuple[SequenceGrammar, int]]) -> None:
    for grammar, num_outputs in sequences:
        grammar.prepare(num_outputs, ())


def _advance(moves: Sequence[tuple[SequenceGrammar, list[int]]]) -> None:
    for grammar, tokens in moves:
        grammar.advance(tokens)


def _draft(step: int, moves: Sequence[tuple[SequenceGrammar, int]]) -> None:
    for grammar, token in moves:
        grammar.draft(step, token)
