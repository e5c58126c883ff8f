"""The whole engine on a GPU, with the bundled model: how steps are run changes no result.

graph = eager, asynchronous = synchronous, with drafts = without, chunked = whole, batched = alone
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.matrix import bundled_prompts
from tests.support.engines import facts, generate, make_cold_llm

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
PLAIN = {"use_async_scheduling": False, "num_draft_tokens": 0, "enforce_eager": True}
GRAPHS = {"graph_interval": 48, "draft_graph_interval": 8}
RUNS = {
    "graphs": GRAPHS,
    "graphs, sync": {**GRAPHS, "use_async_scheduling": False},
    "graphs, no drafts": {**GRAPHS, "num_draft_tokens": 0},
    "graphs of measured sizes": {},
    "eager": {"enforce_eager": True},
    "drafts eager": {**GRAPHS, "draft_enforce_eager": True},
    "lengths by confidence": {**GRAPHS, "use_draft_budget": True},
}


def work(logprobs: int | None = None) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all styles; log-probabilities take the eager sampler."""
    prompts = [list(prompt) for prompt in bundled_prompts()[:16]]
    styles = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40})
    params = [
        SamplingParams(max_tokens=24 + row, seed=row, ignore_eos=True, logprobs=logprobs, **styles[row % 3])
        for row in range(len(prompts))
    ]
    return prompts, params


def make(settings: dict[str, Any], **options: Any) -> Any:
    return make_cold_llm(max_num_seqs=16, settings=Settings(**settings), **options)


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[Any, Any]]:
    """Each request alone, token by token, nothing captured."""
    with make(PLAIN) as llm:
        both = []
        for logprobs in (None, 2):
            both.append([])
            for prompt, params in zip(*work(logprobs), strict=True):
                both[-1] += facts(generate(llm, [prompt], [params]))
        yield tuple(both)


@pytest.mark.parametrize("run", RUNS)
def test_one_result(expected, run):
    with make(RUNS[run]) as llm:
        assert facts(generate(llm, *work())) == expected[0]
        stats = llm.get_stats()
        is_eager = RUNS[run].get("enforce_eager", False)
        assert (stats.num_graph_steps == 0) == is_eager
        assert is_eager or stats.num_eager_steps == stats.num_prefill_steps
        assert facts(generate(llm, *work(2))) == expected[1]


def test_chunks(expected):
    with make(GRAPHS, max_num_batched_tokens=96) as llm:  # as many as a decode step has rows
        assert facts(generate(llm, *work())) == expected[0]
        assert llm.get_stats().num_prefill_steps > 1


def test_special_requests_wait_for_nothing_but_their_masks():
    """Penalties, bias, bans, lists, ratio verification; the guard is on, and eager equals replayed."""
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(max_tokens=12, temperature=1.0, seed=2, min_tokens=8, logit_bias={40: 2.0}),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, allowed_token_ids=[40, 50, 60, 70]),
        SamplingParams(max_tokens=12, temperature=1.0, seed=4, verification="ratio"),
        SamplingParams(max_tokens=12, temperature=1.0, seed=5, prompt_logprobs=2),
    ]
    found = []
    for settings in (GRAPHS, {"enforce_eager": True}):
        with make(settings) as llm:
            found.append(facts(generate(llm, work()[0][:5], params)))
    assert found[0] == found[1]


def test_kernels_of_a_step():
    """A decode step launches our kernels, and of torch's only copies, fills and arithmetic on few numbers."""
    from torch.profiler import ProfilerActivity, profile

    with make(GRAPHS) as llm:
        engine = llm.llm_engine
        for row, (prompt, params) in enumerate(zip(*work(), strict=True)):
            engine.add_request(str(row), prompt, params)
        for _ in range(4):
            engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(3):
                engine.step()
            torch.cuda.synchronize()
        while engine.has_unfinished_requests():
            engine.step()
        engine.settle()
    kernels = Counter(
        event.name
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not re.match("Memcpy|Memset", event.name)
    )
    torch_products = [name for name in kernels if re.search("gemm|cutlass|cublas|xmma|softmax|sort", name)]
    assert sum(kernels.values()) > 100
    assert all(name.endswith("_kernel") for name in torch_products), torch_products
