"""The sampler's one-operator path: the tokens, faults and log-probabilities of the path by groups."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.sampling.inputs import SamplingInputs, TokenMasks
from deepinfer.sampling.sampler import RowParameters, Sampler, SampleResult
from deepinfer.sampling.verify import verify_decode
from deepinfer.utils.sync_guard import SyncGuard
from deepinfer.utils.upload import upload_one
from tests.sampling.rows import Row, make_inputs

VOCAB, ROWS = 4100, 48
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")


def plain_rows() -> list[Row]:
    """All ways to draw; greedy rows among them."""
    return [
        Row(
            seed=random.getrandbits(64),
            index=random.randrange(1 << 20),
            temperature=random.choice([0.0, 0.0, 0.3, 1.0, 2.0]),
            top_p=random.choice([1.0, 0.9, 0.2]),
            top_k=random.choice([-1, -1, 1, 5, 1000]),
            min_p=random.choice([0.0, 0.0, 0.1]),
        )
        for _ in range(ROWS)
    ]


def special_rows() -> list[Row]:
    """With penalties, bias, bans, lists, forced tokens and log-probabilities."""
    changes: list[dict[str, Any]] = [
        {},
        {"repetition": 1.3, "presence": 0.2, "frequency": 0.1, "prompt": (3, 4), "output": (4, 9, 9)},
        {"bias": {7: 4.0, 8: float("-inf")}},
        {"bans": (1, 2, 3)},
        {"allowed": (20, 30, 31)},
        {"forced": 17},
        {"num_logprobs": 3},
        {"num_logprobs": 0, "allowed": (9,)},
    ]
    return [row.with_(**changes[n % len(changes)]) for n, row in enumerate(plain_rows())]


def logits_of(num_rows: int) -> Tensor:
    """Some with ties, and some that are broken."""
    logits = 3 * torch.randn(num_rows, VOCAB)
    logits[1] = logits[1].round()
    logits[5, 3] = torch.nan
    logits[6, 7] = torch.inf
    logits[7] = -torch.inf
    logits[8] = -torch.inf
    logits[8, [0, VOCAB - 1]] = 1.0  # banned ones
    logits[9, 0] = torch.nan
    return logits


def on(device: torch.device, inputs: SamplingInputs) -> SamplingInputs:
    """The same rows on a device."""
    names = [n for n in SamplingInputs.__dataclass_fields__ if n not in ("host", "masks", "packed")]
    host = {name: getattr(inputs, name) for name in names}
    return SamplingInputs.from_host(host, {name: upload_one(t.numpy(), device) for name, t in host.items()})


def sampler(device: torch.device, *, fused: bool, **options: Any) -> Sampler:
    return Sampler(VOCAB, banned_token_ids=(0, VOCAB - 2, VOCAB - 1), device=device, fused=fused, **options)


def assert_same(
    got: SampleResult, wanted: SampleResult, tolerance: float = 0.0, ranked: slice | Tensor = slice(None)
) -> None:
    """`ranked`: the rows that have an order of tokens to compare."""
    assert torch.equal(got.token_ids.cpu(), wanted.token_ids) and torch.equal(got.faults.cpu(), wanted.faults)
    for name in ("ranks", "top_ids"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None) and (
            ours is None or torch.equal(ours.cpu()[ranked], theirs[ranked])
        ), name
    for name in ("logprobs", "top_logprobs"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert ours is None or torch.allclose(ours.cpu(), theirs, rtol=0, atol=tolerance), name


@pytest.mark.parametrize("rows", [plain_rows, special_rows])
@pytest.mark.parametrize("options", [{}, {"force_top_k": 4}, {"logprobs_mode": "processed"}], ids=str)
def test_fused_equals_groups(rows, options):
    inputs, logits = make_inputs(rows()), logits_of(ROWS)
    wanted = sampler(CPU, fused=False, **options).sample(logits, inputs)
    assert len(set(wanted.token_ids.tolist())) > 10 and set(wanted.faults.tolist()) == {0, 1, 2}
    before = logits.clone()
    assert_same(sampler(CPU, fused=True, **options).sample(logits, inputs), wanted)
    assert torch.equal(before.nan_to_num(7.0), logits.nan_to_num(7.0)), "the logits are left as they are"
    if rows is plain_rows:
        assert inputs.is_plain
        tokens, faults = sampler(CPU, fused=True, **options).choose(logits.clone(), RowParameters.of(inputs))
        assert torch.equal(tokens, wanted.token_ids) and torch.equal(faults, wanted.faults)
    else:
        assert not inputs.is_plain


def test_what_is_plain():
    assert make_inputs([Row(temperature=0.5, top_p=0.3, draft=4)]).is_plain
    changes = ({"bans": (1,)}, {"forced": 3}, {"num_logprobs": 0}, {"is_ratio": True}, {"bias": {3: 1.0}})
    for change in (*changes, {"allowed": (1,)}, {"presence": 0.1, "output": (2,)}):
        assert not make_inputs([Row(), Row(**change)]).is_plain, change
    masks = TokenMasks.of({0: torch.zeros(10, dtype=torch.int32).numpy()}, CPU)
    assert not make_inputs([Row()]).with_masks(masks).is_plain


@needs_gpu
@pytest.mark.parametrize("rows", [plain_rows, special_rows])
@pytest.mark.parametrize("options", [{}, {"force_top_k": 4}, {"logprobs_mode": "processed"}], ids=str)
def test_a_gpu_chooses_the_same_and_waits_for_nothing(rows, options):
    """Against the references on the CPU, whose log-probabilities may differ in the last place."""
    device = torch.device("cuda")
    inputs, logits = make_inputs(rows()), logits_of(ROWS)
    if options.get("logprobs_mode") == "processed" and rows is special_rows:
        pytest.importorskip("deepinfer.native").load_cpu_ops()
    wanted = sampler(CPU, fused=True, **options).sample(logits, inputs)
    mine, theirs, there = sampler(device, fused=True, **options), logits.to(device), on(device, inputs)
    torch.cuda.synchronize()
    with SyncGuard(True).forbid():
        got = mine.sample(theirs, there)
        if inputs.is_plain:
            tokens, faults = mine.choose(theirs.clone(), RowParameters.of(there))
    assert_same(got, wanted, tolerance=2e-6, ranked=wanted.faults == 0)  # NaN has no order
    if inputs.is_plain:
        assert torch.equal(tokens.cpu(), wanted.token_ids) and torch.equal(faults.cpu(), wanted.faults)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_fused_verification_equals_the_other_one(place):
    counts = [random.randint(1, 5) for _ in range(20)]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    tokens = torch.randint(0, 2, (sum(counts),), dtype=torch.int32)
    drafts = torch.randint(0, 2, (sum(counts),), dtype=torch.int32)
    drafts[offsets[1:].long() - 1] = -1
    faults = (torch.rand(sum(counts)) < 0.1).to(torch.uint8)
    wanted = verify_decode(tokens, drafts, faults, offsets, 6)
    there = [value.to(place) for value in (tokens, drafts, faults, offsets)]
    got = verify_decode(*there, 6, fused=True)
    for name in ("emitted", "num_emitted", "final_rows"):
        assert torch.equal(getattr(got, name).cpu(), getattr(wanted, name)), name
    assert len(set(wanted.num_emitted.tolist())) > 1
