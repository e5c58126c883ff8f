"""EngineType: which phases of a request an engine runs."""

from __future__ import annotations

from enum import IntEnum


class EngineType(IntEnum):
    """The role of an engine; the values equal those of the C++ core.

    NORMAL runs prompts and completions, PROMPT prefills only, COMPLETION decodes only.
    """

    NORMAL = 0
    PROMPT = 1
    COMPLETION = 2

    @property
    def default_zero_overhead_scheduling(self) -> bool:
        """Whether asynchronous scheduling is on when nobody says otherwise."""
        return self is not EngineType.PROMPT
