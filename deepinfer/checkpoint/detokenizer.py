"""Detokenizer: the text of a growing list of output tokens, and the search for stop strings in it.

Text only grows: what was handed out never changes, holds no part of a character, and together equals the
one-shot decode of the output tokens alone, so nothing of the prompt shows. Two things are held back: bytes of
an unfinished character (dropped when the output ends inside it) and the beginning of what may become a stop
string. Each token costs the same however long the output is.

`token_text.py` knows how tokens become text; here is the bookkeeping of one output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.checkpoint.token_text import TokenTable


@dataclass(frozen=True)
class StopHit:
    """A stop string that ended an output."""

    stop: str  # the string
    num_tokens: int  # output tokens up to and including the one that completed it


class StopSearch:
    """Finds the first stop string in text that arrives in pieces, whatever the pieces.

    First means: the one that is complete at the earliest character; of several that end there, the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece.

        Args:
            text: the piece.
            may_stop: whether a stop string that ends inside this piece counts.

        Returns:
            Text that can be handed out, and the stop string that was found or None. With a hit, the text ends
            where the stop string begins.
        """
        known = len(self._held)
        text = self._held + text
        best: tuple[int, int, str] | None = None  # end, start, string
        if may_stop and len(text) > known:
            for string in self._strings:
                start = text.find(string, max(0, known - len(string) + 1))
                if start >= 0:
                    end = start + len(string)
                    best = min(best, (end, start, string)) if best else (end, start, string)
        if best is not None:
            self._held = ""
            return text[: best[1]], best[2]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Hands out what is still held back: the output ended without completing it."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string and is not all of it."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(string) > length and string.startswith(tail) for string in self._strings):
                return length
        return 0


class Detokenizer:
    """The text of one output."""

    def __init__(
        self,
        table: TokenTable,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Starts an empty output.

        Args:
            table: the tokenizer's tokens.
            stop: strings that end the output.
            include_stop: keep the stop string, or the stopping token's text, at the end.
            skip_special_tokens: leave special tokens out of the text.
            min_tokens: a stop string counts only when a token after the first `min_tokens` completes it.
        """
        self._stream = table.stream(skip_special_tokens)
        self._search = StopSearch(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._num_taken = 0  # pieces that take() has handed out
        self._hit: StopHit | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._pieces) > 1:
            taken = "".join(self._pieces[: self._num_taken])
            rest = "".join(self._pieces[self._num_taken :])
            self._pieces = [taken, rest] if self._num_taken else [rest]
            self._num_taken = min(self._num_taken, 1)
        return "".join(self._pieces)

    def take(self) -> str:
        """The text that has been added since the last call."""
        new = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return new

    def append(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> StopHit | None:
        """Adds output tokens.

        Args:
            token_ids: the next tokens. One token at a time or many: the text is the same.
            ends_with_stop_token: the last one is EOS or a stop token that ended the output; its text appears
                only with `include_stop`.

        Returns:
            The hit when a stop string was completed; tokens beyond it are not part of the output. Once the
            output is stopped, more tokens change nothing.
        """
        if self._hit is not None:
            return self._hit
        shown = token_ids[:-1] if ends_with_stop_token and not self._include_stop else token_ids
        if self._search is None:
            self._add(self._stream.push(shown))
            self._num_tokens += len(token_ids)
            return None
        for token_id in shown:
            self._num_tokens += 1
            self._scan(self._stream.push((token_id,)))
            if self._hit is not None:
                return self._hit
        self._num_tokens += len(token_ids) - len(shown)
        return None

    def finish(self) -> StopHit | None:
        """Ends the output and hands out what was held back, except an unfinished character.

        Returns:
            The stop hit, if there was one or the last text completes one.
        """
        if self._hit is None:
            rest = self._stream.finish()
            if self._search is None:
                self._add(rest)
            else:
                self._scan(rest)
                self._add(self._search.finish())
        return self._hit

    def _scan(self, text: str) -> None:
        """Passes new text through the search."""
        ready, found = self._search.push(text, self._num_tokens > self._min_tokens)
        self._add(ready)
        if found is not None:
            self._hit = StopHit(found, self._num_tokens)
            if self._include_stop:
                self._add(found)

    def _add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
