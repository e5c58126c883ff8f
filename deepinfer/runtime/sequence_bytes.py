"""SequenceBytes: what the device keeps of one sequence, out of the pools and back into them."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.runtime.caches import Caches
from deepinfer.sampling.ratio import DraftScores

# uint8 [n, block_bytes] rows of blocks, uint8 [slot_bytes], float32 [num_scores, vocab] scores of drafts.
SequenceCopies = tuple[np.ndarray, np.ndarray, np.ndarray]


class SequenceBytes:
    """Reads and writes sequences. Called on the device's queue, so in order with the steps around.

    Args:
        caches: the pools.
        draft_scores: scores of ratio drafts, which lie beside the slots.
    """

    def __init__(self, caches: Caches, draft_scores: DraftScores) -> None:
        self._caches = caches
        self._draft_scores = draft_scores

    @torch.inference_mode()
    def read(self, blocks: np.ndarray, slot: int, num_scores: int) -> SequenceCopies:
        """Copies of blocks and a slot, and of the scores of its first drafts."""
        rows = self._caches.blocks[torch.from_numpy(blocks).long()]
        scores = torch.empty(0, 0)
        if num_scores:
            places = torch.arange(num_scores)
            scores = self._draft_scores.take(torch.full((num_scores,), slot), places)
        return rows.cpu().numpy(), self._caches.slots[slot].cpu().numpy().copy(), scores.cpu().numpy()

    @torch.inference_mode()  # as the steps, one of which may have allocated the scores
    def write(
        self, blocks: np.ndarray, slot: int, rows: np.ndarray, state: np.ndarray, scores: np.ndarray | None
    ) -> None:
        """Put what `read` gave into other blocks and another slot."""
        device = self._caches.slots.device
        if len(blocks):
            self._caches.blocks[torch.from_numpy(blocks).long()] = torch.tensor(rows, device=device)
        self._caches.slots[slot] = torch.tensor(state, device=device)
        if scores is not None:
            self._draft_scores.assign([slot])
        for step in range(0 if scores is None else len(scores)):
            row = torch.tensor(scores[step : step + 1], device=device)
            self._draft_scores.keep(torch.tensor([slot]), step, row)
