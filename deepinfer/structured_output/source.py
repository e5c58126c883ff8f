"""From what a request asks for to the text that the grammar compiler gets: the audit stands in between.

Schemas, expressions and choices become EBNF grammars of our own, so that everything they say is enforced; a
grammar in EBNF goes on as it is. xgrammar is not needed here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from deepinfer.structured_output import automaton
from deepinfer.structured_output.direct import direct
from deepinfer.structured_output.ebnf import MAX_GRAMMAR_CHARS, Writer, literal
from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.json_grammar import any_object_grammar, json_grammar
from deepinfer.structured_output.regex import MAX_REPEAT, whole
from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.structural_tag import rewritten_tag

MAX_EBNF_NESTING = 200  # of brackets


@dataclass(frozen=True)
class GrammarSource:
    """What the compiler gets."""

    method: str
    """"grammar": EBNF with the root rule `root`, for `compile_grammar`; "structural_tag": JSON, for
    `compile_structural_tag`."""
    text: str


def prepare(spec: GrammarSpec) -> GrammarSource:
    """The audited source of a grammar.

    Takes milliseconds for ordinary sources. Hostile ones stay within the bounds on states, shapes and rules,
    but many expressions just below them add up to minutes: give this the same time limit as the compiler.

    Raises:
        GrammarError: it is invalid, too large, or something of it cannot be enforced; a SchemaError names the
            JSON path.
    """
    match spec.kind:
        case "json":
            text = json_grammar(json.loads(spec.source))
        case "json_object":
            text = any_object_grammar()
        case "regex":
            text = regex_grammar(spec.source)
        case "choice":
            writer = Writer()
            text = writer.text(writer.rule("choice", *(literal(c) for c in json.loads(spec.source))))
        case "ebnf":
            check_ebnf(spec.source)
            text = spec.source
        case "structural_tag":
            tag = rewritten_tag(json.loads(spec.source), json_grammar, regex_grammar, check_ebnf)
            return GrammarSource("structural_tag", json.dumps(tag, ensure_ascii=False))
        case _:
            raise AssertionError(f"{spec.kind=}")
    return GrammarSource("grammar", text)


def regex_grammar(expression: str) -> str:
    """The EBNF grammar of the texts that an expression matches from end to end.

    Raises:
        GrammarError: naming the position of what is not supported.
    """
    node = whole(expression)
    automaton.check_size(node)
    writer = Writer()
    written = direct(writer, node, json=False)
    if written is not None:
        return writer.text(written)
    found = automaton.of_regex(node)
    if found.is_empty:
        raise GrammarError(f"no text matches the expression {expression!r}")
    return writer.text(writer.automaton(found, json=False))


_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<class>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>\{\s*(?P<low>\d*)\s*(?:,\s*(?P<high>\d*)\s*)?\})|(?P<ahead>\(\s*=)|(?P<call>[A-Za-z_][\w.-]*\()
    |(?P<name>[A-Za-z_][\w.-]*)|(?P<open>\()|(?P<close>\))|(?P<other>[^"\[\]{}()\#A-Za-z_]+|.)""",
    re.VERBOSE | re.DOTALL,
)


def check_ebnf(text: str) -> None:
    """Refuses what would be ignored, or would be too large; the compiler itself checks the syntax.

    Raises:
        GrammarError: naming line and column.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"the grammar has {len(text)} characters: it may have at most {MAX_GRAMMAR_CHARS}")
    depth = 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup if token.group("repeat") is None else "repeat"
        message = None
        if kind == "repeat":
            count = max(int(token.group(name) or 0) for name in ("low", "high"))
            if count > MAX_REPEAT:
                message = f"repeats {count} times: at most {MAX_REPEAT} can be enforced"
        elif kind == "ahead":
            message = "lookaheads (= ...) are not enforced: spell out what follows"
        elif kind == "call":
            message = f"{token.group()}...) is not supported: write rules, and a space in front of a bracket"
        elif kind == "open":
            depth += 1
            if depth > MAX_EBNF_NESTING:
                message = f"brackets are nested too deeply: at most {MAX_EBNF_NESTING} levels"
        elif kind == "close":
            depth -= 1
        if message is not None:
            line = text.count("\n", 0, token.start()) + 1
            column = token.start() - (text.rfind("\n", 0, token.start()) + 1) + 1
            raise GrammarError(f"line {line} column {column}: {message}")
