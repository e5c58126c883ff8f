"""The sizes of a model that kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """What compile-time sizes are made from; the names are those of the checkpoint's `config.json`.

    `RELEASE` has the numbers of DeepSeek-V4.1-Flash.

    Attributes:
        resident_experts: experts of a layer, and of a layer of the drafter, that one rank of an
            expert-parallel group holds; not of the configuration, empty without such a group.
    """

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    engram_tables: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    dspark_block_size: int
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    dspark_num_targets: int
    resident_experts: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Sizes from a parsed `config.json` of the release's format.

        Raises:
            KeyError: the configuration lacks one of the names.
        """
        text = config["text_config"]
        derived = {
            "compress_ratios": tuple(text["compress_ratios"]),
            "engram_tables": len(text["engram_layer_ids"]),
            "dspark_num_targets": len(text["dspark_target_layer_ids"]),
        }
        required = (f.name for f in fields(cls) if f.default is MISSING and f.name not in derived)
        return cls(**{name: text[name] for name in required}, **derived)

    @property
    def engram_columns(self) -> int:
        """Table rows that a token looks up."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def expert_sorts(self) -> list[tuple[int, int]]:
        """(experts, slots of a row) of grouped products: the model's, the drafter's, a rank's of both."""
        slots = (self.num_experts_per_tok, self.dspark_num_experts_per_tok)
        whole = (self.n_routed_experts, self.dspark_n_routed_experts)
        return [*zip(whole, slots, strict=True), *zip(self.resident_experts, slots, strict=False)]

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios in use, ascending, without 0."""
        return tuple(sorted({ratio for ratio in self.compress_ratios if ratio > 0}))


RELEASE = ModelSizes(
    vocab_size=129280,
    hidden_size=5120,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    moe_intermediate_size=2304,
    n_routed_experts=384,
    num_experts_per_tok=6,
    sliding_window=128,
    compress_ratios=(0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    engram_tables=2,
    engram_max_ngram_size=4,
    engram_n_heads=8,
    engram_head_dim=256,
    dspark_block_size=5,
    dspark_markov_rank=256,
    dspark_n_routed_experts=128,
    dspark_num_experts_per_tok=3,
    dspark_num_targets=3,
)
