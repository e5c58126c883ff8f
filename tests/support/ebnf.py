"""A small recogniser of EBNF grammars: sets of positions by memoised descent, and a sampler.

Grammars: rules `name ::= ...` of strings, classes, names, brackets, `|` and the repeats ? * + {m} {m,} {m,n}.
"""

from __future__ import annotations

import random
import re
from typing import Any

_TOKENS = re.compile(
    r'\s*(?:#[^\n]*\n)?\s*("(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\{\d*,?\d*\}|[?*+|()]|::=|[A-Za-z_][\w-]*)',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}


def _plain(text: str) -> list[tuple[str, bool]]:
    """Characters, and whether each was escaped."""
    result, place = [], 0
    while place < len(text):
        match = _ESCAPE.match(text, place)
        if match is None:
            result.append((text[place], False))
            place += 1
            continue
        code = match.group(1)
        result.append((chr(int(code[1:], 16)) if len(code) > 1 else _LETTERS.get(code, code), True))
        place = match.end()
    return result


class Ebnf:
    """A grammar with the root rule `root`."""

    def __init__(self, text: str) -> None:
        self._tokens = [match.group(1) for match in _TOKENS.finditer(text)]
        self._place = 0
        self._rules: dict[str, Any] = {}
        while self._place < len(self._tokens):
            name, sign = self._tokens[self._place : self._place + 2]
            assert sign == "::=", self._tokens[self._place :]
            self._place += 2
            self._rules[name] = self._alternatives()

    # nodes: ("text", str), ("class", test, samples), ("name", str), ("cat", [..]), ("alt", [..]),
    # ("rep", node, low, high)

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _alternatives(self) -> Any:
        options = [self._sequence()]
        while self._peek() == "|":
            self._place += 1
            options.append(self._sequence())
        return ("alt", options)

    def _sequence(self) -> Any:
        parts = []
        while self._peek() not in ("", "|", ")"):
            if self._tokens[self._place + 1 : self._place + 2] == ["::="]:
                break
            parts.append(self._repeated(self._element()))
        return ("cat", parts)

    def _element(self) -> Any:
        token = self._tokens[self._place]
        self._place += 1
        if token == "(":
            node = self._alternatives()
            assert self._peek() == ")"
            self._place += 1
            return node
        if token[0] == '"':
            return ("text", "".join(c for c, _ in _plain(token[1:-1])))
        if token[0] == "[":
            return self._class(token[1:-1])
        return ("name", token)

    def _class(self, body: str) -> Any:
        negated = body.startswith("^")
        items, ranges = _plain(body[negated:]), []
        while items:
            low = items.pop(0)[0]
            high = low
            if len(items) > 1 and items[0] == ("-", False):
                high = items[1][0]
                del items[:2]
            ranges.append((low, high))
        samples = "~é日" if negated else "".join(low + high for low, high in ranges)
        return ("class", lambda c: any(low <= c <= high for low, high in ranges) != negated, samples)

    def _repeated(self, node: Any) -> Any:
        token = self._peek()
        bounds = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(token)
        if token.startswith("{"):
            low, comma, high = token[1:-1].partition(",")
            bounds = (int(low or 0), (int(high) if high else None) if comma else int(low))
        if bounds is None:
            return node
        self._place += 1
        return self._repeated(("rep", node, *bounds))

    def accepts(self, text: str) -> bool:
        """Whether the whole text belongs to the language. Left recursion is not supported."""
        memo: dict[tuple[int, int], frozenset[int]] = {}

        def ends(node: Any, start: int) -> frozenset[int]:
            key = (id(node), start)
            if key in memo:
                return memo[key]
            match node[0]:
                case "text":
                    found = {start + len(node[1])} if text.startswith(node[1], start) else set()
                case "class":
                    found = {start + 1} if start < len(text) and node[1](text[start]) else set()
                case "name":
                    found = set(ends(self._rules[node[1]], start))
                case "alt":
                    found = {end for option in node[1] for end in ends(option, start)}
                case "cat":
                    found = {start}
                    for part in node[1]:
                        found = {end for place in found for end in ends(part, place)}
                case _:
                    _, body, low, high = node
                    current, found, seen, count = {start}, set(), set(), 0
                    while current and (high is None or count <= high):
                        if count >= low:
                            if current <= found:
                                break
                            found |= current
                        state = (min(count, low), frozenset(current))
                        if state in seen and count >= low:
                            break
                        seen.add(state)
                        current = {end for place in current for end in ends(body, place)}
                        count += 1
            memo[key] = frozenset(found)
            return memo[key]

        return len(text) in ends(self._rules["root"], 0)

    def sample(self, rng: random.Random) -> str:
        """A text of the language."""

        def make(node: Any, depth: int) -> str:
            match node[0]:
                case "text":
                    return node[1]
                case "class":
                    return rng.choice(node[2])
                case "name":
                    return make(self._rules[node[1]], depth + 1)
                case "alt":
                    options = node[1]
                    if depth > 12:  # prefer what names no rule
                        options = [
                            o for o in options if not any("name" in part[:1] for part in o[1])
                        ] or options
                    return make(rng.choice(options), depth)
                case "cat":
                    return "".join(make(part, depth) for part in node[1])
            _, body, low, high = node
            most = low + 2 if high is None else min(high, low + 2)
            return "".join(make(body, depth) for _ in range(low if depth > 12 else rng.randint(low, most)))

        return make(self._rules["root"], 0)
