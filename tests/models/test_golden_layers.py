"""Inner values of every layer against the golden data: streams, mixes, inputs and outputs of sublayers."""

from __future__ import annotations

import pytest
import torch

from tests.models.golden_runs import golden_run, row_errors
from tests.support.compare import assert_same_bits
from tests.support.golden import golden
from tests.support.models import load_backbone

# Prompts whose inner values are in the golden data.
PROMPTS = [("tiny-quant", "len129"), ("tiny-quant", "len300"), ("v41-tiny", "len128"), ("v41-tiny", "len129")]
FP8_PROMPTS = {"tiny-quant": "len129", "v41-tiny": "len128"}


def golden_values(name: str, prompt: str, mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    values = golden(name).layers.under(f"{prompt}/{mode}")
    return values.pop("positions").long(), values


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_plain(name: str, prompt: str) -> None:
    """Float32's own error; rows behind an exact tie of index scores (see checks.py) are some 1e-4 off."""
    positions, values = golden_values(name, prompt, "plain")
    record = golden_run(name, "plain", prompt).record
    assert len(values) == 8 * 11 + 2 + 3
    errors = {key: row_errors(record[key][positions], value) for key, value in values.items()}
    for key, of_rows in errors.items():
        assert of_rows.median() < 1e-5, f"{key}: median error {of_rows.median():.1e}"
        assert of_rows.max() < 1e-3, f"{key}: error {of_rows.max():.1e}"
    assert torch.cat(list(errors.values())).quantile(0.9) < 5e-6


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_float32_with_release_caches(name: str, prompt: str) -> None:
    positions, values = golden_values(name, prompt, "fp32")
    record = golden_run(name, "fp32", prompt).record
    rows = {key: row_errors(record[key][positions], value) for key, value in values.items()}
    for key, errors in rows.items():
        assert errors.median() < 0.02, f"{key}: median error {errors.median():.1e}"
        assert errors.max() < 0.1, f"{key}: error {errors.max():.1e}"
    assert torch.cat(list(rows.values())).median() < 1e-3


@pytest.mark.parametrize("what", ["streams_in", "attn_in", "attn_out", "ffn_in"])
@pytest.mark.parametrize(("name", "prompt"), FP8_PROMPTS.items())
def test_fp8_activations_give_the_same_bits(name: str, prompt: str, what: str) -> None:
    """In the first layer of w8a8 every rounding point up to the experts is the golden data's own."""
    positions, values = golden_values(name, prompt, "w8a8")
    key = f"layer0.{what}"
    actual = golden_run(name, "w8a8", prompt).record[key][positions].float()
    differs = (actual != values[key]).float().mean()
    # A sum of products in another order may round to the other bfloat16.
    assert differs < 0.01 and row_errors(actual, values[key]).max() < 1e-3, f"{differs:.2%} of {key} differ"


@pytest.mark.parametrize(("name", "prompt"), FP8_PROMPTS.items())
def test_fp8_experts_give_the_same_bits(name: str, prompt: str) -> None:
    """But for the last rounding: the sum of all experts is rounded once, as in the release.

    The golden data rounds the routed experts' sum to bfloat16 before the shared expert joins it.
    """
    values = golden_values(name, prompt, "w8a8")[1]
    moe = load_backbone(name, "w8a8").layers[0].moe
    x = values["layer0.ffn_in"].bfloat16()
    routed = moe.experts(x, *moe.route(x), moe.limit, moe.arithmetic)
    shared = moe.shared(x)
    expected = values["layer0.ffn_out"]
    differs = ((routed.bfloat16() + shared).float() != expected).float().mean()
    assert differs < 0.01, f"{differs:.2%} of the sums differ"
    assert_same_bits(moe(x), (routed + shared).bfloat16(), "one rounding")
    assert row_errors(moe(x), expected).max() < 2.0**-8


@pytest.mark.parametrize(("name", "prompt"), FP8_PROMPTS.items())
def test_fp8_activations_stay_near_in_all_layers(name: str, prompt: str) -> None:
    positions, values = golden_values(name, prompt, "w8a8")
    record = golden_run(name, "w8a8", prompt).record
    for key, value in values.items():
        errors = row_errors(record[key][positions], value)
        assert errors.median() < 0.15, f"{key}: median error {errors.median():.2f}"


@pytest.mark.parametrize(("name", "prompt"), [*PROMPTS, ("tiny-quant", "len7"), ("v41-tiny", "len7")])
@pytest.mark.parametrize("mode", ["plain", "fp32"])
def test_drafter_features(name: str, prompt: str, mode: str) -> None:
    """Mean streams at the attention's entry of the target layers, side by side, for the newest token."""
    expected = golden(name).dspark[f"{prompt}/{mode}/target_features_last"]
    actual = golden_run(name, mode, prompt).features[-1]
    assert row_errors(actual[None], expected.reshape(1, -1)).max() < (1e-5 if mode == "plain" else 0.05)
