"""Files of prompts: a JSON list of texts, or an object of such lists, its groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUNDLED_PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "prompts.json"
CHAT_GROUP = "questions"


@dataclass(frozen=True)
class TextPrompt:
    """A text, with the name of its group: "" in a file that is a list."""

    text: str
    group: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat message; else it is continued."""
        return self.group == CHAT_GROUP


def read_prompts(path: str | Path, groups: Sequence[str] | None = None) -> list[TextPrompt]:
    """The texts of a file, each once, in its order. Values of an object that are no lists are skipped.

    Args:
        groups: names of those wanted; None for all.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts file {path} cannot be read: {error}; name one with --prompts") from error
    given = content if isinstance(content, dict) else {"": content}
    lists = {name: texts for name, texts in given.items() if isinstance(texts, list)}
    if groups is not None and (unknown := [name for name in groups if name not in lists]):
        known = ", ".join(name for name in lists if name) or "none, it is one list"
        raise ValueError(f"{path} has no group {unknown[0]!r}; it has {known}")
    prompts = {
        (name, str(text)): isinstance(text, str) and bool(text)
        for name, texts in lists.items()
        if groups is None or name in groups
        for text in texts
    }
    if not prompts or not all(prompts.values()):
        raise ValueError(f"{path} must be a JSON list of texts, or an object of such lists")
    return [TextPrompt(text, name) for name, text in prompts]
