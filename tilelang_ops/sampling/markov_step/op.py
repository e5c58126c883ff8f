"""One draft of a block: correct its logits by the token before it, and choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn from logits: as by `draw_tokens`, from logits * inv_temperature.

    Attributes:
        inv_temperature: [n] float32; 0 takes the first largest logit.
        seeds, token_index: [n] int64.
        domain: the noise stream, 0 ... 2^31 - 1.
    """

    inv_temperature: Tensor
    seeds: Tensor
    token_index: Tensor
    domain: int = 0


def markov_step(
    base: Tensor,
    tokens: Tensor,
    embed: Tensor,
    head: Tensor,
    draw: Draw | None,
    keeps_logits: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """logits = base + head @ embed[token], and tokens drawn from them.

    Products are exact and summed in float32, in an order that sizes fix: a row's logits have the same bits in
    every batch, and differ from the reference's in rounding alone.

    Args:
        base: [n, V] float32, finite or -inf; V a multiple of 4.
        tokens: [n] int32, the token before each draft.
        embed: [V, r] bfloat16, r a multiple of 64.
        head: [V, r] bfloat16.
        draw: of the tokens; None draws none.
        keeps_logits: hand out the logits as well.

    Returns:
        [n] int32 tokens, 0 for a row without a possible token, or with NaN or +inf in it, or None; and the
        logits [n, V] float32, or None.
    """
    (n, vocab), rank = base.shape, head.shape[1]
    assert base.dtype == torch.float32 and embed.dtype == head.dtype, f"{base.dtype=} {embed.dtype=}"
    assert vocab % 4 == 0 and rank % 64 == 0, f"{vocab=} {rank=}"
    assert head.shape == (vocab, rank) and embed.shape[1] == rank, f"{head.shape=} {embed.shape=}"
    assert draw is not None or keeps_logits, "nothing would be handed out"
    vectors = [("tokens", tokens, torch.int32)]
    if draw is not None:
        vectors.append(("inv_temperature", draw.inv_temperature, torch.float32))
        vectors += [("seeds", draw.seeds, torch.int64), ("token_index", draw.token_index, torch.int64)]
    for name, tensor, dtype in vectors:
        assert tensor.shape == (n,) and tensor.dtype == dtype, f"{name}: {tensor.shape} {tensor.dtype}"
    if n == 0:
        return None if draw is None else torch.empty_like(tokens), base.clone() if keeps_logits else None
    return backend(__package__, base.device).run(base, tokens, embed, head, draw, keeps_logits)
