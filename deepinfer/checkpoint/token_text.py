"""How single tokens become text: one table per tokenizer, one stream per output.

A stream turns tokens into the text that the tokenizer's own decoder would give for all of them at once, and
hands out each part as soon as later tokens cannot change it. Three families of decoders are told apart:

    byte level      every token stands for bytes; text is their UTF-8 (the release's tokenizer)
    byte fallback   tokens are text, but "<0xE4>" stands for a byte; runs of bytes are text if valid UTF-8
    others          the decoder runs on a short window of tokens
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import tokenizers

REPLACEMENT = "\ufffd"
# Tokens that a window may hold back: text that still ends in a replacement character after so many is no
# unfinished character.
MAX_HELD_TOKENS = 8


class TokenStream(Protocol):
    """Tokens in, text out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that became certain."""

    def finish(self) -> str:
        """Returns the rest at the end of the output, without an unfinished character."""


class TokenTable:
    """The texts of a tokenizer's tokens, prepared once and shared by all outputs."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Reads the vocabulary.

        Args:
            tokenizer: the library's object; it must not change afterwards.
        """
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._steps = decoder.get("decoders", [decoder] if decoder else [])
        names = [step["type"] for step in self._steps]
        self._is_byte_level = names in (["ByteLevel"], ["ByteLevel", "Fuse"])
        self._is_byte_fallback = _is_byte_fallback(self._steps)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A new, empty stream."""
        if self._is_byte_level:
            return ByteLevelStream(self._visible_bytes if skip_special_tokens else self._all_bytes)
        if self._is_byte_fallback:
            strip = [step for step in self._steps if step["type"] == "Strip"]
            pieces = self._visible_pieces if skip_special_tokens else self._all_pieces
            return ByteFallbackStream(
                pieces, strip[0]["content"] if strip else "", strip[0]["start"] if strip else 0
            )
        return WindowStream(self._tokenizer, skip_special_tokens, self._special_ids)

    def token_bytes(self) -> list[bytes]:
        """The bytes that each token adds to an output; empty for special tokens and ids without a token.

        Raises:
            ValueError: this tokenizer's tokens have no bytes of their own.
        """
        if self._is_byte_level:
            return list(self._visible_bytes)
        if self._is_byte_fallback:
            pieces = self._visible_pieces
            return [bytes([each]) if isinstance(each, int) else each.encode() for each in pieces]
        names = ", ".join(step["type"] for step in self._steps) or "no decoder"
        raise ValueError(
            f"tokens have no bytes of their own: the decoder is {names}; byte level and byte fallback work"
        )

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; bytes that are no text show as replacement characters."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    @cached_property
    def _tokens(self) -> list[str]:
        """Spelling of each id, "" where there is none."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = token
        return tokens

    @cached_property
    def _all_bytes(self) -> list[bytes]:
        table = _byte_of_character()
        return [_byte_level_bytes(token, table) for token in self._tokens]

    @cached_property
    def _visible_bytes(self) -> list[bytes]:
        return [b"" if i in self._special_ids else piece for i, piece in enumerate(self._all_bytes)]

    @cached_property
    def _all_pieces(self) -> list[str | int]:
        replacements = [step for step in self._steps if step["type"] == "Replace"]
        pieces: list[str | int] = []
        for token in self._tokens:
            for step in replacements:
                token = token.replace(step["pattern"]["String"], step["content"])
            pieces.append(_fallback_byte(token))
        return pieces

    @cached_property
    def _visible_pieces(self) -> list[str | int]:
        return ["" if i in self._special_ids else piece for i, piece in enumerate(self._all_pieces)]


class ByteLevelStream:
    """Bytes of tokens through an incremental UTF-8 decoder, which holds unfinished characters back."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces  # by token id; ids beyond have no text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        pieces, count = self._pieces, len(self._pieces)
        return self._decoder.decode(b"".join([pieces[i] for i in token_ids if i < count]))

    def finish(self) -> str:
        return ""


class ByteFallbackStream:
    """Text tokens and runs of byte tokens.

    A run is text when all of it is valid UTF-8 and one replacement character per byte otherwise, so it waits
    until a text token or the end closes it.
    """

    def __init__(self, pieces: list[str | int], strip: str, num_strip: int) -> None:
        self._pieces = pieces  # by token id: text, or the byte that the token stands for
        self._strip = strip  # character that is taken off the beginning of the whole text
        self._num_strip = num_strip  # at most this often
        self._run = bytearray()

    def push(self, token_ids: Sequence[int]) -> str:
        out: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id] if token_id < len(self._pieces) else ""
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece:
                out += (self._close_run(), piece)
        return self._stripped("".join(out))

    def finish(self) -> str:
        complete = codecs.getincrementaldecoder("utf-8")("ignore")
        complete.decode(bytes(self._run))
        unfinished = complete.getstate()[0]
        del self._run[len(self._run) - len(unfinished) :]
        return self._stripped(self._close_run())

    def _close_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._num_strip and text:
            if not text.startswith(self._strip):
                self._num_strip = 0
                break
            text = text[len(self._strip) :]
            self._num_strip -= 1
        return text


class WindowStream:
    """The tokenizer's decoder on the last few tokens: what they add to the text of the ones before them."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, skip_special: bool, special_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._special_ids = special_ids
        self._window: list[int] = []  # tokens whose text is out, then the held ones
        self._num_out = 0

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._added_text().rstrip(REPLACEMENT)

    def _push_one(self, token_id: int) -> str:
        if self._skip_special and token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        added = self._added_text()
        is_certain = bool(added) and not added.endswith(REPLACEMENT)
        if not is_certain and len(self._window) - self._num_out < MAX_HELD_TOKENS:
            return ""
        self._window = self._window[self._num_out :]
        self._num_out = len(self._window)
        return added

    def _added_text(self) -> str:
        """What the held tokens add to the text of the ones before them."""
        before = self._decode(self._window[: self._num_out])
        return self._decode(self._window)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


def _is_byte_fallback(steps: list[dict]) -> bool:
    """Whether the decoder is plain replacements, byte fallback, joining, and stripping the beginning."""
    names = [step["type"] for step in steps]
    if "ByteFallback" not in names:
        return False
    split = names.index("ByteFallback")
    plain = all(step["type"] == "Replace" and "String" in step["pattern"] for step in steps[:split])
    tail = names[split + 1 :]
    strips_begin = tail == ["Fuse"] or (tail == ["Fuse", "Strip"] and steps[-1]["stop"] == 0)
    return plain and strips_begin


def _byte_of_character() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _byte_level_bytes(token: str, table: dict[str, int]) -> bytes:
    """Bytes of a token; a spelling with characters outside the alphabet (added tokens) is plain UTF-8."""
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def _fallback_byte(token: str) -> str | int:
    """The byte of a token such as "<0xE4>", else the token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return token
    return token
