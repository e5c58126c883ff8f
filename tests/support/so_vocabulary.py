"""Compiled grammars over small vocabularies, for tests of matchers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.structured_output.grammar import Vocabulary, compile_source
from deepinfer.structured_output.matcher import SequenceMatcher
from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.source import prepare

EOS = 1
PAD_SIZE = 45  # columns of the logits; ids behind the tokens stand for nothing
# Specials, letters and longer pieces, then bytes of "é" and "漢" as byte fallback has them.
TOKENS = (b"", b"", b"", b"a", b"b", b"c", b"ab", b"bc", b"abc", b"\xc3", b"\xa9", b"\xe6", b"\xbc", b"\xa2",
          b"\xc3\xa9", b"x\xe6\xbc", b"1", b"2", b'"', b"[", b"]", b",", b", ", b"{", b"}", b":")  # fmt: skip
VOCABULARY = Vocabulary(TOKENS, PAD_SIZE, EOS)


@functools.cache
def _compiler() -> Any:
    import xgrammar

    return xgrammar.GrammarCompiler(VOCABULARY.info(), max_threads=1, cache_enabled=False)


@functools.cache
def compiled(kind: str, source: str) -> Any:
    """A grammar over `TOKENS`."""
    return compile_source(_compiler(), prepare(GrammarSpec(kind, source)))


def matcher(
    kind: str,
    source: str,
    trigger: Sequence[int] = (),
    bound: int | None = None,
    stops: Sequence[int] = (EOS,),
) -> SequenceMatcher:
    """At the beginning of an output."""
    return SequenceMatcher(compiled(kind, source), PAD_SIZE, stops, trigger, bound)


def tokens_of(words: np.ndarray) -> set[int]:
    """The tokens that a mask allows, those behind the last column too."""
    return {i for i in range(32 * len(words)) if int(words[i // 32]) >> (i % 32) & 1}
