"""The whole engine on a GPU, with the bundled model: how steps are run changes no result.

graph = eager, asynchronous = synchronous, with drafts = without, chunked = whole, batched = alone

Any of these tests can run by itself; those that use the same engine share it. Kernels come from the directory
that DEEPINFER_KERNEL_LIBRARY names, or the first use of each takes the seconds that compiling it takes:

    python -m tilelang_ops.build --target sm_90a --config examples/v41-tiny/config.json --out DIRECTORY
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from deepinfer.entrypoints.llm import LLM
from deepinfer.platform.base import GraphMemoryError
from deepinfer.runtime.graph_sizes import candidate_sizes
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.structured import SHAPES
from tests.support.engines import facts, generate, make_cold_llm, prompt_of
from tilelang_ops.build import factories

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
NUM_SEQS = 8
PLAIN = {"use_async_scheduling": False, "num_draft_tokens": 0, "enforce_eager": True}
GRAPHS = {"graph_interval": 24, "draft_graph_interval": 4}
RUNS = {
    "graphs": GRAPHS,
    "graphs, sync": {**GRAPHS, "use_async_scheduling": False},
    "graphs, no drafts": {**GRAPHS, "num_draft_tokens": 0},
    "graphs of measured sizes": {},
    "graphs on demand": {"graphs_on_demand": True},
    "eager": {"enforce_eager": True},
    "drafts eager": {**GRAPHS, "draft_enforce_eager": True},
    "lengths by confidence": {**GRAPHS, "use_draft_budget": True},
}
STYLES = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40})
Facts = list[Any]


def work(logprobs: int | None = None) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all styles, one of them long; log-probabilities take the eager sampler."""
    prompts = [list(prompt_of(5 + 9 * row)) for row in range(NUM_SEQS - 1)] + [list(prompt_of(200))]
    params = [
        SamplingParams(max_tokens=12 + row, seed=row, ignore_eos=True, logprobs=logprobs, **STYLES[row % 3])
        for row in range(len(prompts))
    ]
    return prompts, params


def special() -> tuple[list[list[int]], list[SamplingParams]]:
    """What no captured sampling serves, each beside plain requests; the last is verified by ratio."""
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(max_tokens=12, temperature=1.0, seed=1, frequency_penalty=0.5, min_p=0.02),
        SamplingParams(max_tokens=12, temperature=1.0, seed=2, min_tokens=8, logit_bias={40: 2.0}),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, allowed_token_ids=[40, 50, 60, 70]),
        SamplingParams(max_tokens=12, temperature=1.0, seed=5, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=12, temperature=1.0, seed=4, verification="ratio", ignore_eos=True),
    ]
    return work()[0][: len(params)], params


def structured() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests with grammars, and without."""
    params = [
        SamplingParams(max_tokens=24, temperature=row % 2, seed=row, so_args=SHAPES[name])
        for row, name in enumerate(("json", "regex", "free", "ebnf", "choice"))
    ]
    return work()[0][: len(params)], params


def make(settings: dict[str, Any], **options: Any) -> LLM:
    return make_cold_llm(max_num_seqs=NUM_SEQS, settings=Settings(**settings), **options)


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[[str], LLM]]:
    """The engine of a run, made when a test first asks for it."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda run: stack.enter_context(make(RUNS[run])))


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[..., Facts]]:
    """What requests give one by one, token by token, with nothing captured."""
    with make(PLAIN) as llm:

        @functools.cache
        def run(name: str, logprobs: int | None = None) -> Facts:
            requests = {"work": functools.partial(work, logprobs), "special": special}.get(name, structured)()
            found = zip(*requests, strict=True)
            return [facts(generate(llm, [prompt], [params]))[0] for prompt, params in found]

        yield run


@pytest.mark.parametrize("run", RUNS)
def test_tokens(engine_of, alone, run):
    llm = engine_of(run)
    before = llm.get_stats()
    assert facts(generate(llm, *work())) == alone("work")
    after = llm.get_stats()
    replayed, eager, prefills = (
        getattr(after, name) - getattr(before, name)
        for name in ("num_graph_steps", "num_eager_steps", "num_prefill_steps")
    )
    if RUNS[run].get("enforce_eager"):
        assert replayed == 0 and eager > prefills
    else:
        assert replayed > 10 and eager == prefills
    if RUNS[run].get("num_draft_tokens") != 0:
        assert after.num_accepted > before.num_accepted, "drafts stood"


def test_one_at_a_time(engine_of, alone):
    """Batches change nothing: the same engine with one request at a time."""
    found = zip(*work(), strict=True)
    each = [facts(generate(engine_of("graphs"), [prompt], [params]))[0] for prompt, params in found]
    assert each == alone("work")


@pytest.mark.parametrize("run", ["graphs", "eager"])
def test_log_probabilities(engine_of, alone, run):
    assert facts(generate(engine_of(run), *work(2))) == alone("work", 2)


def test_products_in_fp8():
    """Graphs, drafts and batches change nothing with products in FP8 either."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("products in FP8 are for SM90")
    with make({**PLAIN, "fp8_products": True}) as llm:
        found = zip(*work(), strict=True)
        each = [facts(generate(llm, [prompt], [params]))[0] for prompt, params in found]
    with make({**GRAPHS, "fp8_products": True}) as llm:
        assert facts(generate(llm, *work())) == each


def test_chunks(alone):
    """Prompts in chunks of as many rows as a decode step has."""
    with make(GRAPHS, max_num_batched_tokens=NUM_SEQS * 6) as llm:
        assert facts(generate(llm, *work())) == alone("work")
        assert llm.get_stats().num_prefill_steps >= 200 // (NUM_SEQS * 6)


@pytest.mark.parametrize("run", ["graphs", "eager"])
def test_special_requests_wait_for_nothing(engine_of, alone, run):
    """Penalties, bias, bans, lists, prompts' scores; the guard is on and nobody opens it."""
    llm = engine_of(run)
    with mock.patch.object(type(llm.llm_engine._executor.queue), "waiting", side_effect=AssertionError):
        found = facts(generate(llm, *special()))
    assert found[:-1] == alone("special")[:-1]


def test_ratio_verification(engine_of):
    """Replayed or eager, its drafts and draws are the same."""
    replayed, eager = (facts(generate(engine_of(run), *special()))[-1] for run in ("graphs", "eager"))
    assert replayed == eager
    assert len(replayed[3][0][1]) == 12


@pytest.mark.parametrize("run", ["graphs", "eager"])
def test_grammars(engine_of, alone, run):
    pytest.importorskip("xgrammar")
    found = facts(generate(engine_of(run), *structured()))
    assert found == alone("structured")
    words = SHAPES["choice"]["schema"]
    assert found[4][3][0][2] in words
    assert re.fullmatch("(([a-z]{3,8} ){2,6}[0-9]{4}!)|(.{10,})", found[1][3][0][2], re.DOTALL)


def test_measured_sizes(engine_of):
    """Those that are worth it, of the candidates; each kept one has its graphs."""
    graphs = engine_of("graphs of measured sizes").llm_engine.model_runner.graphs
    rows = list(graphs.sizes.rows)
    assert rows[-1] == NUM_SEQS * 6 and set(rows) <= set(candidate_sizes(NUM_SEQS * 6))
    assert {size for size, _ in graphs._forwards} == set(rows) == set(graphs._samples)
    assert set(graphs._proposals) == set(candidate_sizes(NUM_SEQS))


@pytest.mark.parametrize("run", ["graphs", "graphs of measured sizes"])
def test_the_plan_has_room_for_the_graphs(engine_of, run):
    """Measured around the capture; the plan leaves a part for the driver."""
    engine = engine_of(run).llm_engine
    taken, planned = engine.model_runner.graphs.num_bytes, engine.memory_plan["graphs"].num_bytes
    print(f"{run}: {taken / 2**20:.1f} MiB taken, {planned / 2**20:.1f} planned")
    assert 0 < taken <= planned


def test_a_hidden_wait_is_an_error(alone):
    def wait(logits: torch.Tensor) -> None:
        logits.sum().item()

    with make({"enforce_eager": True, "num_draft_tokens": 0}) as llm:
        llm.llm_engine.model_runner.watch_logits(wait)
        with pytest.raises(RuntimeError, match="synchronizing"):
            llm.generate(*work(), use_tqdm=False)
    with make({"enforce_eager": True, "num_draft_tokens": 0, "disable_sync_guard": True}) as llm:
        llm.llm_engine.model_runner.watch_logits(wait)
        assert facts(generate(llm, *work())) == alone("work")


def test_a_graph_without_room_says_what_to_lower():
    """Nothing is left for this process when the first graph is captured."""
    from deepinfer.platform.nvidia import CudaQueue

    plain = CudaQueue.capture

    def capture(queue: CudaQueue) -> Any:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(queue.device).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        return plain(queue)

    try:
        with (
            mock.patch.object(CudaQueue, "capture", capture),
            pytest.raises(GraphMemoryError, match=r"a forward of 48 rows.*DEEPINFER_CUDAGRAPH_BATCH"),
        ):
            make(GRAPHS)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with make(GRAPHS) as llm:
        assert len(generate(llm, *work())) == NUM_SEQS


@pytest.mark.parametrize("run", ["graphs", "eager"])
def test_kernels_of_a_step(engine_of, run):
    """A prefill and decode steps launch our programs and copies, no kernel of torch's own."""
    from torch.profiler import ProfilerActivity, profile

    ours = {f"{factory.symbol}_kernel" for factory in factories("sm_90a")}
    engine = engine_of(run).llm_engine
    before = engine.get_stats()
    for row, (prompt, params) in enumerate(zip(*work(), strict=True)):
        engine.add_request(str(row), prompt, params)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            engine.step()
        torch.cuda.synchronize()
    after = engine.get_stats()
    while engine.has_unfinished_requests():
        engine.step()
    engine.settle()
    assert 0 < after.num_prefill_steps - before.num_prefill_steps < 4
    kernels = Counter(
        event.name
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(
            ("Memcpy", "memcpy")
        )  # "memcpy32_post": the driver's, of a graph's copy
    )
    assert sum(kernels.values()) > 500
    assert set(kernels) <= ours, set(kernels) - ours
