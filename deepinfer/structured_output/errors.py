"""What is said when an output's shape cannot be enforced."""

from __future__ import annotations


class GrammarError(ValueError):
    """A regex, grammar, list of choices or structural tag that cannot be enforced; says what would work."""


class SchemaError(GrammarError):
    """A JSON schema that is invalid or asks for something that cannot be enforced.

    Attributes:
        path: JSON pointer of the keyword, as in "#/properties/a/not".
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.message)
