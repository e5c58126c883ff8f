"""RankShare: what one rank of an expert-parallel group holds and computes, measured without the others.

    part              one rank's share              how its load comes about
    routed experts    (experts + copies) / ranks    the slots of the rank's own rows, spread evenly over
                                                    them: as many as all ranks' rows send it
    Engram tables     rows / ranks                  primes of the hash as much smaller: each row looks up
                                                    as many rows as others would ask for
    all else          whole                         its own

With R rows on each of n ranks, k slots a row, R * n * k slots meet (experts + copies) experts, so a rank gets
R * k of them. That is what its own rows have, so they can stand for those of the group.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram_hash import engram_hash

# What estimates of skipped work assume of the links between devices, one direction, and of a call.
NVLINK_BYTES_PER_S = 450e9
NETWORK_BYTES_PER_S = 50e9
CALL_MS = 0.005
EXPERT_IMBALANCE = 0.09  # the slowest rank's extra expert work, as the operator of the release reports it


@dataclass(frozen=True)
class RankShare:
    """One rank of a group.

    Attributes:
        ep_size: ranks among which experts and tables are divided.
        redundant_experts: copies of backbone experts in the group, beyond one of each.
        engram_size: ranks among which the Engram tables are divided; 0 for `ep_size`.

    Raises:
        ValueError: the numbers are no group's.
    """

    ep_size: int = 1
    redundant_experts: int = 0
    engram_size: int = 0

    def __post_init__(self) -> None:
        if self.ep_size < 1 or min(self.redundant_experts, self.engram_size) < 0:
            raise ValueError(f"{self}: expected 1 rank or more, and 0 copies or more")

    @property
    def is_whole(self) -> bool:
        """No layer's experts are divided."""
        return self.ep_size == 1

    @property
    def num_table_parts(self) -> int:
        """Ranks among which the Engram tables are divided."""
        return self.engram_size or self.ep_size

    def config(self, config: DeepseekV41Config) -> DeepseekV41Config:
        """The configuration of the rank: that of the model, with its part of the Engram tables.

        Raises:
            ValueError: the experts cannot be divided evenly.
        """
        self.num_resident(config.n_routed_experts, self.redundant_experts)
        if config.num_nextn_predict_layers:
            self.num_resident(config.dspark_n_routed_experts, 0)
        if self.num_table_parts == 1 or not config.engram_layer_ids:
            return config
        size = max(config.engram_vocab_size // self.num_table_parts, 2)
        rows = engram_hash(
            config.engram_layer_ids,
            config.engram_max_ngram_size,
            config.engram_n_heads,
            size,
            config.engram_compressed_vocab_size,
        ).num_rows
        return dataclasses.replace(config, engram_vocab_size=size, engram_num_embeddings=rows)

    def describe(self, config: DeepseekV41Config) -> str:
        """What is emulated, in a few lines.

        Args:
            config: the rank's, `self.config(...)` of the model's.
        """
        lines = ["random weights and caches of random records: the tokens mean nothing, and no draft stands"]
        if self.is_whole:
            return lines[0]
        held = self.num_resident(config.n_routed_experts, self.redundant_experts)
        lines.append(
            f"one rank of {self.ep_size}: {held} of {config.n_routed_experts} + {self.redundant_experts} "
            "experts in each layer, each with an even share of the slots; the router runs over all"
        )
        if config.num_nextn_predict_layers:
            drafting = self.num_resident(config.dspark_n_routed_experts, 0)
            lines.append(f"of the drafter's {config.dspark_n_routed_experts} experts {drafting}, likewise")
        if config.engram_layer_ids:
            rows = ", ".join(f"{count:,}" for count in config.engram_num_embeddings)
            lines.append(
                f"Engram tables of {rows} rows, one part in {self.num_table_parts}, for all look-ups"
            )
        return "\n".join(lines)

    def num_resident(self, num_experts: int, redundant: int) -> int:
        """Experts of a layer that the rank holds.

        Raises:
            ValueError: ranks would hold different numbers.
        """
        total = num_experts + redundant
        if total % self.ep_size:
            fit = -total % self.ep_size
            raise ValueError(
                f"{num_experts} experts and {redundant} copies do not divide evenly among "
                f"emulated_ep={self.ep_size} ranks: {fit} more copies would"
            )
        return total // self.ep_size

    def resident_of(self, prefix: str, num_experts: int) -> int:
        """Experts that the rank holds of those under `prefix`; only the backbone has copies."""
        return self.num_resident(num_experts, 0 if prefix.startswith("mtp.") else self.redundant_experts)


@dataclass(frozen=True)
class Skipped:
    """Work of a step that one emulated rank does not do.

    Attributes:
        what: in words.
        nvlink_ms, network_ms: estimates where all ranks are joined by NVLink, and by a network.
    """

    what: str
    nvlink_ms: float
    network_ms: float


def skipped_work(
    config: DeepseekV41Config, share: RankShare, num_rows: int, num_draft_rows: int, experts_ms: float = 0.0
) -> list[Skipped]:
    """Estimates for a step, each exchange on its own; a serving engine hides a part under computation.

    Args:
        config: the model's, whole.
        share: the rank.
        num_rows: of the backbone.
        num_draft_rows: of the drafter.
        experts_ms: what the routed experts take.
    """
    if share.is_whole:
        return []
    remote = 1.0 - 1.0 / share.ep_size  # of the slots, those that leave the rank
    hidden, layers = config.hidden_size, config.num_hidden_layers
    slots = (
        layers * num_rows * config.num_experts_per_tok
        + config.num_nextn_predict_layers * num_draft_rows * config.dspark_num_experts_per_tok
    )
    calls = layers + (config.num_nextn_predict_layers if num_draft_rows else 0)
    tables = len(config.engram_layer_ids)
    table_bytes = tables * num_rows * config.engram_num_columns * (config.engram_head_dim * 33 / 32)

    def exchange(what: str, num_bytes: float, num_calls: int) -> Skipped:
        fixed = num_calls * CALL_MS
        moved = 1e3 * remote * num_bytes
        return Skipped(what, fixed + moved / NVLINK_BYTES_PER_S, fixed + moved / NETWORK_BYTES_PER_S)

    imbalance = EXPERT_IMBALANCE * experts_ms
    return [
        exchange("dispatch of rows to experts (E4M3 with scales)", slots * hidden * 33 / 32, calls),
        exchange("combine of expert outputs (bfloat16)", 2 * slots * hidden, calls),
        exchange("exchange of Engram rows", table_bytes, tables),
        Skipped("waiting for the rank with the most expert work", imbalance, imbalance),
        Skipped("vote on the kind of step, one small all-reduce", 0.02, 0.05),
        Skipped("all-reduce of tensor-parallel ranks: attention is data-parallel, there is none", 0.0, 0.0),
    ]
