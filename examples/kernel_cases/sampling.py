"""Cases of sampling. Bytes are one read of the logits, whatever the number of walks that a kernel needs."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.sampling import (
    apply_token_bitmask,
    draw_tokens,
    gather_logprobs,
    markov_step,
    sample_tokens,
    sum_smaller_probs,
    truncate_scores,
    verify_ratio,
)
from tilelang_ops.sampling.draw_tokens import reference as draw_reference
from tilelang_ops.sampling.gather_logprobs import reference as logprobs_reference
from tilelang_ops.sampling.markov_step.op import Draw
from tilelang_ops.sampling.sample_tokens import reference as sample_reference
from tilelang_ops.sampling.sum_smaller_probs import reference as sum_reference
from tilelang_ops.sampling.truncate_scores import reference as truncate_reference
from tilelang_ops.sampling.verify_ratio import reference as ratio_reference
from tilelang_ops.sampling.verify_ratio.op import Streams

VOCAB = 129280
CHECKED = 16  # rows compared with the reference, which is slow and large


def cases() -> list[Case]:
    """The cases of this family."""
    return [
        _sample(256, "greedy", temperature=0.0),
        _sample(256, "temperature 1"),
        _sample(256, "top-p 0.95", top_p=0.95),
        _sample(256, "top-p 0.95, flat logits", top_p=0.95, is_flat=True),
        _sample(256, "top-k 50, top-p 0.95", top_k=50, top_p=0.95),
        _sample(256, "min-p 0.05", min_p=0.05),
        _sample(16, "top-p 0.95", top_p=0.95),
        _draw(256),
        _truncate(256),
        _logprobs(256),
        _bitmask(256),
        _sum_smaller(256),
        _verify_ratio(64, 5),
        _markov(64, False, True),
        _markov(64, True, False),
        _markov(4, False, True),
    ]


def make_logits(rows: int, seed: int, is_flat: bool = False) -> Tensor:
    """Logits like a language model's: a bulk, and a few tokens far above it; flat ones have the bulk only."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=generator, device="cuda")
    if is_flat:
        return logits
    likely = torch.randint(0, VOCAB, (rows, 60), generator=generator, device="cuda")
    gain = 14 * torch.rand(rows, 60, generator=generator, device="cuda")
    return (2.2 * logits).scatter_add_(1, likely, gain)


def _full(rows: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows,), value, dtype=dtype, device="cuda")


def _streams(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(rows, device="cuda")
    return ids * 7919 + seed, ids + 1000


def _first(args: tuple) -> tuple:
    return tuple(a[:CHECKED] if torch.is_tensor(a) else a for a in args)


def _sample(
    rows: int,
    name: str,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    is_flat: bool = False,
) -> Case:
    def make(seed: int) -> tuple:
        cut = _full(rows, top_k, torch.int32), _full(rows, top_p), _full(rows, min_p)
        return make_logits(rows, seed, is_flat), _full(rows, temperature), *cut, *_streams(rows, seed)

    def check(out: tuple[Tensor, Tensor], args: tuple) -> None:
        assert torch.equal(out[0][:CHECKED], sample_reference.run(*_first(args), 0)[0])

    return Case(
        op="sampling.sample_tokens",
        size=f"{rows} x {VOCAB}, {name}",
        bytes=rows * VOCAB * 4,
        flops=0,
        make=make,
        run=sample_tokens,
        torch=None,
        check=check,
    )


def _draw(rows: int) -> Case:
    def check(out: Tensor, args: tuple) -> None:
        assert torch.equal(out[:CHECKED], draw_reference.run(*_first(args), 0))

    return Case(
        op="sampling.draw_tokens",
        size=f"{rows} x {VOCAB}",
        bytes=rows * VOCAB * 4,
        flops=0,
        make=lambda seed: (make_logits(rows, seed, True), *_streams(rows, seed)),
        run=draw_tokens,
        torch=None,
        check=check,
    )


def _truncate(rows: int) -> Case:
    def make(seed: int) -> tuple:
        scores = make_logits(rows, seed)
        cut = _full(rows, -1, torch.int32), _full(rows, 0.95), _full(rows, 0.0)
        return scores, *cut, torch.empty_like(scores)

    def check(out: Tensor, args: tuple) -> None:
        first = _first(args)
        assert torch.equal(out[:CHECKED], truncate_reference.run(*first[:4], torch.empty_like(first[4])))

    return Case(
        op="sampling.truncate_scores",
        size=f"{rows} x {VOCAB}, top-p 0.95",
        bytes=2 * rows * VOCAB * 4,
        flops=0,
        make=make,
        run=truncate_scores,
        torch=None,
        check=check,
    )


def _logprobs(rows: int) -> Case:
    def check(out: tuple[Tensor, ...], args: tuple) -> None:
        expected = logprobs_reference.run(*_first(args), -9999.0)
        assert torch.equal(out[1][:CHECKED], expected[1]) and torch.equal(out[2][:CHECKED], expected[2])
        torch.testing.assert_close(out[3][:CHECKED], expected[3], rtol=1e-6, atol=1e-6)

    def make(seed: int) -> tuple:
        return make_logits(rows, seed), torch.arange(rows, device="cuda"), 20

    return Case(
        op="sampling.gather_logprobs",
        size=f"{rows} x {VOCAB}, 20 best",
        bytes=rows * VOCAB * 4,
        flops=0,
        make=make,
        run=gather_logprobs,
        torch=lambda x, ids, k: (x.log_softmax(-1).gather(-1, ids[:, None]), x.topk(k, -1)),
        check=check,
    )


def _bitmask(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        words = torch.randint(-(2**31), 2**31 - 1, (rows, VOCAB // 32), dtype=torch.int32, device="cuda")
        return make_logits(rows, seed, True), words, torch.arange(rows, dtype=torch.int32, device="cuda")

    def check(out: None, args: tuple[Tensor, ...]) -> None:
        bits = (args[1][:, :, None] >> torch.arange(32, device="cuda")) & 1
        assert torch.equal(args[0] == -torch.inf, bits.flatten(1) == 0)

    return Case(
        op="sampling.apply_token_bitmask",
        size=f"{rows} x {VOCAB}, half forbidden",
        bytes=rows * VOCAB * 4 + rows * VOCAB // 8,  # every sector is written, none need be read
        flops=0,
        make=make,
        run=apply_token_bitmask,
        torch=None,
        check=check,
    )


def _sum_smaller(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(rows, dtype=torch.int32, device="cuda")
        return make_logits(rows, seed, True).log_softmax(-1), ids

    return Case(
        op="sampling.sum_smaller_probs",
        size=f"{rows} x {VOCAB}",
        bytes=rows * VOCAB * 4,
        flops=0,
        make=make,
        run=sum_smaller_probs,
        torch=sum_reference.run,
        check=lambda out, args: torch.testing.assert_close(out, sum_reference.run(*args), rtol=1e-5, atol=0),
    )


def _verify_ratio(seqs: int, drafts: int) -> Case:
    rows = seqs * (drafts + 1)

    def make(seed: int) -> tuple:
        target = make_logits(rows, seed)
        ids = torch.arange(rows, device="cuda")
        is_last = ids % (drafts + 1) == drafts
        draft_rows = torch.where(is_last, 0, ids - ids // (drafts + 1))
        draft = target[~is_last] + 0.5 * torch.randn(seqs * drafts, VOCAB, device="cuda")
        draft_ids = draw_tokens(draft, ids[: draft.shape[0]] + seed, ids[: draft.shape[0]], 4)
        draft_ids = torch.where(is_last, -1, draft_ids[draft_rows])
        return target, draft, draft_rows, draft_ids, *_streams(rows, seed), Streams(1, 2, 3)

    def check(out: tuple[Tensor, Tensor], args: tuple) -> None:
        first = tuple(a[:CHECKED] if i not in (1, 6) else a for i, a in enumerate(args))
        for actual, expected in zip(out, ratio_reference.run(*first), strict=True):
            assert torch.equal(actual[:CHECKED], expected)

    return Case(
        op="sampling.verify_ratio",
        size=f"{seqs} sequences of {drafts} drafts, {VOCAB} tokens",
        bytes=seqs * (2 * drafts + 1) * VOCAB * 4,
        flops=0,
        make=make,
        run=verify_ratio,
        torch=None,
        check=check,
    )


def _markov(seqs: int, draws: bool, keeps_logits: bool) -> Case:
    rank = 256

    def make(seed: int) -> tuple:
        generator = torch.Generator("cuda").manual_seed(seed)
        embed = torch.randn(VOCAB, rank, generator=generator, device="cuda").bfloat16()
        head = (0.1 * torch.randn(VOCAB, rank, generator=generator, device="cuda")).bfloat16()
        tokens = torch.randint(0, VOCAB, (seqs,), generator=generator, device="cuda").int()
        draw = Draw(_full(seqs, 1.0), *_streams(seqs, seed)) if draws else None
        return make_logits(seqs, seed), tokens, embed, head, draw, keeps_logits

    def in_torch(base: Tensor, tokens: Tensor, embed: Tensor, head: Tensor, *_: object) -> Tensor:
        return base + embed[tokens.long()] @ head.t()

    def check(out: tuple[Tensor, Tensor | None], args: tuple) -> None:
        exact = in_torch(args[0], args[1], args[2].float(), args[3].float())
        if draws:
            best = draw_reference.run(exact, args[4].seeds, args[4].token_index, 0)
            assert (best != out[0]).sum() <= 1  # sums are rounded: what is nearly equal may change places
        if keeps_logits:
            torch.testing.assert_close(out[1], exact, rtol=1e-4, atol=1e-4)

    return Case(
        op="sampling.markov_step",
        size=f"{seqs} x {VOCAB}, rank {rank}, {'draw' if draws else 'logits'}",
        bytes=VOCAB * (2 * rank + 8 * seqs),
        flops=2 * seqs * VOCAB * rank,
        make=make,
        run=markov_step,
        torch=in_torch,
        check=check,
    )
