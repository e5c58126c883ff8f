"""xgrammar as this engine uses it: the vocabulary it sees, how sources are compiled, what errors say.

The package is imported when the first structured request comes, since it brings others with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgrammar

    from deepinfer.structured_output.source import GrammarSource


@dataclass(frozen=True)
class Vocabulary:
    """What tokens stand for.

    Attributes:
        tokens: [num_tokens] bytes of each token; empty for those that no grammar may use: special tokens,
            banned ids, ids without a token.
        size: columns of the logits, >= num_tokens; ids behind the tokens are never allowed.
        eos_token_id: ends an output.
    """

    tokens: Sequence[bytes]
    size: int
    eos_token_id: int

    def info(self) -> xgrammar.TokenizerInfo:
        """The same for xgrammar."""
        import xgrammar

        return xgrammar.TokenizerInfo(
            list(self.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=self.size,
            stop_token_ids=[self.eos_token_id],
        )


def compile_source(compiler: xgrammar.GrammarCompiler, source: GrammarSource) -> xgrammar.CompiledGrammar:
    """Compile a prepared source.

    Raises:
        Exception: whatever xgrammar raises; `error_text` makes a sentence of it.
    """
    if source.method == "structural_tag":
        return compiler.compile_structural_tag(source.text)
    return compiler.compile_grammar(source.text)


def error_text(error: BaseException) -> str:
    """The library's message without its file names and times."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ", "", str(error)).strip()
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    return " ".join(text.split())[:2000] or type(error).__name__
