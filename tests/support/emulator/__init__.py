"""Runs traced TileLang programs on the CPU.

A program is printed as C++ before any of TileLang's own passes: this tests what it computes and where it
reads and writes, not the compiler. `statements.py` and `expressions.py` print, `runtime/` is what the printed
text uses, `program.py` builds and calls.
"""

from tests.support.emulator.nodes import Unsupported
from tests.support.emulator.program import EmulatedProgram, EmulationError

__all__ = ["EmulatedProgram", "EmulationError", "Unsupported"]
