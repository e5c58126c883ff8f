"""Inputs of single rows written as plain Python, batches of them, and a float64 brute-force sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.inputs import SamplingInputs

MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Row:
    """One row's parameters; penalties and masks in the form that a reader of the API would write."""

    seed: int = 0
    index: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    num_logprobs: int = -1
    forced: int = -1
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    bans: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    draft: int = -1
    is_ratio: bool = False

    def with_(self, **changes) -> Row:
        return replace(self, **changes)


def make_inputs(rows: list[Row], row_offsets: list[int] | None = None) -> SamplingInputs:
    """The record of a list of rows, each its own sequence unless `row_offsets` says otherwise."""

    def ints(values, dtype=torch.int32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    def floats(values) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32)

    penalties, bias, bans, allowed = [], [], [], []
    for number, row in enumerate(rows):
        if (row.repetition, row.presence, row.frequency) != (1.0, 0.0, 0.0):
            for token in sorted({*row.prompt, *row.output}):
                penalties.append((number, token, row.output.count(token)))
        bias += [(number, token, value) for token, value in row.bias.items()]
        bans += [(number, token) for token in row.bans]
        if row.allowed is not None:
            allowed.append((number, row.allowed))
    lengths = [len(tokens) for _, tokens in allowed]
    inverse = [np.float32(1) / np.float32(r.temperature) if r.temperature else np.float32(0) for r in rows]
    host = {
        "seeds": ints((r.seed - 2**64 if r.seed >= 2**63 else r.seed for r in rows), torch.int64),
        "token_index": ints((r.index for r in rows), torch.int64),
        "inv_temperature": torch.tensor(np.array(inverse, dtype=np.float32)),
        "top_p": floats(r.top_p for r in rows),
        "top_k": ints(r.top_k for r in rows),
        "min_p": floats(r.min_p for r in rows),
        "num_logprobs": ints(r.num_logprobs for r in rows),
        "forced": ints(r.forced for r in rows),
        "repetition": floats(r.repetition for r in rows),
        "presence": floats(r.presence for r in rows),
        "frequency": floats(r.frequency for r in rows),
        "draft_ids": ints(r.draft for r in rows),
        "is_ratio": ints(r.is_ratio for r in rows),
        "row_offsets": ints(range(len(rows) + 1) if row_offsets is None else row_offsets),
        "penalty_rows": ints(p[0] for p in penalties),
        "penalty_tokens": ints(p[1] for p in penalties),
        "penalty_counts": ints(p[2] for p in penalties),
        "bias_rows": ints(b[0] for b in bias),
        "bias_tokens": ints(b[1] for b in bias),
        "bias_values": floats(b[2] for b in bias),
        "ban_rows": ints(b[0] for b in bans),
        "ban_tokens": ints(b[1] for b in bans),
        "allowed_rows": ints(a[0] for a in allowed),
        "allowed_offsets": ints([0, *np.cumsum(lengths, dtype=int)]),
        "allowed_tokens": ints(t for _, tokens in allowed for t in tokens),
    }
    return SamplingInputs.from_host(host)


def brute_scores(logits: list[float], row: Row, banned: frozenset[int] = frozenset()) -> list[float]:
    """Logits after penalties, bias, masks and temperature (1 when greedy), token by token in float64."""
    scores = []
    for token, value in enumerate(logits):
        count = row.output.count(token)
        if count or token in row.prompt:
            value = value / row.repetition if value > 0 else value * row.repetition
        value -= row.frequency * count
        value -= row.presence if count else 0.0
        value += row.bias.get(token, 0.0)
        if token in banned or token in row.bans or (row.allowed is not None and token not in row.allowed):
            value = -math.inf
        scores.append(value / row.temperature if row.temperature else value)
    return scores


def brute_survivors(scores: list[float], row: Row, force_top_k: int = 0) -> list[int]:
    """Tokens that min-p, top-k and top-p leave, best first, by walking down the sorted list."""
    order = sorted((t for t in range(len(scores)) if scores[t] > -math.inf), key=lambda t: (-scores[t], t))
    if not order:
        return []
    top = scores[order[0]]
    if row.min_p > 0:
        order = [t for t in order if math.exp(scores[t] - top) >= row.min_p * (1 - 1e-6)]
    for k in (row.top_k, force_top_k):
        if k > 0:
            order = order[:k]
    total = sum(math.exp(scores[t] - top) for t in order)
    kept, before = [], 0.0
    top_p = float(np.float32(row.top_p))  # rows carry it as float32
    for token in order:
        if top_p < 1 and before > top_p * total * (1 + 1e-9):
            break
        kept.append(token)
        before += math.exp(scores[token] - top)
    return kept


def brute_noise(seed: int, index: int, token: int, domain: int = 0) -> float:
    """Gumbel noise in plain Python integers and float64."""
    counter = [token >> 2, index & MASK32, index >> 32, domain]
    key = [seed & MASK32, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & MASK32,
            (first >> 32) ^ counter[3] ^ key[1],
            first & MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK32, (key[1] + 0xBB67AE85) & MASK32]
    word = counter[token & 3]
    if word < 2**31:
        return -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))
    return -math.log(-math.log((2**32 - 0.5 - word) * 2.0**-32))


def brute_choice(
    logits: list[float], row: Row, banned: frozenset[int] = frozenset(), force_top_k: int = 0
) -> int:
    """The token of a row, or -1 when none is possible."""
    scores = brute_scores(logits, row, banned)
    if row.temperature == 0:
        best = max(scores)
        return scores.index(best) if best > -math.inf else -1
    kept = brute_survivors(scores, row, force_top_k)
    ranked = [(-(scores[t] + brute_noise(row.seed, row.index, t)), t) for t in kept]
    return min(ranked)[1] if ranked else -1


def log_softmax(scores: list[float]) -> list[float]:
    """Float64 log-softmax with -9999 for the impossible."""
    top = max(scores)
    total = math.log(sum(math.exp(s - top) for s in scores)) + top
    return [max(s - total, -9999.0) for s in scores]


def chi_square_limit(degrees: int, sigmas: float = 4.0) -> float:
    """Upper quantile of the chi-square law at `sigmas` (Wilson-Hilferty); 4 is p = 3e-5."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + sigmas * math.sqrt(spread)) ** 3


def assert_distribution(tokens: Tensor, probabilities: list[float]) -> None:
    """Chi-square test of drawn ids against a law; cells expected below 5 are joined."""
    num_draws = tokens.shape[0]
    counts = torch.bincount(tokens.long(), minlength=len(probabilities)).tolist()
    impossible = sum(c for c, p in zip(counts, probabilities) if p == 0)
    assert impossible == 0, f"{impossible} draws of impossible tokens"
    cells = sorted((p * num_draws, c) for p, c in zip(probabilities, counts) if p > 0)
    joined = [[0.0, 0]]
    for expected, count in cells:
        joined[-1][0] += expected
        joined[-1][1] += count
        if joined[-1][0] >= 5:
            joined.append([0.0, 0])
    joined = [cell for cell in joined if cell[0] >= 5]
    statistic = sum((count - expected) ** 2 / expected for expected, count in joined)
    if len(joined) == 1:
        return  # one possible token: nothing more to test
    limit = chi_square_limit(len(joined) - 1)
    assert statistic < limit, f"chi-square {statistic:.1f} over {len(joined) - 1} degrees, limit {limit:.1f}"
