"""Cases of sampling. Bytes are one read of the logits, whatever the number of walks that a kernel needs."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.sampling import (
    apply_token_bitmask,
    draw_tokens,
    gather_logprobs,
    sample_tokens,
    sum_smaller_probs,
    truncate_scores,
)
from tilelang_ops.sampling.draw_tokens import reference as draw_reference
from tilelang_ops.sampling.gather_logprobs import reference as logprobs_reference
from tilelang_ops.sampling.sample_tokens import reference as sample_reference
from tilelang_ops.sampling.sum_smaller_probs import reference as sum_reference
from tilelang_ops.sampling.truncate_scores import reference as truncate_reference

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
