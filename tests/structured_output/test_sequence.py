"""SequenceGrammar against a fresh matcher: whatever was drafted, emitted or forgotten, masks are those of the
tokens alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer.structured_output.matcher import SequenceMatcher
from deepinfer.structured_output.sequence import SequenceGrammar
from tests.support.so_vocabulary import EOS, matcher, tokens_of

GRAMMARS = {
    "expression": ("regex", "([ab]+1){12}é", (), None),
    "list": ("json", '{"type": "array", "items": {"enum": ["a", "é"]}, "minItems": 9}', (), None),
    "trigger": ("regex", "([ab]*1){6}", (3, 4, 3, 3, 4), None),
    "bound": ("regex", "([ab]*1){6}", (3, 4, 3, 3, 4, 5, 3, 4, 4), 7),
}


def fresh(name: str) -> SequenceMatcher:
    kind, source, trigger, bound = GRAMMARS[name]
    return matcher(kind, source, trigger, bound)


def mask_behind(name: str, tokens: list[int]) -> np.ndarray | None:
    state = fresh(name)
    assert all(state.accept(token) for token in tokens)
    return state.fill()


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other is None or (one is not None and other is not None and (one == other).all())


def drawn(mask: np.ndarray | None, rng: random.Random) -> int:
    """A token that may come, the end only where nothing else may."""
    return (
        rng.choice(sorted(tokens_of(mask) - {EOS}) or [EOS])
        if mask is not None
        else rng.choice([3, 3, 4, 5, 7])
    )


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(6))
def test_masks_follow_from_the_tokens(name: str, seed: int):
    """Steps as the engine makes them: some rows verify drafts, some drafts are wrong, some steps are lost."""
    rng, outputs, drafts = random.Random(f"{name} {seed}"), [], []
    num_rebuilt = num_made = 0

    def make() -> SequenceMatcher:
        nonlocal num_made
        num_made += 1
        return fresh(name)

    grammar = SequenceGrammar(make, 3, [EOS], lambda: outputs, False)
    while len(outputs) < 30 and EOS not in outputs:
        if rng.random() < 0.2:  # a step is interrupted, or a sequence comes back
            grammar.forget()
            num_rebuilt += 1
        tested = drafts[: rng.randint(0, len(drafts))]  # a step may verify fewer than were drafted
        if rng.random() < 0.2:  # others than were drafted
            tested = [rng.choice([3, 4, 5, 16]) for _ in range(3)]
        masks = grammar.prepare(len(outputs), tested)
        assert grammar.failure is None
        emitted: list[int] = []
        for place, mask in enumerate(masks):
            assert same(mask, mask_behind(name, outputs + tested[:place])), f"{outputs=} {tested=} {place=}"
            may_stand = place < len(tested) and (mask is None or tested[place] in tokens_of(mask))
            if not may_stand or rng.random() < 0.3:
                emitted.append(drawn(mask, rng))
                break
            emitted.append(tested[place])
            if emitted[-1] == EOS:  # nothing comes behind it
                break
        grammar.advance(emitted)
        outputs += emitted
        drafts = []
        for step in range(rng.choice([0, 4]) if EOS not in outputs else 0):
            mask = grammar.draft_mask(step)
            assert same(mask, mask_behind(name, outputs + drafts)), f"{outputs=} {drafts=}"
            drafts.append(drawn(mask, rng))
            grammar.draft(step, drafts[-1])
            if drafts[-1] == EOS:
                break
    assert num_made == 1 and num_rebuilt > 0 and len(outputs) > 5


def test_tokens_that_are_not_there_make_nothing():
    """A sequence that has ended, or whose outputs are others than the step's, has no masks and no failure."""

    def gone() -> list[int]:
        raise KeyError(7)

    for read in (gone, lambda: [3, 4]):
        grammar = SequenceGrammar(lambda: fresh("expression"), 3, [EOS], read, False)
        assert grammar.prepare(5, [3]) == [] and grammar.failure is None and grammar.num_filled == 0


def test_a_token_that_breaks_the_grammar_is_a_failure():
    grammar = SequenceGrammar(lambda: fresh("expression"), 3, [EOS], list, False)
    grammar.prepare(0, [])
    grammar.advance([3, 5])
    assert grammar.failure == "the grammar cannot go on with token 5"
    assert grammar.prepare(2, []) == [] and grammar.draft_mask(0) is None
