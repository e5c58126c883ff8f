"""The packed form, which a GPU multiplies, on the references of its operators: weights, lists and logits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.errors import CheckpointError
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.config import ARITHMETICS
from deepinfer.layers.experts import PackedExperts
from deepinfer.layers.linear import DenseLinear, Fp8Linear
from deepinfer.layers.rotary import RotaryTable, RotaryTables, plain_frequencies
from deepinfer.models.deepseek_v41 import attention, hyper_connection, moe
from deepinfer.models.deepseek_v41 import model as model_module
from deepinfer.models.deepseek_v41.device_rows import DeviceRows, ListSizes
from deepinfer.models.deepseek_v41.needed_rows import NeededRows
from deepinfer.models.deepseek_v41.rows import RowSet
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.utils.aside import Aside
from tests.checkpoint.micro import Entry, micro_files, write
from tests.models.checks import NEAR_TIE, check_logits
from tests.support.compare import assert_same_bits
from tests.support.draft_harness import DraftHarness
from tests.support.forward_harness import ForwardHarness
from tests.support.golden import golden
from tests.support.models import DEVICES, fold_map, load_backbone, load_drafter, packed_model
from tilelang_ops.common.packing import unpack_fp8, unpack_mxfp4
from tilelang_ops.gemm.grouped_linear_mxfp4 import reference as grouped_linear_mxfp4
from tilelang_ops.gemm.grouped_swiglu_mxfp4 import reference as grouped_swiglu_mxfp4
from tilelang_ops.gemm.linear_fp8 import reference as linear_fp8
from tilelang_ops.gemm.linear_w8a8 import reference as linear_w8a8

W8A8 = ARITHMETICS["w8a8"]
WINDOW = 128


@pytest.fixture(autouse=True)
def _unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references unpack weights at every call."""
    for module, name in (
        (linear_fp8, "unpack_fp8"),
        (linear_w8a8, "unpack_units"),
        (grouped_swiglu_mxfp4, "unpack_mxfp4"),
        (grouped_linear_mxfp4, "unpack_mxfp4"),
    ):
        monkeypatch.setattr(module, name, _kept(getattr(module, name)))


def _kept(unpack: Callable[..., Tensor]) -> Callable[..., Tensor]:
    done: dict[int, tuple[Tensor, Tensor]] = {}

    def look_up(packed: Tensor, *others: Tensor, **options: bool) -> Tensor:
        if id(packed) not in done:
            done[id(packed)] = packed, unpack(packed, *others, **options)
        return done[id(packed)][1]

    return look_up


def test_weights_mean_the_same() -> None:
    model, drafter = packed_model("tiny-quant")
    exact, exact_drafter = load_backbone("tiny-quant", "w8a8"), load_drafter("tiny-quant", "w8a8")
    layer, expected = model.layers[3], exact.layers[3]
    for packed, linear in (
        (layer.moe.shared_w13, expected.moe.shared_w13),
        (layer.attention.wo_a, expected.attention.wo_a),
        (drafter.main_proj, exact_drafter.main_proj),
    ):
        assert isinstance(packed, Fp8Linear) and packed.columns == linear.columns
        width = linear.weight.shape[1]
        values = unpack_fp8(packed.packed)[:, : packed.columns // packed.num_groups, :width].flatten(0, 1)
        assert_same_bits(values, linear.weight.float(), packed.name)
    experts = layer.moe.experts
    assert isinstance(experts, PackedExperts)
    assert_same_bits(
        unpack_mxfp4(experts.w13, gated=True)[..., : experts.hidden], expected.moe.experts.w13.float(), "w13"
    )
    assert_same_bits(
        unpack_mxfp4(experts.w2)[:, : experts.hidden, : experts.inner], expected.moe.experts.w2.float(), "w2"
    )
    site, gate = layer.attn_hc.project, layer.moe.gate
    assert isinstance(site, DenseLinear) and isinstance(gate, DenseLinear) and gate.num_parts == 1
    assert_same_bits(
        site.weight.float().unflatten(0, (3, -1)).sum(0), expected.attn_hc.project.weight, "mixes"
    )
    assert_same_bits(gate.weight, expected.moe.gate.weight, "gate")


def test_a_part_of_the_experts() -> None:
    """What two ranks with half of the experts each give is together what all give."""
    model, _ = packed_model("tiny-quant")
    experts, half = model.layers[2].moe.experts, 5
    x = torch.randn(9, experts.hidden).bfloat16()
    ids = torch.stack([torch.randperm(12)[:4] for _ in range(9)]).int()
    weights = torch.rand(9, 4)
    parts = [
        dataclasses.replace(experts, w13=experts.w13[s], w2=experts.w2[s], first=s.start or 0)
        for s in (slice(None, half), slice(half, None))
    ]
    whole = experts(x, ids, weights, 10.0, W8A8)
    low, high = (part(x, ids, weights, 10.0, W8A8) for part in parts)
    torch.testing.assert_close(low + high, whole, rtol=1e-5, atol=1e-5)
    assert low.abs().max() > 0 and high.abs().max() > 0


def test_what_cannot_be_multiplied(tmp_path) -> None:
    """Errors name the tensor and what would work."""
    files = micro_files()
    name = "layers.2.ffn.shared_experts.w2"
    for scale, message in ((200, "at most 134"), (2, "below 3")):
        spoilt = {
            file: {
                key: dataclasses.replace(entry, data=bytes([scale]) * len(entry.data))
                if key == f"{name}.scale"
                else entry
                for key, entry in entries.items()
            }
            for file, entries in files.items()
        }
        weights = Weights(CheckpointReader(write(tmp_path / str(scale), spoilt)), is_packed=True)
        with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
            weights.linear(name)
    expert = "layers.2.ffn.experts"
    names = [f"{expert}.0.{matrix}.weight" for matrix in ("w1", "w2", "w3")]
    entries = {name: Entry("BF16", (32, 32), bytes(2048)) for name in names}
    write(tmp_path / "plain", {"model.safetensors": entries})
    (tmp_path / "plain" / "model.safetensors.index.json").unlink()
    weights = Weights(CheckpointReader(tmp_path / "plain"), is_packed=True)
    with pytest.raises(CheckpointError, match=r"without scales.*DEEPINFER_ACCELERATOR=cpu"):
        weights.experts(expert, 1)


FORMS = [*((device, False) for device in DEVICES), ("cpu", True)]  # kernels of codes take whole units


@pytest.mark.parametrize(("device", "takes_codes"), FORMS)
def test_logits_and_drafts(device: str, takes_codes: bool) -> None:
    """Logits are as far from the golden ones as another implementation's; clear tokens of the text agree."""
    model, drafter = packed_model("tiny-quant", device, takes_codes=takes_codes)
    data = golden("tiny-quant")
    fold = fold_map("tiny-quant")
    harness = DraftHarness(model, drafter, fold, num_seqs=2)
    expected = data.greedy["len128"]["w8a8"]
    text = harness.add([*data.prompts["len128"], *expected["token_ids"][:6]])
    logits = [harness.prefill(text, outputs="all", limit=128).cpu()]
    check_logits(data, "w8a8", "len128", logits[0])
    logits = [logits[0][-1:], *(harness.step([(text, rows)], "all", decode=True).cpu() for rows in (1, 4))]
    best = torch.cat(logits).argmax(1).tolist()
    clear = [step for step, margin in enumerate(expected["margins"][:6]) if margin > 5 * NEAR_TIE]
    assert clear and [best[step] for step in clear] == [expected["token_ids"][step] for step in clear]
    exact = DraftHarness(
        load_backbone("tiny-quant", "w8a8"), load_drafter("tiny-quant", "w8a8"), fold, num_seqs=1
    )
    seqs = [h.add(data.prompts["len7"]) for h in (exact, harness)]
    anchors = [int(h.prefill(seq).argmax()) for h, seq in zip((exact, harness), seqs)]
    theirs, mine = (
        h.propose([seq], anchors[:1]).logits[0, 0].cpu() for h, seq in zip((exact, harness), seqs)
    )
    assert (mine - theirs).square().mean().sqrt() < 0.2 * theirs.std()


@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_that_no_decoder_layer_needs(device: str) -> None:
    """The start of a long prompt ends at the first decoder layer; the drafter gets nothing of it."""
    model, drafter = packed_model("tiny-quant", device)
    harness = DraftHarness(model, drafter, fold_map("tiny-quant"), num_seqs=1)
    text = harness.add([*golden("tiny-quant").prompts["len300"]] * 3)
    model.counters.reset()
    assert harness.step([(text, 40)]).shape[0] == 0
    first = model.spec.first_decoder_layer
    assert model.counters.kv_rows == [40] * first + [0] * (8 - first)
    output = harness.last_output
    assert output is not None and output.features is not None and output.features.shape[0] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_write_nowhere(device: str) -> None:
    """Rows behind the last sequence, and a bound above all lengths, change nothing that anybody reads."""
    model, drafter = packed_model("tiny-quant", device)
    tokens = golden("tiny-quant").prompts["len129"]
    results = []
    for padding in (0, 3):
        harness = DraftHarness(model, drafter, fold_map("tiny-quant"), num_seqs=4)
        seqs = [harness.add(tokens), harness.add(tokens[:40])]
        harness.step([(seq, len(seq.tokens) - 4) for seq in seqs], "all")
        batch = harness.batch([(seq, 4) for seq in seqs], "all", decode=True)
        rows = batch.num_rows + padding
        pad = {name: _padded(getattr(batch, name), rows) for name in ("input_ids", "positions", "ngram_ids")}
        bound = 1024 if padding else batch.max_seqlen_k
        batch = dataclasses.replace(
            batch, **pad, output_rows=torch.arange(rows).int().to(device), max_seqlen_k=bound
        )
        with torch.inference_mode():
            output = model.forward(batch, harness.caches, want_features=True)
            context = drafter.context(output.features, output.feature_rows, batch)
            drafter.store_context(context, harness.caches)
        assert output.hidden_states.shape[0] == context.positions.shape[0] == rows
        assert not context.state_slots[8:].any() and (context.state_slots[:8] > 0).all()
        results.append((output.hidden_states[:8], harness.caches.slots[1:], harness.caches.blocks[1:]))
    (plain, *pools), (padded, *others) = results
    torch.testing.assert_close(padded, plain, rtol=0.05, atol=0.05)
    for pool, other in zip(pools, others, strict=True):
        is_free = (pool == 0xFF).all(1)
        assert is_free.any() and torch.equal(is_free, (other == 0xFF).all(1))
        assert (pool != other).float().mean() < 1e-2


class Late(Aside[Any]):
    """Work that runs when its result is asked for: the other extreme of what a second queue may do."""

    def __init__(self, work: Callable[..., Any], inputs: tuple[Any, ...], asked: Counter[str]) -> None:
        super().__init__(None)
        self._work, self._inputs, self._asked = work, inputs, asked
        self._is_made = False

    def result(self) -> Any:
        if not self._is_made:
            self._is_made = True
            self._value = self._work(*self._inputs)
            self._asked[self._work.__name__] += 1
        return self._value


def test_work_aside_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are the same whether work aside runs at once or at last, and all of it is asked for."""
    model, drafter = packed_model("tiny-quant")
    tokens = golden("tiny-quant").prompts["len129"][:40]
    begun, asked = Counter[str](), Counter[str]()

    def late(_: torch.device, work: Callable[..., Any], *inputs: Any) -> Late:
        begun[work.__name__] += 1
        return Late(work, inputs, asked)

    results = []
    for is_late in (False, True):
        if is_late:
            for module in (attention, hyper_connection, model_module, moe):
                monkeypatch.setattr(module, "aside", late)
        harness = DraftHarness(model, drafter, fold_map("tiny-quant"), num_seqs=1)
        seq = harness.add(tokens)
        logits = [harness.step([(seq, 35)], "all"), harness.step([(seq, 4)], "all", decode=True)]
        drafts = harness.propose([seq], [int(logits[-1][-1].argmax())])
        results.append([*logits, drafts.logits, harness.caches.slots, harness.caches.blocks])
    for plain, other in zip(*results, strict=True):
        assert_same_bits(other, plain, "late")
    assert begun == asked
    assert set(begun) == {"_mix", "shared", "_queries", "look_up"}


def _padded(values: Tensor, rows: int) -> Tensor:
    return torch.cat([values, values.new_zeros(rows - values.shape[0], *values.shape[1:])])


def test_lists_of_a_part() -> None:
    """Rows that narrow, bounded or not: what layers read of both kinds of sets is the same."""
    model, _ = packed_model("tiny-quant")
    harness = ForwardHarness(model, fold_map("tiny-quant"), num_seqs=3)
    seqs = [harness.add([5] * n) for n in (300, 7, 150)]
    for seq in seqs:
        seq.computed = len(seq.tokens) // 3
        seq.blocks = harness._free_blocks[:3]
    batch = harness.batch([(seq, seq.remaining) for seq in seqs], "last")
    starts = torch.tensor([170, 0, 60], dtype=torch.int32)
    tables = RotaryTables(*(RotaryTable(plain_frequencies(8, 1e4)) for _ in range(2)))
    batch = dataclasses.replace(batch, total_lens=torch.tensor([900, 7, 700], dtype=torch.int32))
    batch = dataclasses.replace(batch, output_rows=batch.output_rows[1:2])
    needed = NeededRows.build(batch, 8, 4, WINDOW)
    for bound in (None, starts):
        plain = RowSet.whole(batch, tables)
        mine = DeviceRows.whole(batch, tables, ListSizes(WINDOW, 134, 128, (1, 2)))
        if bound is not None:
            plain, mine = plain.bounded(bound), mine.bounded(bound)
        assert needed.kv is not None
        for part in (needed.kv, *(part for part in needed.queries if part is not None)):
            assert part.rows.tolist() == plain.narrowed(part).index.tolist()
            stored, my_stored = plain, mine
            plain, mine = plain.narrowed(part), mine.narrowed(part)
            _same_lists(mine, plain, my_stored, stored)
        assert mine.num_rows == 1


def _same_lists(mine: DeviceRows, plain: RowSet, my_stored: DeviceRows, stored: RowSet) -> None:
    for name in ("index", "positions", "row_seq", "slots", "preceding", "following"):
        assert_same_bits(getattr(mine, name), getattr(plain, name), name)
    assert_same_bits(mine.ring_index(134), plain.ring_index(134), "ring")
    assert_same_bits(mine.line_index(WINDOW)[0], plain.line_index(WINDOW)[0], "line")
    for a, b in zip(mine.history_index(WINDOW, 134), plain.history_index(WINDOW, 134), strict=True):
        assert_same_bits(a, b, "history")
    assert_same_bits(mine.window_in_line(WINDOW, mine), plain.window_in_line(WINDOW, plain), "own window")
    assert_same_bits(
        mine.window_in_line(WINDOW, my_stored),
        plain.window_in_line(WINDOW, stored),
        "window of the set before",
    )
    for ratio in (1, 2):
        mine_groups, groups = mine.groups(ratio, 128 // ratio), plain.groups(ratio, 128 // ratio)
        ends = (mine_groups.ends >= 0).nonzero().squeeze(1)
        for name in ("ends", "slots", "cos", "sin"):
            assert_same_bits(getattr(mine_groups, name)[ends], getattr(groups, name), f"{ratio=} {name}")
        assert_same_bits(mine.num_visible(ratio), plain.num_visible(ratio))
