"""Cases of sampling. Bytes are one read of the logits, whatever the number of walks that a kernel needs.

The work in torch draws with noise of torch's own, so its tokens are others: they are checked by what may be
drawn and by the mean of many rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, equal, near, returning, seeded
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
from tilelang_ops.sampling.apply_token_bitmask import reference as bitmask_reference
from tilelang_ops.sampling.draw_tokens import reference as draw_reference
from tilelang_ops.sampling.gather_logprobs import reference as logprobs_reference
from tilelang_ops.sampling.markov_step.op import Draw
from tilelang_ops.sampling.sample_tokens import reference as sample_reference
from tilelang_ops.sampling.sum_smaller_probs import reference as sum_reference
from tilelang_ops.sampling.truncate_scores import reference as truncate_reference
from tilelang_ops.sampling.verify_ratio import reference as ratio_reference
from tilelang_ops.sampling.verify_ratio.op import Streams

VOCAB = 129280
CHECKED = 16  # rows compared with a reference that is slow and large
SIGMAS = 6.0  # a mean of draws lies farther off once in 500 million times


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    most, few, vocab, seqs = (40, 3, 2048, (20, 4)) if small else (256, 16, VOCAB, (64, 4))
    return [
        _sample(most, vocab, "greedy", temperature=0.0),
        _sample(most, vocab, "temperature 1"),
        _sample(most, vocab, "top-p 0.95", top_p=0.95),
        _sample(most, vocab, "top-p 0.95, flat logits", top_p=0.95, is_flat=True),
        _sample(most, vocab, "top-k 50, top-p 0.95", top_k=50, top_p=0.95),
        _sample(most, vocab, "min-p 0.05", min_p=0.05),
        _sample(few, vocab, "top-p 0.95", top_p=0.95),
        _draw(most, vocab),
        _truncate(most, vocab),
        _logprobs(most, vocab),
        _bitmask(most, vocab),
        _sum_smaller(most, vocab),
        _verify_ratio(seqs[0], 5, vocab),
        _markov(seqs[0], vocab, False, True),
        _markov(seqs[0], vocab, True, False),
        _markov(seqs[1], vocab, False, True),
    ]


def make_logits(rows: int, seed: int, is_flat: bool = False, vocab: int = VOCAB) -> Tensor:
    """Logits like a language model's: a bulk, and a few tokens far above it; flat ones have the bulk only."""
    generator = seeded(seed)
    logits = torch.randn(rows, vocab, generator=generator)
    if is_flat:
        return logits
    likely = torch.randint(0, vocab, (rows, 60), generator=generator)
    gain = 14 * torch.rand(rows, 60, generator=generator)
    return (2.2 * logits).scatter_add_(1, likely, gain)


def _full(rows: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows,), value, dtype=dtype)


def _streams(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(rows)
    return ids * 7919 + seed, ids + 1000


def _first(args: tuple) -> tuple:
    return tuple(a[:CHECKED] if torch.is_tensor(a) else a for a in args)


def _race(scores: Tensor) -> Tensor:
    """Draws a token of softmax(scores) per row: of exponential times with these rates the first."""
    probs = scores.softmax(-1)
    return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1).int()


def _assert_drawn(token_ids: Tensor, scores: Tensor) -> None:
    """Tokens are possible ones, and their mean logprob is that of draws from softmax(scores)."""
    logprobs = scores.double().log_softmax(-1)
    drawn = logprobs.gather(-1, token_ids.long()[:, None]).squeeze(-1)
    assert drawn.isfinite().all(), f"{int((~drawn.isfinite()).sum())} tokens cannot be drawn"
    probs, finite = logprobs.exp(), logprobs.clamp(min=-1e9)
    mean = (probs * finite).sum(-1)
    variance = (probs * (finite - mean[:, None]).square()).sum(-1)
    _assert_mean(drawn, mean, variance)


def _assert_mean(found: Tensor, mean: Tensor, variance: Tensor) -> None:
    sigma = float(variance.sum().sqrt())
    off = float((found - mean).sum().abs())
    assert off <= SIGMAS * sigma + 1e-6, f"{off:.3g} off in the sum, {sigma=:.3g}"


def _cut(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Scores with -inf in place of what the rules remove."""
    if min_p > 0:
        least = scores.amax(-1, keepdim=True) + torch.tensor(min_p).log().item()
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_k > 0 or top_p < 1:
        values, order = scores.sort(-1, descending=True)
        if top_k > 0:
            values[:, top_k:] = -torch.inf
        probs = values.softmax(-1)
        values.masked_fill_(probs.cumsum(-1) - probs > top_p, -torch.inf)
        scores = torch.empty_like(scores).scatter_(-1, order, values)
    return scores


def _sample(
    rows: int,
    vocab: int,
    name: str,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    is_flat: bool = False,
) -> Case:
    def make(seed: int) -> tuple:
        cut = _full(rows, top_k, torch.int32), _full(rows, top_p), _full(rows, min_p)
        logits = make_logits(rows, seed, is_flat, vocab)
        return logits, _full(rows, temperature), *cut, *_streams(rows, seed)

    def in_torch(logits: Tensor, inv_temperature: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        best, first = logits.max(-1)
        if temperature == 0:
            return first.int(), best
        return _race(_cut(logits * inv_temperature[:, None], top_k, top_p, min_p)), best

    def check(out: tuple[Tensor, Tensor], args: tuple) -> None:
        equal(lambda *args: sample_reference.run(*args, 0))(_first(out), _first(args))

    def check_torch(out: tuple[Tensor, Tensor], args: tuple) -> None:
        logits, _, *rules = args[:5]
        assert torch.equal(out[1], logits.amax(-1))
        _assert_drawn(out[0], truncate_reference.run(logits, *rules, torch.empty_like(logits)))

    return Case(
        op="sampling.sample_tokens",
        size=f"{rows} x {vocab}, {name}",
        bytes=rows * vocab * 4,
        flops=0,
        make=make,
        run=sample_tokens,
        torch=in_torch,
        check=check,
        check_torch=check if temperature == 0 else check_torch,
    )


def _draw(rows: int, vocab: int) -> Case:
    def check(out: Tensor, args: tuple) -> None:
        assert torch.equal(out[:CHECKED], draw_reference.run(*_first(args), 0))

    return Case(
        op="sampling.draw_tokens",
        size=f"{rows} x {vocab}",
        bytes=rows * vocab * 4,
        flops=0,
        make=lambda seed: (make_logits(rows, seed, True, vocab), *_streams(rows, seed)),
        run=draw_tokens,
        torch=lambda scores, *_: _race(scores),
        check=check,
        check_torch=lambda out, args: _assert_drawn(out, args[0]),
    )


def _truncate(rows: int, vocab: int) -> Case:
    def make(seed: int) -> tuple:
        scores = make_logits(rows, seed, vocab=vocab)
        cut = _full(rows, -1, torch.int32), _full(rows, 0.95), _full(rows, 0.0)
        return scores, *cut, torch.empty_like(scores)

    def expected(*args: Tensor) -> Tensor:
        return truncate_reference.run(*args[:4], torch.empty_like(args[4]))

    def check_torch(out: Tensor, args: tuple) -> None:
        exact = expected(*args)
        differing = (out != exact).sum(-1)  # sums of rounded probabilities end a few tokens earlier or later
        assert int(differing.max()) <= 4 + vocab // 2000, f"{int(differing.max())} tokens differ in a row"
        is_kept = (out > -torch.inf) & (exact > -torch.inf)
        assert torch.equal(out[is_kept], exact[is_kept])

    return Case(
        op="sampling.truncate_scores",
        size=f"{rows} x {vocab}, top-p 0.95",
        bytes=2 * rows * vocab * 4,
        flops=0,
        make=make,
        run=truncate_scores,
        torch=lambda scores, *_: _cut(scores, -1, 0.95, 0.0),
        check=lambda out, args: equal(expected)(out[:CHECKED], _first(args)),
        check_torch=check_torch,
    )


def _logprobs(rows: int, vocab: int) -> Case:
    def check(out: tuple[Tensor, ...], args: tuple) -> None:
        found, expected = _first(out), logprobs_reference.run(*_first(args), -9999.0)
        assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
        for place in (0, 3):
            torch.testing.assert_close(found[place], expected[place], rtol=1e-5, atol=1e-5)

    def in_torch(scores: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, ...]:
        logprobs = scores.log_softmax(-1)
        chosen = scores.gather(-1, token_ids[:, None])
        rank = 1 + (scores > chosen).sum(-1)
        values, ids = logprobs.topk(k, -1)
        return logprobs.gather(-1, token_ids[:, None]).squeeze(-1), rank.int(), ids.int(), values

    def make(seed: int) -> tuple:
        return make_logits(rows, seed, vocab=vocab), torch.arange(rows), 20

    return Case(
        op="sampling.gather_logprobs",
        size=f"{rows} x {vocab}, 20 best",
        bytes=rows * vocab * 4,
        flops=0,
        make=make,
        run=gather_logprobs,
        torch=in_torch,
        check=check,
    )


def _bitmask(rows: int, vocab: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = rows, vocab // 32
        words = torch.randint(-(2**31), 2**31 - 1, shape, generator=seeded(seed), dtype=torch.int32)
        return make_logits(rows, seed, True, vocab), words, torch.arange(rows, dtype=torch.int32)

    def in_torch(logits: Tensor, words: Tensor, rows: Tensor) -> Tensor:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)
        return logits.masked_fill_(~is_allowed, -torch.inf)

    return Case(
        op="sampling.apply_token_bitmask",
        size=f"{rows} x {vocab}, half forbidden",
        bytes=rows * vocab * 4 + rows * vocab // 8,  # every sector is written, none need be read
        flops=0,
        make=make,
        run=returning(0, apply_token_bitmask),
        torch=in_torch,
        check=equal(returning(0, bitmask_reference.run)),
    )


def _sum_smaller(rows: int, vocab: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(rows, dtype=torch.int32)
        return make_logits(rows, seed, True, vocab).log_softmax(-1), ids

    return Case(
        op="sampling.sum_smaller_probs",
        size=f"{rows} x {vocab}",
        bytes=rows * vocab * 4,
        flops=0,
        make=make,
        run=sum_smaller_probs,
        torch=sum_reference.run,
        check=near(sum_reference.run, rtol=1e-5, atol=0),
    )


def _verify_ratio(seqs: int, drafts: int, vocab: int) -> Case:
    rows = seqs * (drafts + 1)

    def make(seed: int) -> tuple:
        target = make_logits(rows, seed, vocab=vocab)
        ids = torch.arange(rows)
        is_last = ids % (drafts + 1) == drafts
        draft_rows = torch.where(is_last, 0, ids - ids // (drafts + 1))
        draft = target[~is_last] + 0.5 * torch.randn(seqs * drafts, vocab, generator=seeded(seed + 1))
        draft_ids = draw_tokens(draft, ids[: draft.shape[0]] + seed, ids[: draft.shape[0]], 4)
        draft_ids = torch.where(is_last, -1, draft_ids[draft_rows])
        return target, draft, draft_rows, draft_ids, *_streams(rows, seed), Streams(1, 2, 3)

    def in_torch(target: Tensor, draft: Tensor, draft_rows: Tensor, draft_ids: Tensor, *_: Any) -> tuple:
        p, q = target.softmax(-1), draft.softmax(-1)[draft_rows]
        ids = draft_ids.clamp(min=0).long()[:, None]
        coin = torch.rand(target.shape[0], 1, device=target.device)
        is_draft = draft_ids >= 0
        passed = (p.gather(-1, ids) > coin * q.gather(-1, ids)).squeeze(-1) & is_draft
        rest = p - q.mul_(is_draft[:, None])
        drawn = rest.clamp_(min=0).div_(torch.empty_like(rest).exponential_()).argmax(-1)
        return passed, torch.where(passed, draft_ids, drawn.int())

    def check(out: tuple[Tensor, Tensor], args: tuple) -> None:
        first = tuple(a[:CHECKED] if i not in (1, 6) else a for i, a in enumerate(args))
        for actual, expected in zip(out, ratio_reference.run(*first), strict=True):
            assert torch.equal(actual[:CHECKED], expected)

    def check_torch(out: tuple[Tensor, Tensor], args: tuple) -> None:
        target, draft, draft_rows, draft_ids = args[:4]
        passed, token_ids = out
        is_draft, ids = draft_ids >= 0, draft_ids.clamp(min=0).long()[:, None]
        p, q = (x.double().softmax(-1) for x in (target, draft))
        q = q[draft_rows] * is_draft[:, None]
        accepts = torch.where(is_draft, (p.gather(-1, ids) / q.gather(-1, ids)).squeeze(-1), 0).clamp(max=1)
        _assert_mean(passed.double(), accepts, accepts * (1 - accepts))
        assert torch.equal(token_ids[passed], draft_ids[passed])
        _assert_drawn(token_ids[~passed], (p - q)[~passed].clamp(min=0).log())

    return Case(
        op="sampling.verify_ratio",
        size=f"{seqs} sequences of {drafts} drafts, {vocab} tokens",
        bytes=seqs * (2 * drafts + 1) * vocab * 4,
        flops=0,
        make=make,
        run=verify_ratio,
        torch=in_torch,
        check=check,
        check_torch=check_torch,
    )


def _markov(seqs: int, vocab: int, draws: bool, keeps_logits: bool) -> Case:
    rank = 256

    def make(seed: int) -> tuple:
        generator = seeded(seed)
        embed = torch.randn(vocab, rank, generator=generator).bfloat16()
        head = (0.1 * torch.randn(vocab, rank, generator=generator)).bfloat16()
        tokens = torch.randint(0, vocab, (seqs,), generator=generator).int()
        draw = Draw(_full(seqs, 1.0), *_streams(seqs, seed)) if draws else None
        return make_logits(seqs, seed, vocab=vocab), tokens, embed, head, draw, keeps_logits

    def in_torch(base: Tensor, tokens: Tensor, embed: Tensor, head: Tensor, *_: Any) -> tuple:
        logits = base + embed[tokens] @ head.t()
        return _race(logits) if draws else None, logits if keeps_logits else None

    def exact(base: Tensor, tokens: Tensor, embed: Tensor, head: Tensor, *_: Any) -> Tensor:
        return base.double() + embed[tokens].double() @ head.double().t()

    def check(out: tuple[Tensor | None, Tensor | None], args: tuple) -> None:
        logits = exact(*args)
        if draws:
            best = draw_reference.run(logits.float(), args[4].seeds, args[4].token_index, 0)
            assert (best != out[0]).sum() <= 1  # sums are rounded: what is nearly equal may change places
        if keeps_logits:
            torch.testing.assert_close(out[1].double(), logits, rtol=1e-4, atol=1e-4)

    def check_torch(out: tuple[Tensor | None, Tensor | None], args: tuple) -> None:
        logits = exact(*args)
        if draws:
            _assert_drawn(out[0], logits)
        if keeps_logits:  # the product is rounded to bfloat16
            torch.testing.assert_close(out[1].double(), logits, rtol=2.0**-8, atol=0.05)

    return Case(
        op="sampling.markov_step",
        size=f"{seqs} x {vocab}, rank {rank}, {'draw' if draws else 'logits'}",
        bytes=vocab * (2 * rank + 8 * seqs),
        flops=2 * seqs * vocab * rank,
        make=make,
        run=markov_step,
        torch=in_torch,
        check=check,
        check_torch=check_torch,
    )
