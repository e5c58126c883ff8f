"""Where the repository keeps what tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
V41_TINY = ROOT / "examples" / "v41-tiny"  # the bundled trained model
DATA = ROOT / "tests" / "data"
TINY_QUANT = DATA / "tiny-quant"  # random weights in the release's formats
GOLDEN = DATA / "golden"
MODELS = {"v41-tiny": V41_TINY, "tiny-quant": TINY_QUANT}
