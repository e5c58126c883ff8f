"""SequenceMatcher: where one output stands in its grammar, and which tokens may come next.

    free      everything may come; a search for the trigger runs along
    forcing   the bound token came first: the rest of the trigger is forced, token by token
    grammar   the grammar decides
    ended     a stop token has ended the grammar: nothing may follow

Drafts advance it like other tokens and are taken back. It is not to be used by two threads at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import xgrammar

MAX_TAKEN_BACK = 64  # tokens that `rollback` can take back


class Phase(Enum):
    FREE = 0
    FORCING = 1
    GRAMMAR = 2
    ENDED = 3


class _State(NamedTuple):
    phase: Phase
    matched: int  # tokens of the trigger


class SequenceMatcher:
    """One sequence's place in its grammar.

    Args:
        grammar: compiled, shared by any number of matchers.
        vocab_size: columns of the logits.
        stop_token_ids: end the grammar, where it may end.
        trigger: token ids behind which the grammar begins; empty for at once.
        bound: forces the trigger, None for never.
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        trigger: Sequence[int] = (),
        bound: int | None = None,
    ) -> None:
        import xgrammar

        self._stops = frozenset(stop_token_ids)
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(stop_token_ids))
        self._vocab_size = vocab_size
        self._words = (vocab_size + 31) // 32
        self._trigger = tuple(trigger)
        self._table = failure_table(self._trigger)
        self._bound = bound
        self._reset()

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens may not come next."""
        return self._state.phase in (Phase.FORCING, Phase.GRAMMAR)

    def reset(self) -> None:
        """Back to the beginning."""
        self._matcher.reset()
        self._reset()

    def _reset(self) -> None:
        self._state = _State(Phase.FREE if self._trigger else Phase.GRAMMAR, 0)
        self._past: deque[_State] = deque(maxlen=MAX_TAKEN_BACK)

    def fill(self) -> np.ndarray | None:
        """What may come next.

        Returns:
            [ceil(vocab / 32)] int32, bit v % 32 of word v // 32 is token v; None where everything may.
        """
        if not self.is_constrained:
            return None
        words = np.zeros((1, self._words), dtype=np.int32)
        if self.phase is Phase.FORCING:
            token = self._trigger[self._state.matched]
            words.view(np.uint32)[0, token // 32] = 1 << (token % 32)
        else:
            self._matcher.fill_next_token_bitmask(words)
            if self._vocab_size % 32:  # the library leaves bits behind the last token as they come
                words[0, -1] &= (1 << (self._vocab_size % 32)) - 1
        return words[0]

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and nothing changes, when it may not come."""
        state = self._state
        if state.phase is Phase.GRAMMAR:
            if not 0 <= token < self._vocab_size or not self._matcher.accept_token(token):
                return False
            following = _State(Phase.ENDED, 0) if self._matcher.is_terminated() else state
        elif state.phase is Phase.FREE:
            following = self._after_free(token, state.matched)
        elif state.phase is Phase.FORCING:
            if token != self._trigger[state.matched]:
                return False
            following = self._forcing(state.matched + 1)
        else:
            return False
        self._past.append(state)
        self._state = following
        return True

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens, at most `MAX_TAKEN_BACK` in a row."""
        for _ in range(count):
            before = self._past.pop()
            if before.phase is Phase.GRAMMAR:
                self._matcher.rollback(1)
            self._state = before

    def _after_free(self, token: int, matched: int) -> _State:
        while matched and token != self._trigger[matched]:
            matched = self._table[matched - 1]
        if token == self._trigger[matched]:
            matched += 1
        if matched == len(self._trigger):
            return _State(Phase.GRAMMAR, 0)
        return self._forcing(matched) if token == self._bound else _State(Phase.FREE, matched)

    def _forcing(self, matched: int) -> _State:
        if matched == len(self._trigger):
            return _State(Phase.GRAMMAR, 0)
        return _State(Phase.FORCING, matched)


def failure_table(pattern: Sequence[int]) -> list[int]:
    """Entry i: length of the longest proper prefix of the pattern that ends its first i + 1 elements."""
    table = [0] * len(pattern)
    length = 0
    for place in range(1, len(pattern)):
        while length and pattern[place] != pattern[length]:
            length = table[length - 1]
        length += pattern[place] == pattern[length]
        table[place] = length
    return table


def allows(words: np.ndarray, token: int) -> bool:
    """Whether a bitmask row has a token's bit."""
    return 0 <= token < 32 * words.shape[0] and bool(int(words[token // 32]) >> (token % 32) & 1)
