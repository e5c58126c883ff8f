"""The small operators around a step's tokens: bans, faults, what a prefill emits, drafts and confidences."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.numerics import sigmoid
from tilelang_ops.sampling.ban_tokens import cuda as ban_cuda
from tilelang_ops.sampling.ban_tokens import reference as ban_reference
from tilelang_ops.sampling.finish_drafts import cuda as finish_cuda
from tilelang_ops.sampling.finish_drafts import reference as finish_reference
from tilelang_ops.sampling.judge_rows import cuda as judge_cuda
from tilelang_ops.sampling.judge_rows import reference as judge_reference
from tilelang_ops.sampling.last_tokens import cuda as last_cuda
from tilelang_ops.sampling.last_tokens import reference as last_reference

INF, NAN = float("inf"), float("nan")
ODD = (1.5, -3.0, 0.0, -0.0, INF, -INF, NAN, -NAN, 1e-40, -1e-40)


def int32(*shape: int, low: int = 0, high: int = 60) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def test_ban_tokens(run_kernel: KernelRunner) -> None:
    for count in (1, 3, 200):
        logits = torch.randn(len(ODD) + 3, 301)
        ids = torch.randperm(301)[:count].int()
        for row, value in enumerate(ODD):
            logits[row, ids[-1]] = value
        logits[len(ODD)] = -INF
        logits[len(ODD) + 1, ids.long()] = -2.0 - torch.rand(count)
        expected = logits.clone()
        largest = ban_reference.run(expected, ids)
        actual, (banned, _) = run_kernel(ban_cuda, logits, ids)
        assert_same_bits(banned, expected, f"{count=}")
        assert torch.equal(actual.isnan(), largest.isnan()), f"{count=}"
        assert torch.equal(actual.nan_to_num(nan=7.0), largest.nan_to_num(nan=7.0)), f"{count=}"


def test_judge_rows(run_kernel: KernelRunner) -> None:
    pairs = torch.cartesian_prod(torch.tensor(ODD), torch.tensor(ODD))
    ids = int32(len(pairs), low=1)
    for outside in (pairs[:, 1].contiguous(), None):
        outs = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.uint8)
        arguments = ids, pairs[:, 0].contiguous(), outside
        judge_reference.run(*arguments, *outs)
        _, (*_, sound, faults) = run_kernel(judge_cuda, *arguments, *map(torch.zeros_like, outs))
        assert_same_bits(sound, outs[0], "tokens")
        assert_same_bits(faults, outs[1], "faults")
    assert set(faults.tolist()) == {0, 1} and 2 in judge_faults(-INF, 1.0), "every kind"


def judge_faults(best: float, outside: float) -> list[int]:
    faults = torch.empty(1, dtype=torch.uint8)
    judge_reference.run(int32(1), torch.tensor([best]), torch.tensor([outside]), int32(1), faults)
    return faults.tolist()


def test_last_tokens(run_kernel: KernelRunner) -> None:
    for counts in ([1], [0], [0, 3, 1, 0, 2] * 20):
        rows = torch.tensor(counts)
        offsets = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
        lens = int32(len(counts), high=3)
        arguments = int32(int(rows.sum())), lens, int32(len(counts), high=3), offsets, 4
        expected = last_reference.run(*arguments)
        actual, _ = run_kernel(last_cuda, *arguments)
        for name, a, b in zip(("emitted", "num_emitted", "final_rows"), actual, expected, strict=True):
            assert_same_bits(a, b, f"{name} {counts}")


def test_finish_drafts(run_kernel: KernelRunner) -> None:
    k, eos = 3, 5
    for n, first, num_seqs in ((1, 0, 1), (70, 4, 74), (3, 1, 9)):
        tokens, logits = int32(k, n, high=12), 30 * torch.randn(n, k)
        temperatures, offsets = torch.rand(k) + 0.5, torch.randn(k)
        places = None
        if num_seqs != n + first:
            places = torch.full((num_seqs,), -1, dtype=torch.int32)
            places[first + torch.randperm(num_seqs - first)[:n]] = torch.arange(n, dtype=torch.int32)
        outs = torch.empty(num_seqs, k, dtype=torch.int32), *torch.empty(2, num_seqs, k).unbind()
        arguments = tokens, logits, temperatures, offsets, eos
        finish_reference.run(*arguments, *outs, places, first)
        _, after = run_kernel(finish_cuda, *arguments, *map(torch.ones_like, outs), places, first)
        drafts, confidences, kept = after[5:8]
        assert_same_bits(drafts, outs[0], f"{n=} drafts")
        assert_same_bits(kept, outs[2], f"{n=} logits")
        torch.testing.assert_close(confidences, outs[1], rtol=1e-5, atol=1e-30)
        for seq in range(num_seqs):  # against plain loops
            place = seq - first if places is None else int(places[seq])
            if seq < first or place < 0:
                assert drafts[seq].tolist() == [-1 if seq < first else 0] * k and not confidences[seq].any()
                continue
            is_over = False
            for step in range(k):
                assert drafts[seq, step] == tokens[step, place]
                scaled = logits[place, step] / temperatures[step] + offsets[step]
                wanted = 0.0 if is_over else float(sigmoid(scaled.clamp(-60, 60)))
                assert abs(float(confidences[seq, step]) - wanted) <= 1e-5
                is_over |= int(tokens[step, place]) == eos
