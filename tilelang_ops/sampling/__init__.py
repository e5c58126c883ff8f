"""Work on rows of logits: edits, truncation, draws, log-probabilities, verification."""

from tilelang_ops.sampling.accept_drafts.op import accept_drafts
from tilelang_ops.sampling.add_to_logits.op import add_to_logits
from tilelang_ops.sampling.apply_penalties.op import apply_penalties
from tilelang_ops.sampling.apply_token_bitmask.op import apply_token_bitmask
from tilelang_ops.sampling.ban_tokens.op import ban_tokens
from tilelang_ops.sampling.confidence_head.op import confidence_head
from tilelang_ops.sampling.draw_tokens.op import draw_tokens
from tilelang_ops.sampling.finish_drafts.op import finish_drafts
from tilelang_ops.sampling.gather_logprobs.op import gather_logprobs
from tilelang_ops.sampling.judge_rows.op import judge_rows
from tilelang_ops.sampling.keep_listed.op import keep_listed
from tilelang_ops.sampling.last_tokens.op import last_tokens
from tilelang_ops.sampling.markov_step.op import markov_step
from tilelang_ops.sampling.sample_tokens.op import sample_tokens
from tilelang_ops.sampling.sum_smaller_probs.op import sum_smaller_probs
from tilelang_ops.sampling.truncate_scores.op import truncate_scores
from tilelang_ops.sampling.verify_ratio.op import verify_ratio

__all__ = [
    "accept_drafts",
    "add_to_logits",
    "apply_penalties",
    "apply_token_bitmask",
    "ban_tokens",
    "confidence_head",
    "draw_tokens",
    "finish_drafts",
    "gather_logprobs",
    "judge_rows",
    "keep_listed",
    "last_tokens",
    "markov_step",
    "sample_tokens",
    "sum_smaller_probs",
    "truncate_scores",
    "verify_ratio",
]
