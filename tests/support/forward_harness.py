"""Drives a model's forward without scheduler or sampler: token lists in, logits out.

    harness = ForwardHarness(model, fold)             # fold: [vocab] folded ids of Engram, see `fold_map`
    a, b = harness.add(prompt_a), harness.add(prompt_b)
    harness.step([(a, 100), (b, 7)])                  # one forward: the next 100 rows of a and 7 of b
    logits = harness.prefill(a, chunk=128)            # [1, vocab] of the newest token
    every = harness.prefill(b, outputs="all")         # [rows, vocab]
    tokens, margins = harness.greedy([a, b], steps=8) # decode together

Every sequence owns a state slot and blocks handed out in a shuffled order. The pools start full of 0xFF,
which is NaN in every format, so a read of a record that nobody wrote spoils the logits.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from deepinfer.config import ReplayMode
from deepinfer.models.base import ForwardOutput
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.cache_layout import CacheLayout
from deepinfer.runtime.caches import Caches

BLOCK_SIZE = 128
Outputs = Literal["last", "all", "kept", "none"]


@dataclass
class TestSequence:
    """One sequence: its tokens, how many of them went through the model, and what it owns in the pools."""

    __test__ = False  # not a test class

    tokens: list[int]
    slot: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    window_start: int = 0  # first position that decoder windows see, with bounded replay

    @property
    def remaining(self) -> int:
        """Tokens that have not gone through the model."""
        return len(self.tokens) - self.computed


class ForwardHarness:
    """A model, its pools, and sequences in them.

    Args:
        model: the backbone.
        fold: [vocab] int, folded id of each token; `fold[pad]` stands where an n-gram has no token.
        num_seqs: state slots.
        max_tokens: capacity of the paged pool, for all sequences together.
        max_backtracking: room of the rings beyond the window; a decode step may have one row more.
        seed: order in which blocks and slots are handed out.
        replay: what prefills compute of the decoder's part, see `TestSequence.window_start`.
    """

    def __init__(
        self,
        model: DeepseekV41Model,
        fold: Tensor,
        *,
        num_seqs: int = 4,
        max_tokens: int = 2048,
        max_backtracking: int = 6,
        seed: int = 0,
        replay: ReplayMode = ReplayMode.OFF,
    ) -> None:
        self.model = model
        self._replay = replay
        self._device = model.embed.weight.device
        self._fold = fold.long()
        self._pad = int(fold[model.config.engram_pad_token_id])
        layout = CacheLayout.build(
            model.spec,
            release=model.arithmetic.release_caches,
            block_size=BLOCK_SIZE,
            max_backtracking=max_backtracking,
        )
        num_blocks = -(-max_tokens // BLOCK_SIZE) + num_seqs + 1
        self.caches = Caches(layout, num_blocks, num_seqs + 1, self._device)
        self.caches.blocks.fill_(0xFF)
        self.caches.slots.fill_(0xFF)
        order = random.Random(seed)
        self._free_blocks = order.sample(range(1, num_blocks), num_blocks - 1)
        self._free_slots = order.sample(range(1, num_seqs + 1), num_seqs)
        self.last_output: ForwardOutput | None = None  # of the newest step
        self.last_batch: Batch | None = None

    def add(self, tokens: Seq[int], window_start: int = 0) -> TestSequence:
        """A new sequence with these tokens, none of them computed."""
        return TestSequence(list(tokens), self._free_slots.pop(), window_start=window_start)

    def remove(self, seq: TestSequence) -> None:
        """Give back what the sequence owns."""
        self._free_slots.append(seq.slot)
        self._free_blocks += seq.blocks
        seq.blocks = []

    def step(
        self,
        work: Seq[tuple[TestSequence, int]],
        outputs: Outputs = "last",
        *,
        decode: bool = False,
        want_features: bool = False,
    ) -> Tensor:
        """One forward over the next rows of some sequences.

        Args:
            work: sequences and how many rows of each.
            outputs: rows to give logits for; "last": the newest token of each sequence whose tokens end in
                this step; "kept": those from the sequence's `window_start` on.
            decode: run as a decode step, with a few rows for each sequence.

        Returns:
            [rows, vocab] float32 logits, in the order of `work`.
        """
        batch = self.batch(work, outputs, decode=decode)
        with torch.inference_mode():
            output = self.model.forward(batch, self.caches, want_features)
            logits = self.model.compute_logits(output.hidden_states)
        for seq, num_rows in work:
            seq.computed += num_rows
        self.last_output, self.last_batch = output, batch
        return logits

    def prefill(
        self, seq: TestSequence, chunk: int | None = None, outputs: Outputs = "last", limit: int | None = None
    ) -> Tensor:
        """Run the rest of a sequence's tokens, or `limit` of them, in chunks; logits of all outputs."""
        end = len(seq.tokens) if limit is None else seq.computed + limit
        parts = []
        while seq.computed < end:
            num_rows = min(chunk or end, end - seq.computed)
            parts.append(self.step([(seq, num_rows)], outputs))
        return torch.cat(parts)

    def decode(self, seqs: Seq[TestSequence], tokens: Seq[int]) -> Tensor:
        """Append one token to each sequence and run them together; [sequences, vocab] logits."""
        for seq, token in zip(seqs, tokens, strict=True):
            seq.tokens.append(token)
        return self.step([(seq, 1) for seq in seqs], "all", decode=True)

    def greedy(
        self, seqs: Seq[TestSequence], steps: int, logits: Tensor | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Generate the best token `steps` times, all sequences together.

        Args:
            seqs: sequences; without `logits` none of their tokens is computed yet.
            steps: tokens to generate.
            logits: [sequences, vocab] of each one's newest token.

        Returns:
            tokens and margins (best minus second) of each sequence.
        """
        if logits is None:
            logits = torch.cat([self.prefill(seq) for seq in seqs])
        tokens: list[list[int]] = [[] for _ in seqs]
        margins: list[list[float]] = [[] for _ in seqs]
        for number in range(steps):
            best = logits.topk(2)
            for place in range(len(seqs)):
                tokens[place].append(int(best.indices[place, 0]))
                margins[place].append(float(best.values[place, 0] - best.values[place, 1]))
            if number + 1 < steps:
                logits = self.decode(seqs, [row[-1] for row in tokens])
        return tokens, margins

    def batch(self, work: Seq[tuple[TestSequence, int]], outputs: Outputs, *, decode: bool = False) -> Batch:
        """The Batch of a step, on the model's device; grows the sequences' block tables."""
        rows = [
            (place, p) for place, (seq, n) in enumerate(work) for p in range(seq.computed, seq.computed + n)
        ]
        ends = [seq.computed + n for seq, n in work]
        for (seq, _), end in zip(work, ends, strict=True):
            assert end <= len(seq.tokens), f"{end=} {len(seq.tokens)=}"
            while len(seq.blocks) * BLOCK_SIZE < end:
                seq.blocks.append(self._free_blocks.pop())
        width = max(len(seq.blocks) for seq, _ in work)
        is_output = [
            outputs == "all"
            or (outputs == "last" and p == len(work[place][0].tokens) - 1)
            or (outputs == "kept" and p >= work[place][0].window_start)
            for place, p in rows
        ]

        def ints(values) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        batch = Batch(
            input_ids=ints([work[place][0].tokens[p] for place, p in rows]),
            positions=ints([p for _, p in rows]),
            row_seq=ints([place for place, _ in rows]),
            ngram_ids=self._ngram_ids(work),
            cu_seqlens_q=ints([0] + [n for _, n in work]).cumsum(0).int(),
            seqlens_k=ints(ends),
            state_slots=ints([seq.slot for seq, _ in work]),
            block_tables=ints([seq.blocks + [0] * (width - len(seq.blocks)) for seq, _ in work]),
            total_lens=ints([len(seq.tokens) for seq, _ in work]),
            keep_all=ints([int(outputs in ("all", "kept") and not decode) for _ in work]),
            output_rows=ints([row for row, wanted in enumerate(is_output) if wanted]),
            max_seqlen_k=max(ends),
            is_prefill=not decode,
            window_starts=ints([seq.window_start for seq, _ in work]),
            replay=self._replay,
        )
        if self._device.type == "cpu":
            return batch
        host = {name: getattr(batch, name) for name in Batch.tensor_names()}
        moved = {name: tensor.to(self._device) for name, tensor in host.items()}
        return dataclasses.replace(batch, **moved, host=None if decode else host)

    def _ngram_ids(self, work: Seq[tuple[TestSequence, int]]) -> Tensor:
        """[rows, max_ngram] int32 folded ids of each row's token and its predecessors."""
        size = self.model.spec.max_ngram
        parts = []
        for seq, num_rows in work:
            end = seq.computed + num_rows
            ids = torch.full((end + size,), self._pad)
            ids[size:] = self._fold[torch.tensor(seq.tokens[:end])]
            windows = ids.unfold(0, size, 1)[1:].flip(1)  # newest first
            parts.append(windows[seq.computed :])
        return torch.cat(parts).int().contiguous()
