"""What grammars know of tokenizers: bytes of byte-level and byte-fallback tokens, and what is banned."""

from __future__ import annotations

import random
import re

import pytest
import tokenizers
import xgrammar

from deepinfer.checkpoint.token_text import TokenTable
from deepinfer.settings import Settings
from deepinfer.structured_output.grammar import Vocabulary, compile_source
from deepinfer.structured_output.matcher import SequenceMatcher
from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.source import prepare
from tests.checkpoint.test_detokenizer import byte_fallback_tokenizer
from tests.support.engines import make_llm
from tests.support.paths import TINY_QUANT, V41_TINY
from tests.support.so_vocabulary import tokens_of

EXPRESSIONS = ["é{3,9}", "(字|€|b){2,9}", "b the [a-c]{1,4}é?", "(ing|😀){2,5}", "b[^a-z]{2,6}"]


def walk(vocabulary: Vocabulary, expression: str, rng: random.Random) -> list[int]:
    """Tokens of an output, drawn from the masks."""
    compiler = xgrammar.GrammarCompiler(vocabulary.info(), max_threads=1, cache_enabled=False)
    grammar = compile_source(compiler, prepare(GrammarSpec("regex", expression)))
    state, tokens = SequenceMatcher(grammar, vocabulary.size, [vocabulary.eos_token_id]), []
    while True:
        allowed = tokens_of(state.fill())
        assert all(token == vocabulary.eos_token_id or vocabulary.tokens[token] for token in allowed)
        token = rng.choice(sorted(allowed))
        assert state.accept(token)
        if token == vocabulary.eos_token_id:
            return tokens
        tokens.append(token)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
def test_outputs_made_of_bytes_match(kind: str, expression: str):
    """Characters come in one token or byte by byte; the text that is shown matches either way."""
    if kind == "byte fallback":
        tokenizer = byte_fallback_tokenizer()
    else:
        tokenizer = tokenizers.Tokenizer.from_file(str(TINY_QUANT / "tokenizer.json"))
    pieces = TokenTable(tokenizer).token_bytes()
    vocabulary, rng = Vocabulary(pieces, len(pieces) + 3, 1), random.Random(f"{kind} {expression}")
    in_parts = 0
    for _ in range(6):
        tokens = walk(vocabulary, expression, rng)
        text = tokenizer.decode(tokens)
        assert re.fullmatch(expression, text), f"{text=} {tokens=}"
        assert text.encode() == b"".join(pieces[token] for token in tokens)
        in_parts += any(b"\x80" <= pieces[token][:1] < b"\xc0" for token in tokens)
    assert in_parts > 0, "no token began inside a character"


@pytest.mark.parametrize("path", [TINY_QUANT, V41_TINY], ids=["tiny-quant", "v41-tiny"])
def test_bytes_of_a_bundled_tokenizer(path):
    """Every piece of text is the bytes of its tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    pieces = TokenTable(tokenizer).token_bytes()
    for text in ("plain text", "größer, 日本語 😀", '{"a": [1, null]}\n\t\x00'):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(pieces[token] for token in ids) == text.encode()
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert len(special) > 3 and all(pieces[token] == b"" for token in special)


def test_banned_tokens_are_never_allowed():
    settings = Settings.from_env({"DEEPINFER_DECODE_TOKEN_BLACKLIST": "100..110,300"})
    with make_llm("v41-tiny", settings=settings) as llm:
        vocabulary = llm.llm_engine.grammar_builder.process._make_vocabulary()
        assert vocabulary.size == llm.llm_engine.vocab_size
    banned = {*range(100, 111), 300}
    empty = {token for token in range(90, 310) if not vocabulary.tokens[token]}
    assert empty == banned
