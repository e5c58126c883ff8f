"""verify_ratio's kernel: its reference bit for bit, in every case that a row can be in."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.sampling.verify_ratio import cuda, reference
from tilelang_ops.sampling.verify_ratio.op import Streams

SIZES = {"num_threads": 64, "capacity": 32, "unroll": 1}
VOCAB = 1002
STREAMS = Streams(accept=1, residual=2, fresh=3)


def rows_of_every_kind() -> tuple[Tensor, ...]:
    """Targets, scores that drafts are drawn from, where these shall lie, and drafts."""
    target = torch.randn(20, VOCAB) * 4
    draft = target + torch.randn(20, VOCAB)
    draft[1] = target[1]  # everything passes
    target[2] = torch.where(torch.rand(VOCAB) < 0.9, -torch.inf, target[2])
    draft[3] = torch.where(torch.rand(VOCAB) < 0.9, -torch.inf, draft[3])
    target[4], draft[4] = 0.0, 0.0  # p equal to q
    target[5], draft[5] = 100.0, -100.0
    target[6, 7] = torch.nan
    target[7, 3] = torch.inf
    target[8] = -torch.inf
    draft[9, 5] = torch.nan
    draft[10, 5] = torch.inf
    draft[11] = -torch.inf
    target[12] = target[12] * 10 + 500
    draft[13] = draft[13] * 30
    target[14, VOCAB - 1] = 60.0
    draft[14, VOCAB - 1] = -torch.inf
    target[15], draft[15] = 0.0, 0.0  # the residual is empty, but one token could not be drawn
    draft[15, 9] = -torch.inf
    draft_ids = torch.distributions.Categorical(logits=draft.nan_to_num(0.0, 0.0, -1e9)).sample().int()
    draft_ids[16:18] = -1
    draft_ids[18] = target[18].argmin().int()  # hopeless
    draft_ids[15] = 9
    return target, draft, torch.randperm(20), draft_ids


def test_verify_ratio(run_kernel: KernelRunner) -> None:
    num_passed, num_drafts = 0, 0
    for _ in range(4):
        target, draft, places, draft_ids = rows_of_every_kind()
        pool = torch.empty_like(draft)
        pool[places] = draft
        seeds, index = torch.randint(-(2**63), 2**63 - 1, (20,)), torch.randint(0, 2**40, (20,))
        arguments = target, pool, places, draft_ids, seeds, index, STREAMS
        expected = reference.run(*arguments)
        (passed, token_ids), _ = run_kernel(cuda, *arguments, **SIZES)
        assert_same_bits(passed, expected[0])
        assert_same_bits(token_ids, expected[1])
        assert not token_ids[6:9].any() and not passed[6:9].any()
        num_passed += int(passed.sum())
        num_drafts += int((draft_ids >= 0).sum())
    assert 0 < num_passed < num_drafts
    alone, _ = run_kernel(
        cuda, target[:1], pool, places[:1], *(a[:1] for a in arguments[3:6]), STREAMS, **SIZES
    )
    assert alone[0] == passed[0] and alone[1] == token_ids[0]


def test_certain_drafts(run_kernel: KernelRunner) -> None:
    target = torch.randn(8, VOCAB) * 6
    draft_ids = target.argmax(-1).int()
    draft_ids[4:] = torch.randint(0, VOCAB, (4,)).int()
    arguments = target, None, None, draft_ids, torch.arange(8), torch.arange(8) + 5, STREAMS
    (passed, token_ids), _ = run_kernel(cuda, *arguments, **SIZES)
    expected = reference.run(*arguments)
    assert_same_bits(passed, expected[0])
    assert_same_bits(token_ids, expected[1])
    assert passed[:4].any() and not (token_ids == draft_ids)[~passed].any()
