"""Bad environment variables stop an engine before it loads anything, and say what would work."""

from __future__ import annotations

import pytest

from deepinfer.entrypoints.llm import LLM
from tests.support.paths import V41_TINY


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "7..3", "strictly increasing"),
        ("DEEPINFER_SAMPLER_FORCE_TOPK", "-1", "an integer >= 0"),
        ("DEEPINFER_SAMPLER_FORCE_TOPK", "many", "an integer >= 0"),
        ("DEEPINFER_BATCH_INVARIENT", "1", "nearest one is DEEPINFER_BATCH_INVARIANT"),
        ("DEEPINFER_NUM_STATE_SLOTS_RATIO", "0.5", "a number >= 1"),
        ("DEEPINFER_USE_NEXTN_DECODE", "6", "trained for blocks of 5 tokens"),
    ],
)
def test_bad_variables_stop_the_engine(monkeypatch, name, text, message):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        LLM(str(V41_TINY))
