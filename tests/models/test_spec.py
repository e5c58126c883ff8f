"""The caches that a configuration asks for."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer.models.base import CompressionSpec, PagedSpec
from deepinfer.models.deepseek_v41.spec import model_spec
from tests.support.models import load_backbone, load_config


def test_tiny_quant() -> None:
    spec = model_spec(load_config("tiny-quant"))
    assert (spec.vocab_size, spec.num_layers, spec.first_decoder_layer) == (4096, 8, 4)
    assert (spec.max_ngram, spec.draft_block_size) == (4, 5)
    assert [w.layer_id for w in spec.windows] == list(range(10))  # two drafter layers behind the backbone's
    assert {(w.window, w.width) for w in spec.windows} == {(128, 512)}
    assert spec.paged == (PagedSpec(1, 2, 512, 128), PagedSpec(3, 2, 512, 128), PagedSpec(4, 1, 512, 128))
    assert spec.compression == (CompressionSpec(1, 2, 512), CompressionSpec(3, 2, 512))


def test_v41_tiny() -> None:
    spec = model_spec(load_config("v41-tiny"))
    assert [w.layer_id for w in spec.windows] == list(range(11))
    assert [(p.layer_id, p.ratio) for p in spec.paged] == [(2, 2), (4, 1)]
    assert spec.compression == (CompressionSpec(2, 2, 512),)


def test_without_engram_and_drafter() -> None:
    config = dataclasses.replace(
        load_config("tiny-quant"),
        engram_layer_ids=(),
        num_nextn_predict_layers=0,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
    )
    spec = model_spec(config)
    assert (spec.max_ngram, spec.draft_block_size, len(spec.windows)) == (0, 0, 8)


@pytest.mark.parametrize("name", ["tiny-quant", "v41-tiny"])
def test_model_carries_it(name: str) -> None:
    assert load_backbone(name).spec == model_spec(load_config(name))
