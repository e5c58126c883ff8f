"""xgrammar over the bundled tokenizer: which texts a prepared grammar accepts, token by token."""

from __future__ import annotations

import functools
import random
from typing import Any

import tokenizers

from deepinfer.structured_output.source import GrammarSource
from tests.support.paths import V41_TINY

SPECIAL = 16  # the first ids are special tokens


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """The bundled tokenizer."""
    return tokenizers.Tokenizer.from_file(str(V41_TINY / "tokenizer.json"))


@functools.cache
def pieces() -> list[str]:
    """Token id -> piece in the byte-level alphabet."""
    vocabulary = tokenizer().get_vocab()
    return [piece for piece, _ in sorted(vocabulary.items(), key=lambda pair: pair[1])]


@functools.cache
def byte_ids() -> dict[int, int]:
    """Byte -> the token that stands for it alone."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in alphabet)}
    vocabulary = tokenizer().get_vocab()
    return {byte: vocabulary[piece] for byte, piece in alphabet.items() if piece in vocabulary}


@functools.cache
def _compiler() -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo(pieces(), vocab_type=xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[1])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class Compiled:
    """A compiled grammar."""

    def __init__(self, source: GrammarSource) -> None:
        compile_ = {
            "grammar": _compiler().compile_grammar,
            "structural_tag": _compiler().compile_structural_tag,
        }
        self._compiled = compile_[source.method](source.text)

    def _matcher(self) -> Any:
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled)

    def accepts(self, text: str, as_bytes: bool = False) -> bool:
        """Whether the tokens of a text, and then the end of sequence, are accepted."""
        if as_bytes:
            ids = [byte_ids()[byte] for byte in text.encode()]
        else:
            ids = tokenizer().encode(text, add_special_tokens=False).ids
            assert tokenizer().decode(ids, skip_special_tokens=False) == text, f"{text=}"
        matcher = self._matcher()
        return all(matcher.accept_token(token) for token in ids) and matcher.accept_token(1)

    def walk(self, rng: random.Random, limit: int) -> str | None:
        """The text of random allowed tokens up to the end of sequence; None: no end within `limit`."""
        import xgrammar

        matcher = self._matcher()
        mask = xgrammar.allocate_token_bitmask(1, len(pieces()))
        ids: list[int] = []
        while len(ids) < limit:
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].numpy().view("uint32")
            allowed = [
                i for i in range(len(pieces())) if words[i >> 5] >> (i & 31) & 1 and (i >= SPECIAL or i == 1)
            ]
            assert allowed, f"no token is allowed behind {tokenizer().decode(ids)!r}"
            token = rng.choice(allowed)
            assert matcher.accept_token(token), f"{token=}"
            if token == 1:
                return tokenizer().decode(ids, skip_special_tokens=False)
            ids.append(token)
        return None
