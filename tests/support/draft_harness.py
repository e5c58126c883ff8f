"""Drives backbone and drafter together without scheduler or sampler: a `ForwardHarness` that also drafts.

harness = DraftHarness(model, drafter, fold)
seq = harness.add(prompt)
anchor = int(harness.prefill(seq).argmax())        # every step fills the drafter's rings
drafts = harness.propose([seq], [anchor])          # drafts.tokens [1, 5]
trace = harness.speculate(seq, anchor, max_tokens=64)
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.base import Drafter
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from tests.support.forward_harness import ForwardHarness, Outputs, TestSequence


@dataclass(frozen=True)
class Drafts:
    """Drafts of n sequences: tokens [n, k], confidence logits [n, k], logits as drawn from [n, k, vocab]."""

    tokens: Tensor
    confidence_logits: Tensor
    logits: Tensor


@dataclass(frozen=True)
class SpeculationStep:
    """One greedy round of draft and verification.

    Attributes:
        position: of the anchor.
        emitted: the drafts that greedy decoding keeps, then its own token.
        margins: best minus second logit of each row that emitted.
    """

    position: int
    anchor: int
    drafts: list[int]
    accepted: int
    confidence_logits: list[float]
    emitted: list[int]
    margins: list[float]


class DraftHarness(ForwardHarness):
    """A backbone, its drafter, their pools, and sequences in them.

    Args:
        drafter: fed after every step.
        The others are those of `ForwardHarness`.
    """

    def __init__(self, model: DeepseekV41Model, drafter: Drafter, fold: Tensor, **options) -> None:
        super().__init__(model, fold, **options)
        self.drafter = drafter

    def step(
        self,
        work: Seq[tuple[TestSequence, int]],
        outputs: Outputs = "last",
        *,
        decode: bool = False,
        want_features: bool = True,
    ) -> Tensor:
        """As `ForwardHarness.step`; then the drafter takes in the features."""
        logits = super().step(work, outputs, decode=decode, want_features=True)
        output = self.last_output
        with torch.inference_mode():
            self.drafter.store_context(
                self.drafter.context(output.features, output.feature_rows, self.last_batch), self.caches
            )
        return logits

    def propose(
        self,
        seqs: Seq[TestSequence],
        anchors: Seq[int],
        num_drafts: int | None = None,
        choose: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Drafts:
        """Draft behind the anchors, which stand behind the computed tokens; the best tokens by default."""
        seen: list[Tensor] = []

        def watched(step: int, logits: Tensor) -> Tensor:
            assert step == len(seen), f"{step=}"
            seen.append(logits.clone())
            return logits.argmax(1).int() if choose is None else choose(step, logits)

        with torch.inference_mode():
            proposal = self.drafter.propose(
                *self._block_arguments(seqs, anchors),
                self.caches,
                watched,
                self.drafter.block_size if num_drafts is None else num_drafts,
            )
        return Drafts(proposal.tokens, proposal.confidence_logits, torch.stack(seen, 1))

    def _block_arguments(self, seqs: Seq[TestSequence], anchors: Seq[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Anchors, positions and state slots."""
        columns = (anchors, [seq.computed for seq in seqs], [seq.slot for seq in seqs])
        return tuple(torch.tensor(column, dtype=torch.int32, device=self._device) for column in columns)

    def speculate(
        self,
        seq: TestSequence,
        anchor: int,
        *,
        max_tokens: int,
        stop: Callable[[int], bool] = lambda token: False,
        num_drafts: int | None = None,
    ) -> list[SpeculationStep]:
        """Greedy decoding with drafts behind a computed prompt.

        Args:
            anchor: first generated token.
            max_tokens: steps go on until so many tokens, the anchor included, are there (or more).
            stop: whether a token ends the text; steps end with the one that emits it.
            num_drafts: per step; the whole block when None.
        """
        steps: list[SpeculationStep] = []
        num_tokens = 1
        while num_tokens < max_tokens and not stop(anchor):
            proposal = self.propose([seq], [anchor], num_drafts)
            drafts = proposal.tokens[0].tolist()
            position = seq.computed
            seq.tokens += [anchor, *drafts]
            logits = self.step([(seq, 1 + len(drafts))], "all", decode=True)
            chosen = logits.argmax(1).tolist()
            accepted = next((i for i, d in enumerate(drafts) if d != chosen[i]), len(drafts))
            best = logits[: accepted + 1].topk(2).values
            steps.append(
                SpeculationStep(
                    position=position,
                    anchor=anchor,
                    drafts=drafts,
                    accepted=accepted,
                    confidence_logits=proposal.confidence_logits[0].tolist(),
                    emitted=chosen[: accepted + 1],
                    margins=(best[:, 0] - best[:, 1]).tolist(),
                )
            )
            self.roll_back(seq, position + 1 + accepted)
            anchor = chosen[accepted]
            num_tokens += accepted + 1
            if any(stop(token) for token in steps[-1].emitted):
                break
        return steps

    @staticmethod
    def roll_back(seq: TestSequence, num_tokens: int) -> None:
        """Forget the tokens behind the first `num_tokens`."""
        del seq.tokens[num_tokens:]
        seq.computed = min(seq.computed, num_tokens)


def run_block(harness: DraftHarness, seqs: Seq[TestSequence], anchors: Seq[int]) -> Tensor:
    """[n, block, hidden] states of the blocks behind the sequences' computed tokens."""
    with torch.inference_mode():
        states = harness.drafter.run_block(*harness._block_arguments(seqs, anchors), harness.caches)
    return states.transpose(0, 1)
