"""Types of command-line arguments."""

from __future__ import annotations


def positive_number(text: str) -> int:
    """A whole number of at least 1; ValueError for other text."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive_number.__name__ = "positive number"  # what argparse calls it
