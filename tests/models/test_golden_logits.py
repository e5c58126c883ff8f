"""Logits of the golden prompts in every mode, and that a spoilt model does not pass."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from tests.models.checks import check_logits
from tests.models.golden_runs import golden_run
from tests.support.forward_harness import ForwardHarness
from tests.support.golden import golden
from tests.support.models import fold_map, load_backbone

FLOAT32_PROMPTS = [
    *(("tiny-quant", f"len{n}") for n in (1, 7, 128, 129, 300, 1000)),
    *(("v41-tiny", f"len{n}") for n in (1, 7, 128, 129, 300)),
]
ROUNDED_PROMPTS = [(name, f"len{n}") for name in ("tiny-quant", "v41-tiny") for n in (1, 7, 128, 300)]


@pytest.mark.parametrize("mode", ["plain", "fp32"])
@pytest.mark.parametrize(("name", "prompt"), FLOAT32_PROMPTS)
def test_float32(name: str, prompt: str, mode: str) -> None:
    check_logits(golden(name), mode, prompt, golden_run(name, mode, prompt).logits)


@pytest.mark.parametrize("mode", ["bf16", "w8a8"])
@pytest.mark.parametrize(("name", "prompt"), ROUNDED_PROMPTS)
def test_rounded_activations(name: str, prompt: str, mode: str) -> None:
    check_logits(golden(name), mode, prompt, golden_run(name, mode, prompt).logits)


def with_layer(model: DeepseekV41Model, layer_id: int, **parts) -> DeepseekV41Model:
    layers = list(model.layers)
    layers[layer_id] = dataclasses.replace(layers[layer_id], **parts)
    return dataclasses.replace(model, layers=tuple(layers))


def one_weight(model: DeepseekV41Model) -> DeepseekV41Model:
    """One element of one attention matrix, by as much as a typical element."""
    attention = model.layers[2].attention
    weight = attention.wkv.weight.clone()
    weight[300, 17] += weight.abs().mean()
    wkv = dataclasses.replace(attention.wkv, weight=weight)
    return with_layer(model, 2, attention=dataclasses.replace(attention, wkv=wkv))


def one_expert_weight(model: DeepseekV41Model) -> DeepseekV41Model:
    moe = model.layers[5].moe
    w2 = moe.experts.w2.clone()
    w2[:, 3, 9] += w2.abs().mean()
    return with_layer(model, 5, moe=dataclasses.replace(moe, experts=dataclasses.replace(moe.experts, w2=w2)))


def one_hash_multiplier(model: DeepseekV41Model) -> DeepseekV41Model:
    multipliers = model.hasher.multipliers.clone()
    multipliers[0, 1] += 2
    return dataclasses.replace(model, hasher=dataclasses.replace(model.hasher, multipliers=multipliers))


def fewer_sinkhorn_rounds(model: DeepseekV41Model) -> DeepseekV41Model:
    site = model.layers[1].ffn_hc
    return with_layer(model, 1, ffn_hc=dataclasses.replace(site, num_rounds=site.num_rounds // 4))


@pytest.mark.parametrize(
    ("mutate", "mode"),
    [
        (one_weight, "plain"),  # in plain arithmetic the smallest change shows
        (one_expert_weight, "plain"),
        (fewer_sinkhorn_rounds, "plain"),
        (one_hash_multiplier, "plain"),
        (one_hash_multiplier, "fp32"),
    ],
)
def test_mutants_fail(mutate, mode: str) -> None:
    data, arithmetic = golden("tiny-quant"), {"plain": "plain", "fp32": "float32"}[mode]
    harness = ForwardHarness(mutate(load_backbone("tiny-quant", arithmetic)), fold_map("tiny-quant"))
    logits = harness.prefill(harness.add(data.prompts["len129"]), outputs="all")
    with pytest.raises(AssertionError, match="error"):
        check_logits(data, mode, "len129", logits)


@pytest.mark.parametrize("layer_id", [0, 7])
def test_one_spoilt_ring_record_shows(layer_id: int) -> None:
    data = golden("tiny-quant")
    tokens, expected = data.prompts["len129"], data.logits["len129/plain/logits"][-1:]
    harness = ForwardHarness(load_backbone("tiny-quant", "plain"), fold_map("tiny-quant"))
    errors = []
    for spoil in (False, True):
        seq = harness.add(tokens)
        harness.prefill(seq, limit=128)
        if spoil:
            ring = harness.caches.window(layer_id)
            ring[seq.slot, 77 % ring.shape[1]] += 0.5
        logits = harness.step([(seq, 1)], decode=True)
        errors.append(float((logits - expected).abs().max() / expected.std()))
    assert errors[0] < 1e-5 < 1e-3 < errors[1], errors
