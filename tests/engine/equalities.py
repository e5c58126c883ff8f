"""Requests whose results must not depend on how they are run, and the ways to run them.

`test_equalities.py` runs a covering subset of lengths, `python -m tests.engine.every_length` every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.entrypoints.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from tests.support.engines import prompt_of

LENGTHS = (*range(1, 10), 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 258, 300, 512, 700)
STYLES = ("greedy", "random", "nucleus")
NUM_OUTPUTS = 3


@dataclass(frozen=True)
class Case:
    """One request: a prompt of some length, and how its tokens are chosen."""

    length: int
    style: str
    num_outputs: int = NUM_OUTPUTS

    @property
    def prompt(self) -> tuple[int, ...]:
        return prompt_of(self.length, STYLES.index(self.style))

    @property
    def params(self) -> SamplingParams:
        """Explicit seeds; log-probabilities show differences that do not change a token."""
        shape = {
            "greedy": {"temperature": 0},
            "random": {"temperature": 1.0, "seed": self.length},
            "nucleus": {"temperature": 0.7, "top_p": 0.9, "seed": 2**63 + self.length},
        }[self.style]
        return SamplingParams(max_tokens=self.num_outputs, ignore_eos=True, logprobs=2, **shape)


def cases_of(lengths: Sequence[int]) -> list[Case]:
    """Each length greedy and sampled; both ways of sampling take turns."""
    sampled = STYLES[1:]
    return [
        case
        for place, length in enumerate(lengths)
        for case in (Case(length, "greedy"), Case(length, sampled[place % 2]))
    ]


Outcome = list[tuple[list[int], Any]]  # per case: output tokens, and their log-probabilities


def run_together(llm: LLM, cases: Sequence[Case]) -> Outcome:
    """All cases in one call."""
    prompts = [list(case.prompt) for case in cases]
    outputs = llm.generate(prompts, [case.params for case in cases], use_tqdm=False)
    return [_outcome(output) for output in outputs]


def run_alone(llm: LLM, cases: Sequence[Case]) -> Outcome:
    """One call for each case."""
    return [outcome for case in cases for outcome in run_together(llm, [case])]


def run_by_decoding(llm: LLM, cases: Sequence[Case]) -> Outcome:
    """Token by token through decode steps: all but the first token of a prompt are forced outputs."""
    params = [
        case.params.clone(max_tokens=case.length - 1 + case.num_outputs, golden_token_ids=case.prompt[1:])
        for case in cases
    ]
    outputs = llm.generate([list(case.prompt[:1]) for case in cases], params, use_tqdm=False)
    return [_outcome(output, skip=case.length - 1) for output, case in zip(outputs, cases, strict=True)]


def _outcome(output: RequestOutput, skip: int = 0) -> tuple[list[int], Any]:
    sample = output.outputs[0]
    assert sample.error is None, sample.error
    return sample.token_ids[skip:], (sample.token_logprobs[skip:], sample.logprobs[skip:])


def differences(cases: Sequence[Case], actual: Outcome, expected: Outcome) -> list[str]:
    """One line for each case whose two outcomes are not the same bits."""
    return [
        f"{case}: {got[0]} {got[1][0]}, not {want[0]} {want[1][0]}"
        for case, got, want in zip(cases, actual, expected, strict=True)
        if got != want
    ]
