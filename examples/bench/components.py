"""Components of a step: the least bytes they have to move and the work they have to do.

Bytes are those of weights that a step cannot avoid to read once, of cache records that its rows read, and of
activations that pass between operators. FLOPs count a multiply-add as 2. Small vectors are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FP8 = 1 + 1 / 1024  # bytes of a weight: E4M3, one scale for 32 x 32
FP4 = 0.5 + 1 / 32  # E2M1, one scale for 32
BF16 = 2.0
WINDOW_RECORD, MAIN_RECORD, INDEX_KEY, SCORE = 528, 288, 68, 4

BANDWIDTH = 4.2e12  # bytes/s of a copy on an H200
RATE, CODE_RATE = 780e12, 1416e12  # operations/s of its products in bfloat16 and in FP8


@dataclass(frozen=True)
class Work:
    """Of one component in one step.

    Attributes:
        bytes: moved.
        flops: of all operations.
        code_flops: of these, those of products whose weights are stored by codes, in FP8 or FP4.
    """

    bytes: float
    flops: float
    code_flops: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.code_flops + other.code_flops)

    def times(self, count: float) -> Work:
        """The work of several such."""
        return Work(self.bytes * count, self.flops * count, self.code_flops * count)

    def floor_ms(self) -> float:
        """The time that an H200's memory or arithmetic takes at least."""
        arithmetic = (self.flops - self.code_flops) / RATE + self.code_flops / CODE_RATE
        return 1e3 * max(self.bytes / BANDWIDTH, arithmetic)


@dataclass(frozen=True)
class StepShape:
    """A step of requests that are alike.

    Attributes:
        num_requests: of the step.
        rows: query tokens of each.
        decoder_rows: of these, rows that go through the decoder layers and the head's norm.
        output_rows: rows of each request with logits.
        context: tokens of each request, this step's included.
        num_drafts: that the drafter proposes; 0 for no drafter.
    """

    num_requests: int
    rows: int
    decoder_rows: int
    output_rows: int
    context: int
    num_drafts: int

    @property
    def num_rows(self) -> int:
        """Query tokens of the step."""
        return self.num_requests * self.rows


def step_work(config: Any, shape: StepShape, residents: Callable[[str, int], int]) -> dict[str, Work]:
    """The work of each component of a step.

    Args:
        config: the rank's `DeepseekV41Config`.
        shape: the step.
        residents: (prefix, experts) -> experts of a layer that the rank holds, as `RankShare.resident_of`.
    """
    work: dict[str, Work] = {}

    def add(name: str, item: Work) -> None:
        work[name] = work.get(name, Work(0, 0)) + item

    for layer in range(config.num_hidden_layers):
        is_decoder = layer >= config.first_decoder_layer
        rows = shape.num_requests * (shape.decoder_rows if is_decoder else shape.rows)
        _layer(config, layer, rows, shape, residents, add)
        if layer in config.engram_layer_ids:
            width = config.engram_num_columns * config.engram_head_dim
            add("Engram", _product(rows, width, (config.hc_mult + 1) * config.hidden_size, FP8))
            add("Engram", Work(rows * width * 33 / 32, 0))
    logits = shape.num_requests * shape.output_rows
    add("head", _product(logits, config.hidden_size, config.vocab_size, BF16, out_bytes=4))
    add("sampling", Work(logits * config.vocab_size * 4, 3 * logits * config.vocab_size))
    if shape.num_drafts:
        _drafter(config, shape, residents, add)
    return work


def _layer(
    config: Any,
    layer: int,
    rows: int,
    shape: StepShape,
    residents: Callable[[str, int], int],
    add: Callable[[str, Work], None],
) -> None:
    heads = config.num_attention_heads
    ratio = config.ratio(layer)
    all_rows = shape.num_rows
    add("attention projections", _attention_products(config, rows))
    selected = min(config.index_topk, shape.context // ratio) if ratio else 0
    keys = config.sliding_window + selected
    records = config.sliding_window * WINDOW_RECORD + selected * MAIN_RECORD
    moved = rows * (records + 2 * heads * config.head_dim * BF16)
    add("sparse attention", Work(moved, _scores(config, rows, keys)))
    add("mHC", _mixes(config, rows).times(2))
    add("router", _product(rows, config.hidden_size, config.n_routed_experts, BF16))
    add("shared expert", _expert(config, rows, FP8))
    num_resident = residents(f"layers.{layer}.ffn.experts", config.n_routed_experts)
    add("routed experts", _routed(config, rows * config.num_experts_per_tok, num_resident))
    if layer in config.kv_source_layer_ids:
        columns = (2 if ratio > 1 else 1) * config.head_dim
        add("compressor", _product(all_rows, config.hidden_size, columns, BF16))
        add("compressor", _product(all_rows // ratio, config.head_dim, config.index_head_dim, BF16))
    if layer in config.index_source_layer_ids:
        width = config.index_n_heads * config.index_head_dim
        add("indexer", _product(rows, config.q_lora_rank, width, FP8))
        visible = shape.context // ratio
        seen = shape.num_requests * visible  # each key once for all rows of a request
        if config.is_restricted(layer):
            visible = min(visible, config.candidate_topk_blocks * config.candidate_block_size)
            seen = min(rows * visible, seen)
        flops = 2.0 * width * rows * visible
        add("indexer", Work(seen * INDEX_KEY + 2 * rows * visible * SCORE, flops))


def _drafter(
    config: Any, shape: StepShape, residents: Callable[[str, int], int], add: Callable[[str, Work], None]
) -> None:
    rows = shape.num_requests * config.dspark_block_size
    features = len(config.dspark_target_layer_ids) * config.hidden_size
    stages = config.num_nextn_predict_layers
    add("drafter", _product(shape.num_rows, features, config.hidden_size, FP8))
    num_resident = residents("mtp.0.ffn.experts", config.dspark_n_routed_experts)
    keys = config.sliding_window + config.dspark_block_size
    stage = _attention_products(config, rows) + _mixes(config, rows).times(2) + _expert(config, rows, FP8)
    stage += _routed(config, rows * config.dspark_num_experts_per_tok, num_resident)
    stage += Work(rows * keys * WINDOW_RECORD, _scores(config, rows, keys))
    add("drafter", stage.times(stages))
    drafts = shape.num_requests * shape.num_drafts
    add("drafter", _product(drafts, config.hidden_size, config.vocab_size, BF16, out_bytes=4))
    one = _product(shape.num_requests, config.dspark_markov_rank, config.vocab_size, BF16, out_bytes=4)
    add("drafter", one.times(shape.num_drafts))


def _product(rows: float, channels: int, columns: int, weight: float, out_bytes: float = BF16) -> Work:
    is_of_codes = weight < BF16
    moved = channels * columns * weight + rows * (
        channels * (1 if is_of_codes else BF16) + columns * out_bytes
    )
    flops = 2.0 * rows * channels * columns
    return Work(moved if rows else 0, flops, flops if is_of_codes else 0)


def _attention_products(config: Any, rows: int) -> Work:
    width = config.num_attention_heads * config.head_dim
    latent = config.o_groups * config.o_lora_rank
    work = _product(rows, config.hidden_size, config.q_lora_rank + config.head_dim, FP8)
    work += _product(rows, config.q_lora_rank, width, FP8)
    work += _product(rows, latent, config.hidden_size, FP8)
    grouped = _product(rows, width // config.o_groups, latent, FP8)
    return work + grouped + Work(rows * (width - width // config.o_groups) * BF16 if rows else 0, 0)


def _scores(config: Any, rows: int, keys: int) -> float:
    return 4.0 * config.num_attention_heads * config.head_dim * rows * keys


def _mixes(config: Any, rows: int) -> Work:
    width = config.hc_mult * config.hidden_size
    work = _product(rows, width, (2 + config.hc_mult) * config.hc_mult, 3 * BF16)
    return work + Work(rows * (width + 2 * config.hidden_size) * BF16, 0)  # streams out, output in, input out


def _expert(config: Any, rows: float, weight: float) -> Work:
    inner = config.moe_intermediate_size
    return _product(rows, config.hidden_size, 2 * inner, weight) + _product(
        rows, inner, config.hidden_size, weight
    )


def _routed(config: Any, slots: int, num_resident: int) -> Work:
    """Slots spread evenly over the resident experts; those that get none are not read."""
    used = min(num_resident, slots)
    return _expert(config, slots / used, FP4).times(used) if used else Work(0, 0)
