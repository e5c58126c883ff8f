"""Drives the attention of every layer on random inputs, without the rest of the model.

    stack = AttentionStack("float32")
    seq = stack.sequence(300)
    outputs = stack.run(seq, 128, is_prefill=True)     # [layers, 300, hidden], in chunks of 128
    stack.step([(seq, 1), (other, 4)], is_prefill=False)

The input of layer l at position p is `seq.inputs[l, p]`, whatever the layers below put out. The model has a
window of 32, 16 selected entries and 4 candidate blocks of 8, so that short sequences reach every branch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.config import ARITHMETICS
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.indexer import Selection
from deepinfer.models.deepseek_v41.rows import RowSet, rotary_tables
from deepinfer.models.deepseek_v41.spec import model_spec
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.cache_layout import CacheLayout
from deepinfer.runtime.caches import Caches
from tests.support.paths import TINY_QUANT

BLOCK_SIZE = 128
MAX_BACKTRACKING = 6
NUM_LAYERS = 8


@dataclass(eq=False)
class Sequence:
    """A sequence of random inputs.

    Attributes:
        inputs: [layers, length, hidden].
        blocks: physical blocks, in order.
        slot: state slot.
        num_done: positions that are in the caches.
    """

    inputs: Tensor
    blocks: list[int]
    slot: int
    num_done: int = 0


@functools.cache
def small_config() -> DeepseekV41Config:
    """tiny-quant with a short window and small selections."""
    config = DeepseekV41Config.from_dict(json.loads((TINY_QUANT / "config.json").read_text()))
    return replace(config, sliding_window=32, index_topk=16, candidate_topk_blocks=4)


@functools.cache
def load_attentions(arithmetic: str) -> tuple[Attention, ...]:
    """The attention of every backbone layer."""
    weights = Weights(CheckpointReader(TINY_QUANT))
    return tuple(
        Attention.load(weights, f"layers.{i}.attn", i, small_config(), ARITHMETICS[arithmetic])
        for i in range(NUM_LAYERS)
    )


class AttentionStack:
    """Attention modules over pools of their own; blocks and slots are handed out in a mixed order."""

    def __init__(self, arithmetic: str, num_blocks: int = 24, num_slots: int = 12) -> None:
        self.arithmetic = ARITHMETICS[arithmetic]
        self.config = small_config()
        self.attentions = load_attentions(arithmetic)
        self.layout = CacheLayout.build(
            model_spec(self.config),
            release=self.arithmetic.release_caches,
            block_size=BLOCK_SIZE,
            max_backtracking=MAX_BACKTRACKING,
        )
        self.caches = Caches(self.layout, num_blocks, num_slots)
        self.caches.blocks.fill_(0xFF)  # NaN in every format: what nobody wrote spoils what reads it
        self.caches.slots.fill_(0xFF)
        self.rotary = rotary_tables(self.config)
        self.free_blocks = [1 + i for i in torch.randperm(num_blocks - 1).tolist()]
        self.free_slots = [1 + i for i in torch.randperm(num_slots - 1).tolist()]

    def sequence(self, length: int) -> Sequence:
        """A new sequence of random inputs."""
        dtype = getattr(torch, self.arithmetic.compute_dtype)
        return self.adopt(torch.randn(NUM_LAYERS, length, self.config.hidden_size).to(dtype))

    def adopt(self, inputs: Tensor) -> Sequence:
        """A new sequence with the inputs [layers, length, hidden]."""
        blocks = [self.free_blocks.pop() for _ in range(-(-inputs.shape[1] // BLOCK_SIZE))]
        return Sequence(inputs, blocks, self.free_slots.pop())

    def batch(self, chunks: Seq[tuple[Sequence, int]], is_prefill: bool) -> Batch:
        """The next rows of some sequences, as a model would get them."""
        positions = [torch.arange(seq.num_done, seq.num_done + count) for seq, count in chunks]
        counts = torch.tensor([count for _, count in chunks])
        lengths = [seq.num_done + count for seq, count in chunks]
        num_rows, num_seqs = int(counts.sum()), len(chunks)
        width = max(len(seq.blocks) for seq, _ in chunks)
        none = torch.zeros(num_rows, dtype=torch.int32)
        return Batch(
            input_ids=none,
            positions=torch.cat(positions).int(),
            row_seq=torch.repeat_interleave(torch.arange(num_seqs), counts).int(),
            ngram_ids=none[:, None],
            cu_seqlens_q=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int(),
            seqlens_k=torch.tensor(lengths).int(),
            state_slots=torch.tensor([seq.slot for seq, _ in chunks]).int(),
            block_tables=torch.tensor(
                [seq.blocks + [0] * (width - len(seq.blocks)) for seq, _ in chunks]
            ).int(),
            total_lens=torch.tensor(lengths).int(),
            keep_all=torch.ones(num_seqs, dtype=torch.int32),
            window_starts=torch.zeros(num_seqs, dtype=torch.int32),
            output_rows=torch.arange(num_rows).int(),
            max_seqlen_k=max(lengths),
            is_prefill=is_prefill,
        )

    def step(self, chunks: Seq[tuple[Sequence, int]], *, is_prefill: bool) -> list[Tensor]:
        """Feed the next rows of some sequences; the outputs [layers, rows, hidden] of each."""
        rows = RowSet.whole(self.batch(chunks, is_prefill), self.rotary)
        outputs = []
        self.selections: list[Selection | None] = []
        selection = None
        for layer_id, attention in enumerate(self.attentions):
            x = torch.cat([seq.inputs[layer_id, seq.num_done : seq.num_done + n] for seq, n in chunks])
            attention.store_entries(x, rows, self.caches)
            keys = attention.store_window(x, rows, self.caches)
            output, selection = attention.forward(x, rows, keys, self.caches, selection)
            outputs.append(output)
            self.selections.append(selection)
        for seq, count in chunks:
            seq.num_done += count
        return list(torch.stack(outputs).split([count for _, count in chunks], dim=1))

    def run(self, seq: Sequence, chunk: int, stop: int | None = None, *, is_prefill: bool) -> Tensor:
        """Feed a sequence up to `stop` (default: all) in chunks; outputs [layers, rows, hidden]."""
        parts = []
        stop = seq.inputs.shape[1] if stop is None else stop
        while seq.num_done < stop:
            parts += self.step([(seq, min(chunk, stop - seq.num_done))], is_prefill=is_prefill)
        return torch.cat(parts, dim=1)
