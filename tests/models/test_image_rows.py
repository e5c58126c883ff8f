"""Tokens of images: they pass Engram unchanged and are routed with a bias of their own."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.models import load_backbone
from tilelang_ops.moe import route_topk

IS_IMAGE = torch.tensor([False, True, True, False, True, False])


def test_engram_passes_them_by() -> None:
    model = load_backbone("tiny-quant")
    engram = model.layers[1].engram
    streams = torch.randn(6, model.config.hc_mult, model.config.hidden_size)
    rows = torch.randint(0, engram.table.rows.shape[0], (6, model.config.engram_num_columns)).int()
    mixed, text = engram(streams, rows, IS_IMAGE), engram(streams, rows)
    assert_same_bits(mixed[IS_IMAGE], streams[IS_IMAGE])
    assert_same_bits(mixed[~IS_IMAGE], text[~IS_IMAGE])
    assert (text != streams).any(2).all()


def test_experts_are_chosen_with_their_bias() -> None:
    model = load_backbone("tiny-quant")
    moe = model.layers[0].moe
    x = torch.randn(6, model.config.hidden_size)
    ids, weights = moe.route(x, IS_IMAGE)
    logits = moe.gate(x, moe.arithmetic, torch.float32)
    for rows, bias in ((IS_IMAGE, moe.image_bias), (~IS_IMAGE, moe.bias)):
        expected_ids, expected_weights = route_topk(logits[rows], bias, moe.num_selected, moe.routed_scale)
        assert torch.equal(ids[rows], expected_ids)
        assert_same_bits(weights[rows], expected_weights)
    assert not torch.equal(moe.route(x)[0], ids)
    mixed, text = moe(x, IS_IMAGE), moe(x)
    assert_same_bits(mixed[~IS_IMAGE], text[~IS_IMAGE])
    assert (mixed != text)[IS_IMAGE].any()
