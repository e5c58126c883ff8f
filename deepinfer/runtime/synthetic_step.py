"""Synthetic decode steps: inputs without requests, to run the model at a given size.

They serve to measure. Nothing of them is committed; the slots and blocks that they write hold no request's
data, and a request that gets such a slot or block writes it before it reads it, as after any other.
"""

from __future__ import annotations

import dataclasses

import torch

from deepinfer.runtime.batch import Batch
from deepinfer.runtime.caches import Caches
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.step_time import StepSize
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.utils.upload import upload

_STRIDE = 40_503  # between the token ids of rows; odd, so that ids do not repeat soon


class SyntheticSteps:
    """Runs synthetic steps of given sizes; `runner.reset()` when done.

    Args:
        runner: runs them.
        caches: the runner's.
        max_ngram: columns of the model's n-gram windows.
        context_tokens: tokens that each request already has.
        vocab_size: of the model.
    """

    def __init__(
        self, runner: ModelRunner, caches: Caches, max_ngram: int, context_tokens: int, vocab_size: int
    ) -> None:
        self._runner = runner
        self._caches = caches
        self._max_ngram = max_ngram
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size

    def __call__(self, size: StepSize) -> None:
        """Run one step to its end."""
        batch = synthetic_batch(
            size.num_seqs,
            size.num_tokens,
            self._context_tokens,
            num_blocks=self._caches.blocks.shape[0],
            num_slots=self._caches.slots.shape[0],
            block_size=self._caches.layout.block_size,
            max_ngram=self._max_ngram,
            vocab_size=self._vocab_size,
            device=self._caches.slots.device,
        )
        self._runner.prepare(batch, None)
        self._runner.forward()
        inputs = synthetic_inputs(
            size.num_seqs, size.num_tokens, self._context_tokens, self._caches.slots.device
        )
        self._runner.sample(inputs, size.num_seqs if size.is_drafted else 0).fetch()


def synthetic_batch(
    num_seqs: int,
    num_tokens: int,
    context_tokens: int,
    *,
    num_blocks: int,
    num_slots: int,
    block_size: int,
    max_ngram: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Batch:
    """A decode batch of requests with `context_tokens` tokens each; slots and blocks may repeat.

    Rows have different tokens, so that they meet as many experts as those of real requests.
    """
    width = num_tokens // num_seqs
    assert width * num_seqs == num_tokens, f"{num_seqs=} {num_tokens=}"
    seqs = torch.arange(num_seqs, dtype=torch.int32)
    row_seq = seqs.repeat_interleave(width)
    length = context_tokens + width
    blocks_per_seq = -(-length // block_size)
    blocks = torch.arange(num_seqs * blocks_per_seq, dtype=torch.int32) % max(num_blocks - 1, 1) + 1
    lengths = torch.full((num_seqs,), length, dtype=torch.int32)
    batch = Batch(
        input_ids=(torch.arange(num_tokens) * _STRIDE % vocab_size).to(torch.int32),
        positions=context_tokens + torch.arange(width, dtype=torch.int32).repeat(num_seqs),
        row_seq=row_seq,
        ngram_ids=torch.zeros(num_tokens, max_ngram, dtype=torch.int32),
        cu_seqlens_q=torch.arange(0, num_tokens + 1, width, dtype=torch.int32),
        seqlens_k=lengths,
        state_slots=seqs % max(num_slots - 1, 1) + 1,
        block_tables=blocks.view(num_seqs, blocks_per_seq),
        total_lens=lengths,
        keep_all=torch.zeros(num_seqs, dtype=torch.int32),
        window_starts=torch.zeros(num_seqs, dtype=torch.int32),
        output_rows=torch.arange(num_tokens, dtype=torch.int32),
        max_seqlen_k=length,
        is_prefill=False,
    )
    host = {name: getattr(batch, name).numpy() for name in Batch.tensor_names()}
    tensors = dict(zip(host, upload(list(host.values()), torch.device(device)), strict=True))
    return dataclasses.replace(batch, **tensors, planned=host)


def synthetic_inputs(
    num_seqs: int, num_tokens: int, context_tokens: int, device: torch.device | str = "cpu"
) -> SamplingInputs:
    """Greedy rows of equal requests; each row tests token 0 as its draft, the last of a request none."""
    width = num_tokens // num_seqs
    draft_ids = torch.zeros(num_seqs, width, dtype=torch.int32)
    draft_ids[:, -1] = -1
    places = context_tokens + 1 + torch.arange(width)
    values = {"top_p": 1.0, "repetition": 1.0, "top_k": -1, "num_logprobs": -1, "forced": -1}
    arrays = {
        name: torch.full((num_tokens,), values.get(name, 0), dtype=dtype)
        for dtype, names in (
            (torch.int64, "seeds"),
            (torch.float32, "inv_temperature top_p min_p repetition presence frequency"),
            (torch.int32, "top_k num_logprobs forced is_ratio"),
        )
        for name in names.split()
    }
    no_rows = torch.zeros(0, dtype=torch.int32)
    sparse = "penalty_rows penalty_tokens penalty_counts bias_rows bias_tokens ban_rows ban_tokens"
    host = {
        **arrays,
        "token_index": places.repeat(num_seqs),
        "draft_ids": draft_ids.flatten(),
        "row_offsets": torch.arange(0, num_tokens + 1, width, dtype=torch.int32),
        **dict.fromkeys([*sparse.split(), "allowed_rows", "allowed_tokens"], no_rows),
        "bias_values": torch.zeros(0),
        "allowed_offsets": torch.zeros(1, dtype=torch.int32),
    }
    tensors = upload([tensor.numpy() for tensor in host.values()], torch.device(device))
    return SamplingInputs.from_host(host, dict(zip(host, tensors, strict=True)))
