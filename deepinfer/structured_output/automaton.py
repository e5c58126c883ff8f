"""Deterministic automata over characters: how regular expressions are combined.

An intersection or complement of regular expressions is no regular expression that a grammar could quote, but
an automaton. It is also unambiguous: a matcher follows one path, however the expression repeats itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.structured_output import characters as chars
from deepinfer.structured_output.characters import Ranges
from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.regex import Alt, Cat, Chars, Regex, Rep, text

MAX_STATES = 2000
MAX_POSITIONS = 20_000  # characters of an expression with its repeats written out
_MAX_WORK = 400_000  # visits of positions while states are built
_MAX_ROUNDS = 40  # of joining states


@dataclass(frozen=True)
class Automaton:
    """State 0 is the start; a character without an edge fails. Every state can reach an accepting one."""

    edges: tuple[tuple[tuple[Ranges, int], ...], ...]  # per state: disjoint sets and where they lead
    accepting: tuple[bool, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no text at all is accepted."""
        return not any(self.accepting)

    def accepts(self, value: str) -> bool:
        """Whether a text leads to an accepting state."""
        state = 0
        for c in value:
            code = ord(c)
            for ranges, target in self.edges[state]:
                if chars.contains(ranges, code):
                    state = target
                    break
            else:
                return False
        return self.accepting[state]

    def __and__(self, other: Automaton) -> Automaton:
        """The texts that both accept."""
        pairs, order, edges = {(0, 0): 0}, [(0, 0)], []
        for a, b in order:  # grows while it is read
            row = []
            for left, to_a in self.edges[a]:
                for right, to_b in other.edges[b]:
                    both = chars.intersection(left, right)
                    if both:
                        row.append((both, _number((to_a, to_b), pairs, order)))
            edges.append(tuple(row))
        return minimal(edges, [self.accepting[a] and other.accepting[b] for a, b in order])

    def complement(self) -> Automaton:
        """The texts that are not accepted."""
        sink = len(self.edges)
        edges = []
        for row in self.edges:
            rest = chars.complement(chars.union(*(ranges for ranges, _ in row)))
            edges.append((*row, (rest, sink)) if rest else row)
        edges.append(((chars.EVERY, sink),))
        return minimal(edges, [not accepts for accepts in (*self.accepting, False)])


ANY_TEXT = Automaton((((chars.EVERY, 0),),), (True,))


def of_length(low: int, high: int | None) -> Automaton:
    """The texts of `low` to `high` characters."""
    last = low if high is None else high
    if last + 1 > MAX_STATES:
        raise _too_large()
    edges: list[tuple[tuple[Ranges, int], ...]] = [((chars.EVERY, place + 1),) for place in range(last)]
    edges.append(((chars.EVERY, last),) if high is None else ())
    return Automaton(tuple(edges), tuple(place >= low for place in range(last + 1)))


def of_texts(values: Iterable[str]) -> Automaton:
    """Exactly the given texts."""
    return _determined(Alt(tuple(text(value) for value in values)))


@functools.lru_cache(maxsize=512)
def of_regex(node: Regex) -> Automaton:
    """The texts of an expression without anchors.

    Raises:
        GrammarError: more states than can be enforced.
    """
    return _determined(node)


def _too_large() -> GrammarError:
    return GrammarError(
        f"needs more than {MAX_STATES} states: shorten its repeats, lengths or alternatives until "
        f"{MAX_STATES} suffice"
    )


def _number(key: object, numbers: dict, order: list) -> int:
    if key not in numbers:
        if len(order) >= MAX_STATES:
            raise _too_large()
        numbers[key] = len(order)
        order.append(key)
    return numbers[key]


def check_size(node: Regex) -> None:
    """Refuses an expression that is too large with its repeats written out.

    Raises:
        GrammarError: saying how large it is.
    """
    size = _size(node)
    if size > MAX_POSITIONS:
        raise GrammarError(
            f"has {size} characters with its repeats written out: at most {MAX_POSITIONS} can be enforced"
        )


def _size(node: Regex) -> int:
    match node:
        case Chars():
            return 1
        case Cat(children) | Alt(children):
            return 1 + sum(_size(child) for child in children)
        case Rep(body, low, high):
            return 1 + _size(body) * max(low + 1 if high is None else high, 1)
    raise AssertionError(f"{node=}")


class _Nfa:
    """Positions with edges on characters and free edges."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = []
        self.free: list[list[int]] = []

    def position(self) -> int:
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def add(self, node: Regex, start: int) -> int:
        """Adds an expression behind `start`; returns the position behind it."""
        match node:
            case Chars(ranges):
                end = self.position()
                self.steps[start].append((ranges, end))
                return end
            case Cat(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Alt(options):
                end = self.position()
                for option in options:
                    self.free[self.add(option, start)].append(end)
                return end
            case Rep(body, low, high):
                for _ in range(low):
                    start = self.add(body, start)
                if high is None:
                    loop = self.position()
                    self.free[start].append(loop)
                    self.free[self.add(body, loop)].append(loop)
                    return loop
                end = self.position()
                for _ in range(high - low):
                    self.free[start].append(end)
                    fresh = self.position()
                    self.free[start].append(fresh)
                    start = self.add(body, fresh)
                self.free[start].append(end)
                return end
        raise AssertionError(f"{node=}")

    def closure(self, positions: Iterable[int]) -> frozenset[int]:
        seen = set(positions)
        todo = list(seen)
        while todo:
            for target in self.free[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return frozenset(seen)


def _determined(node: Regex) -> Automaton:
    check_size(node)
    nfa = _Nfa()
    end = nfa.add(node, nfa.position())
    start = nfa.closure([0])
    numbers, order, edges, work = {start: 0}, [start], [], 0
    for state in order:  # grows while it is read
        work += len(state)
        if work > _MAX_WORK:
            raise _too_large()
        edges.append(
            tuple(
                (ranges, _number(nfa.closure(targets), numbers, order))
                for ranges, targets in _split([step for p in sorted(state) for step in nfa.steps[p]])
            )
        )
    return minimal(edges, [end in state for state in order])


def _split(steps: list[tuple[Ranges, int]]) -> list[tuple[Ranges, frozenset[int]]]:
    """Disjoint character sets and all the positions that each of them leads to."""
    events: dict[int, tuple[list[int], list[int]]] = {}
    for ranges, target in steps:
        for low, high in ranges:
            events.setdefault(low, ([], []))[0].append(target)
            events.setdefault(high + 1, ([], []))[1].append(target)
    active: dict[int, int] = {}
    groups: dict[frozenset[int], list[tuple[int, int]]] = {}
    borders = sorted(events)
    for border, following in zip(borders, borders[1:] + [0]):
        opened, closed = events[border]
        for target in opened:
            active[target] = active.get(target, 0) + 1
        for target in closed:
            active[target] -= 1
            if not active[target]:
                del active[target]
        if active:
            groups.setdefault(frozenset(active), []).append((border, following - 1))
    return [(chars.ranges_of(pairs), targets) for targets, pairs in groups.items()]


def minimal(edges: list[tuple[tuple[Ranges, int], ...]], accepting: list[bool]) -> Automaton:
    """Drops states that reach no accepting one and joins those that accept the same."""
    sources: list[list[int]] = [[] for _ in edges]
    for state, row in enumerate(edges):
        for _, target in row:
            sources[target].append(state)
    alive = {state for state, accepts in enumerate(accepting) if accepts}
    todo = list(alive)
    while todo:
        for source in sources[todo.pop()]:
            if source not in alive:
                alive.add(source)
                todo.append(source)
    if 0 not in alive:
        return Automaton(((),), (False,))
    states = sorted(alive)
    block = {state: int(accepting[state]) for state in states}
    count = 0
    for _ in range(_MAX_ROUNDS):
        signatures: dict[object, int] = {}
        refined = {}
        for state in states:
            signature = (block[state], frozenset(_leads(edges[state], block)))
            refined[state] = signatures.setdefault(signature, len(signatures))
        stable = len(signatures) == count
        count, block = len(signatures), refined
        if stable:
            break
    else:  # a long chain, whose states differ anyway
        block = {state: place for place, state in enumerate(states)}
    # blocks are numbered by their first state, so the start is block 0
    first: dict[int, int] = {}
    for state in states:
        first.setdefault(block[state], state)
    return Automaton(
        tuple(tuple(_leads(edges[state], block)) for state in first.values()),
        tuple(accepting[state] for state in first.values()),
    )


def _leads(row: tuple[tuple[Ranges, int], ...], block: dict[int, int]) -> list[tuple[Ranges, int]]:
    """The edges of a state with targets as blocks; edges to states without a block are left out."""
    leads: dict[int, list[tuple[int, int]]] = {}
    for ranges, target in row:
        if target in block:
            leads.setdefault(block[target], []).extend(ranges)
    return [(chars.ranges_of(pairs), target) for target, pairs in leads.items()]
