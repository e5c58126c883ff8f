"""Cache bytes, hash rows, routing and selections in float32 with release caches, against the golden data.

What stands before the first rounded cache agrees to the bit or to float32's own error. Behind it a value that
falls on the other side of a code moves later values by some percent of a step (a change of 3e-7 in the
embeddings does the same to this model), so later layers may differ in a small share of their codes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.ops.quant import decode_fp4, decode_fp8, decode_mxfp4
from tests.models.golden_runs import GoldenRun, golden_run, row_errors
from tests.support.golden import golden
from tests.support.models import load_config

NAMES = ("tiny-quant", "v41-tiny")
PROMPTS = [
    *(("tiny-quant", f"len{n}") for n in (1, 7, 128, 129, 300, 1000)),
    *(("v41-tiny", f"len{n}") for n in (1, 7, 128, 129, 300)),
]
FIRST_CLEAR, LATER_CLEAR = 0.01, 0.05  # a gap below this part of the scores' spread is a near tie
CLEAR_ROUTE = 1e-3  # a smaller gap between the last chosen expert and the first refused one is a near tie


def keys(name: str, prompt: str, what: str) -> list[str]:
    """Golden keys `<what>.layerN` of a prompt."""
    found = sorted(golden(name).caches.under(prompt))
    return [key for key in found if key.startswith(what + ".")]


def layer_of(key: str) -> int:
    return int(key.rpartition("layer")[2])


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_hash_rows(name: str, prompt: str) -> None:
    found = keys(name, prompt, "engram_ids")
    assert len(found) == len(load_config(name).engram_layer_ids)
    for key in found:
        expected = golden(name).caches[f"{prompt}/{key}"]
        assert torch.equal(golden_run(name, "fp32", prompt).record[key], expected), key


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_selections(name: str, prompt: str) -> None:
    """Same entries wherever the last chosen and the first refused score are clearly apart."""
    data, run = golden(name).caches, golden_run(name, "fp32", prompt)
    found = keys(name, prompt, "selected")
    assert found
    for key in found:
        expected = data[f"{prompt}/{key}"].int()  # the longest prompt: its last rows alone
        gap = data[f"{prompt}/selection_gap.layer{layer_of(key)}"]
        actual = run.record[key][-len(expected) :]
        width = expected.shape[1]
        assert (actual[:, width:] == -1).all(), f"{key}: more entries than the golden data has"
        differs = (actual[:, :width] != expected).any(1)
        clear = FIRST_CLEAR if key == found[0] else LATER_CLEAR
        assert (gap[differs] < clear).all(), f"{key}: rows {differs.nonzero().flatten().tolist()}"
        pairs = zip(actual.tolist(), expected.tolist(), strict=True)
        swapped = sum(len(set(mine) - set(theirs) - {-1}) for mine, theirs in pairs)
        assert swapped <= 0.05 * expected.numel(), f"{key}: {swapped} of {expected.numel()} entries differ"


@pytest.mark.parametrize(("name", "prompt"), [("tiny-quant", "len1000"), ("v41-tiny", "len300")])
def test_candidate_blocks(name: str, prompt: str) -> None:
    expected = golden(name).caches[f"{prompt}/candidate_blocks"].bool()  # [rows, blocks]
    config = load_config(name)
    record = golden_run(name, "fp32", prompt).record
    blocks = record[f"candidates.layer{config.candidate_source_layer_id}"][-len(expected) :]
    actual = torch.zeros(len(blocks), expected.shape[1] + 1, dtype=torch.bool)
    actual.scatter_(1, torch.where(blocks < 0, expected.shape[1], blocks).long(), True)
    assert int(expected.sum(1).max()) <= config.candidate_topk_blocks
    differs = (actual[:, :-1] != expected).sum(1)  # a near tie swaps a pair of blocks
    assert differs.max() <= 4 and differs.sum() <= 0.02 * expected.sum(), differs.tolist()


@pytest.mark.parametrize(("name", "prompt"), [p for p in PROMPTS if keys(*p, "route_ids")])
def test_routing(name: str, prompt: str) -> None:
    data, run = golden(name).caches, golden_run(name, "fp32", prompt)
    for key in keys(name, prompt, "route_ids"):
        layer_id = layer_of(key)
        expected = data[f"{prompt}/{key}"].long()
        actual = run.record[key].long()
        differs = (actual.sort(1).values != expected.sort(1).values).any(1)
        gap = data[f"{prompt}/route_gap.layer{layer_id}"]
        assert differs.float().mean() <= 0.05, f"{key}: {int(differs.sum())} rows differ"
        # Values before the router may differ by a flipped cache code, far more than by float32 rounding.
        assert (gap[differs] < 50 * CLEAR_ROUTE).all(), f"{key}: {gap[differs].tolist()}"
        if layer_id == 0:
            assert not differs[gap > CLEAR_ROUTE].any()
        dense = torch.zeros(2, len(actual), load_config(name).n_routed_experts)
        dense[0].scatter_(1, actual, run.record[f"route_weights.layer{layer_id}"])
        dense[1].scatter_(1, expected, data[f"{prompt}/route_weights.layer{layer_id}"])
        error = (dense[0] - dense[1]).abs().amax(1)
        assert error.median() < (1e-6 if layer_id == 0 else 1e-3), f"{key}: {error.median():.1e}"


def check_values(what: str, actual: Tensor, expected: Tensor, is_first: bool) -> None:
    """Decoded records: equal in the first layer but for a few ties, else most of them and near."""
    expected = expected.float()
    share, limit = (0.002, 0.01) if is_first else (0.2, 0.15)
    differs = (actual != expected).float().mean()
    assert differs <= share, f"{what}: {differs:.2%} of the values differ"
    errors = row_errors(actual, expected)
    assert errors.max() <= limit, f"{what}: error {errors.max():.1e}"


def entry_records(run: GoldenRun, layer_id: int, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded main KV and index keys of entries, through the block table."""
    view = run.caches.paged(layer_id)
    per_block = view.section.entries
    blocks = torch.tensor(run.sequence.blocks)[groups.long() // per_block]
    slots = groups.long() % per_block
    main = view.main[blocks, slots]
    return (
        decode_fp4(main[:, :256], main[:, 256:]),
        decode_mxfp4(view.codes[blocks, slots], view.scales[blocks, slots]),
    )


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_compressed_entries(name: str, prompt: str) -> None:
    data, run = golden(name).caches, golden_run(name, "fp32", prompt)
    for key in keys(name, prompt, "group_ids"):
        layer_id = layer_of(key)
        main, index = entry_records(run, layer_id, data[f"{prompt}/{key}"])
        is_first = layer_id == min(load_config(name).kv_source_layer_ids)
        check_values(f"main {key}", main, data[f"{prompt}/compressed_kv.layer{layer_id}"], is_first)
        check_values(f"index {key}", index, data[f"{prompt}/index_k.layer{layer_id}"], is_first)


@pytest.mark.parametrize(("name", "prompt"), [p for p in PROMPTS if keys(*p, "window_kv_last4")])
def test_window_rings(name: str, prompt: str) -> None:
    data, run = golden(name).caches, golden_run(name, "fp32", prompt)
    newest = torch.arange(len(run.logits))[-4:]
    found = keys(name, prompt, "window_kv_last4")
    assert len(found) == load_config(name).num_hidden_layers
    for key in found:
        ring = run.caches.window(layer_of(key))
        records = ring[run.sequence.slot, newest % ring.shape[1]]
        values = decode_fp8(records[:, :512], records[:, 512:])
        check_values(key, values, data[f"{prompt}/{key}"], is_first=layer_of(key) == 0)
