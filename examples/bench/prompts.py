"""Prompts: real texts for real models, drawn tokens for random ones and where only lengths matter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SETS = Path(__file__).resolve().parents[1] / "prompts.json"


def prompt_rows(tokenizer: Any, name: str) -> list[list[int]]:
    """Token ids of a prompt set.

    Args:
        tokenizer: of the model.
        name: a set of `examples/prompts.json`; "mixed" for questions, stories and the rest in turns; or a
            file with a JSON list of texts.
    """
    sets = json.loads(SETS.read_text(encoding="utf-8"))
    if name == "mixed":
        groups = [_encode(tokenizer, key, texts) for key, texts in sets.items()]
        rows = itertools.chain.from_iterable(itertools.zip_longest(*groups))
        return [row for row in rows if row is not None]
    if name in sets:
        return _encode(tokenizer, name, sets[name])
    texts = json.loads(Path(name).read_text(encoding="utf-8")) if Path(name).is_file() else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"--prompts {name}: expected a file with a JSON list of texts, or one of "
            f"{', '.join(('mixed', *sets))}"
        )
    return _encode(tokenizer, name, texts)


def contexts(rows: list[list[int]], count: int, length: int | None) -> list[np.ndarray]:
    """`count` prompts from a set: as they stand, or each behind others of the set, `length` tokens in all."""
    prompts = []
    for place in range(count):
        row = rows[place % len(rows)]
        if length is None:
            prompts.append(np.asarray(row, dtype=np.int32))
            continue
        tail = np.asarray(row[-length:], dtype=np.int32)
        filler = itertools.chain.from_iterable(_from(rows, place + 1))
        head = np.fromiter(itertools.islice(filler, length - len(tail)), dtype=np.int32)
        prompts.append(np.concatenate([head, tail]))
    return prompts


def drawn(count: int, length: int, vocab_size: int, banned: tuple[int, ...], seed: int) -> np.ndarray:
    """[count, length] int32 tokens, none of `banned`."""
    allowed = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.asarray(banned, dtype=np.int32))
    return np.random.default_rng(seed).choice(allowed, size=(count, length))


def _encode(tokenizer: Any, name: str, texts: list[str]) -> list[list[int]]:
    if name == "questions":
        chats = [[{"role": "user", "content": text}] for text in texts]
        return [list(tokenizer.apply_chat_template(chat)) for chat in chats]
    return [list(tokenizer.encode(text)) for text in texts]


def _from(rows: list[list[int]], place: int) -> Iterator[list[int]]:
    """The rows from `place` on, again and again."""
    return itertools.islice(itertools.cycle(rows), place % len(rows), None)
