"""Seeds: which number a completion's draws depend on, and that they depend on nothing else."""

from __future__ import annotations

import pytest
from torch import Tensor

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.faults import faulty
from tests.sampling.rows import Row, brute_choice
from tests.support.engines import PLAIN_STEPS, generate, make_llm, prompt_of

PROMPT = list(prompt_of(12))


@pytest.fixture(scope="module")
def llm():
    with make_llm(max_num_seqs=16) as llm:
        yield llm


def tokens_of(outputs) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def random(max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def test_more_completions_than_run_at_once(llm):
    tokens = tokens_of(generate(llm, [PROMPT], random(n=40, seed=3, max_tokens=2)))
    assert tokens[:4] == tokens_of(generate(llm, [PROMPT], random(n=4, seed=3, max_tokens=2)))
    assert len(tokens) == 40


@pytest.mark.parametrize("style", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 9}])
def test_the_noise_hangs_on_the_absolute_index(llm, style):
    """A prompt that ends with the first tokens of an output goes on as that output did."""
    params = random(max_tokens=10, seed=2**64 - 5, logprobs=1, **style)
    whole = generate(llm, [PROMPT], params)[0].outputs[0]
    for given in (1, 4, 9):
        (rest,) = generate(llm, [PROMPT + whole.token_ids[:given]], params.clone(max_tokens=10 - given))
        assert rest.outputs[0].token_ids == whole.token_ids[given:]
        assert rest.outputs[0].logprobs == whole.logprobs[given:]


@pytest.mark.parametrize("settings", [PLAIN_STEPS, Settings()], ids=["plain", "drafting"])
def test_every_draw_equals_plain_integers(settings):
    """The Philox and Gumbel definition in plain Python on the logits that the sampler got."""
    cases = [
        ({"temperature": 1.0, "seed": 0x0123456789ABCDEF}, [20, 30, 40]),
        ({"temperature": 0.7, "top_p": 0.9, "seed": 2**64 - 1}, PROMPT),
        ({"temperature": 1.5, "top_k": 50, "min_p": 0.02, "seed": 5}, PROMPT[:5]),
        ({"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 6}, PROMPT[:7]),
    ]
    logits: list[Tensor] = []
    banned = frozenset()
    with make_llm(settings=settings, max_num_seqs=1, max_num_batched_tokens=256) as llm:
        banned = frozenset(llm.get_tokenizer().internal_ids)
        for options, prompt in cases:
            logits.clear()
            with faulty(llm, on_logits=lambda rows: logits.append(rows.clone())):
                (output,) = generate(llm, [prompt], random(max_tokens=3, **options))
            tokens = output.outputs[0].token_ids
            row = Row(
                seed=options["seed"],
                temperature=options["temperature"],
                top_p=options.get("top_p", 1.0),
                top_k=options.get("top_k", -1),
                min_p=options.get("min_p", 0.0),
                repetition=options.get("repetition_penalty", 1.0),
                frequency=options.get("frequency_penalty", 0.0),
                prompt=tuple(prompt),
            )
            first = logits[0][-1].tolist()  # of the prompt's last token
            assert tokens[0] == brute_choice(first, row.with_(index=len(prompt)), banned)
            second = logits[1][0].tolist()
            known = row.with_(index=len(prompt) + 1, output=tuple(tokens[:1]))
            assert tokens[1] == brute_choice(second, known, banned)
