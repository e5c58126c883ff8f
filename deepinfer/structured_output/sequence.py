"""SequenceGrammar: a sequence's matcher beside the tokens that the scheduler has, and the masks of its rows.

    tokens   committed outputs | drafts
    masks                      | rows[0] | rows[1] | ... behind the outputs, behind one draft more, ...

The masks that drafts are chosen under are those of the rows that verify them in the next step, so each is
filled once. All that is kept can be made again from the committed tokens; that happens when their number is
not the expected one: in the first step, after an interrupted step, in the engine that a sequence was handed
to. Whatever goes wrong here is the sequence's own failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.structured_output.grammar import error_text
from deepinfer.structured_output.matcher import SequenceMatcher, allows

# CPU seconds that a grammar may take for a token. Others wait for it; usual are microseconds.
MAX_TOKEN_SECONDS = 0.5


class SequenceGrammar:
    """One sequence's grammar. Used by one thread at a time.

    Args:
        make_matcher: makes the matcher, when it is first needed.
        num_prompt: prompt tokens.
        stop_token_ids: end the grammar.
        read_outputs: gives the committed output tokens; KeyError when the sequence has gone.
        is_long: the request bans stop tokens at first.

    Attributes:
        failure: why the sequence cannot go on, None while it can.
        num_filled: masks that were filled.
    """

    def __init__(
        self,
        make_matcher: Callable[[], SequenceMatcher],
        num_prompt: int,
        stop_token_ids: Sequence[int],
        read_outputs: Callable[[], Sequence[int]],
        is_long: bool,
    ) -> None:
        self._make_matcher = make_matcher
        self._matcher: SequenceMatcher | None = None
        self._read_outputs = read_outputs
        self._is_long = is_long
        self._num_tokens = -1  # accepted outputs; -1: nothing is known
        self._drafts: list[int] = []  # accepted behind them
        self._rows: list[np.ndarray | None] = []
        self.num_prompt = num_prompt
        self.stop_token_ids = frozenset(stop_token_ids)
        self.failure: str | None = None
        self.num_filled = 0

    def forget(self) -> None:
        """What is kept may be wrong."""
        self._num_tokens = -1

    def prepare(self, num_outputs: int, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """Masks of the rows that follow the outputs, and each of the drafts in turn.

        Args:
            num_outputs: committed output tokens.
            drafts: what the rows test.

        Returns:
            A mask for each row, None where everything may come. Rows behind a draft that may not come have
            none: that draft is refused. Nothing for a sequence that has failed, or has ended meanwhile.
        """
        is_known = self._num_tokens == num_outputs
        with _Watch(self, 1 + len(drafts) + (0 if is_known else num_outputs)):
            if not is_known and not self._rebuild(num_outputs):
                return []
            common = _common(self._drafts, drafts)
            if common < min(len(self._drafts), len(drafts)):
                self._take_back(len(self._drafts) - common)
            for draft in drafts[len(self._drafts) :]:
                if not self._go_on(draft):
                    break
            if len(self._rows) <= min(len(self._drafts), len(drafts)):
                self._fill()
        return [] if self.failure is not None else self._rows[: len(drafts) + 1]

    def advance(self, tokens: Sequence[int]) -> None:
        """Output tokens have been emitted; the mask behind them is made."""
        if self._num_tokens < 0:
            return
        with _Watch(self, len(tokens)):
            common = _common(self._drafts, tokens)
            self._take_back(len(self._drafts) - common)
            for token in tokens[common:]:
                self._accept(token)
            self._num_tokens += len(tokens)
            self._drafts.clear()
            self._rows = self._rows[common : common + 1] if common == len(tokens) else []
            if not self._rows:
                self._fill()

    def draft(self, step: int, token: int) -> None:
        """Draft `step` (0, 1, ...) has been chosen; the mask behind it is made, unless it may not come."""
        with _Watch(self, 1):
            if step == len(self._drafts) and step < len(self._rows) and self._go_on(token):
                self._fill()

    def draft_mask(self, step: int) -> np.ndarray | None:
        """The mask of draft `step`; None where there is none."""
        return self._rows[step] if step < len(self._rows) and self.failure is None else None

    def must_end(self, mask: np.ndarray) -> bool:
        """Whether only stop tokens may come, though the request may ban them."""
        if not self._is_long:
            return False
        rest = mask.copy()
        for token in self.stop_token_ids:
            rest.view(np.uint32)[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << (token % 32)))
        return not rest.any()

    def _rebuild(self, num_outputs: int) -> bool:
        """From the committed tokens; False when they are not the expected ones: the sequence has ended."""
        try:
            outputs = self._read_outputs()
        except KeyError:
            return False
        if len(outputs) != num_outputs:
            return False
        if self._matcher is None:
            self._matcher = self._make_matcher()
        else:
            self._matcher.reset()
        self._drafts, self._rows = [], []
        self._num_tokens = num_outputs
        for token in outputs:
            self._accept(int(token))
        return self.failure is None

    def _accept(self, token: int) -> None:
        if self.failure is None and not self._matcher.accept(token):
            self.failure = f"the grammar cannot go on with token {token}"

    def _go_on(self, draft: int) -> bool:
        """Accept a draft, if it may come."""
        if len(self._rows) == len(self._drafts):
            self._fill()
        mask = self._rows[-1]
        if self.failure is not None or (mask is not None and not allows(mask, draft)):
            return False
        if not self._matcher.accept(draft):
            return False
        self._drafts.append(draft)
        return True

    def _fill(self) -> None:
        if self.failure is not None:
            return
        mask = self._matcher.fill()
        self.num_filled += mask is not None
        if mask is not None and not mask.any():
            self.failure = "the grammar allows no token of this vocabulary here"
        self._rows.append(mask)

    def _take_back(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            del self._drafts[len(self._drafts) - count :]
            del self._rows[len(self._drafts) + 1 :]


class _Watch:
    """Turns what goes wrong, or takes too long, into the sequence's failure."""

    def __init__(self, grammar: SequenceGrammar, num_tokens: int) -> None:
        self._grammar = grammar
        self._limit = MAX_TOKEN_SECONDS * (1 + num_tokens)

    def __enter__(self) -> None:
        self._start = time.thread_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        grammar = self._grammar
        if isinstance(error, Exception):
            grammar.failure = grammar.failure or f"its matcher failed: {error_text(error)}"
            return True
        if grammar.failure is None and time.thread_time() - self._start > self._limit:
            grammar.failure = f"its grammar took more than {self._limit:g} seconds for a token"
        return False


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for a, b in zip(one, other):
        if a != b:
            break
        length += 1
    return length
