"""Copies of routed experts: all or none of them."""

from __future__ import annotations

from deepinfer.layers.experts import CodesExperts, copy_codes
from deepinfer.runtime.memory import held_bytes, reached
from tests.support.models import packed_model


def test_copies_that_fit() -> None:
    """They are made where all of them fit, and count as memory of the model."""
    model, drafter = packed_model("tiny-quant", takes_codes=True)
    experts = [part for part in reached(model, drafter) if isinstance(part, CodesExperts)]
    assert len(experts) > len(model.layers)  # those of the drafter as well
    # Three matrices of an expert, a byte a weight, padded to blocks of 64.
    padded = -(-experts[0].hidden // 64) * 64, -(-experts[0].inner // 64) * 64
    wide = -(-2 * experts[0].inner // 64) * 64 * padded[0] + padded[0] * padded[1]
    num_bytes = sum(each.w2.shape[0] for each in experts) * wide
    before = held_bytes(model, drafter)
    assert not copy_codes(experts, num_bytes - 1)
    assert held_bytes(model, drafter) == before
    try:
        assert copy_codes(experts, num_bytes)
        assert held_bytes(model, drafter) == before + num_bytes
    finally:
        for each in experts:
            each.copies.clear()
