"""What steps launch on a GPU: programs that are built ahead of time, and copies; no kernel of torch's own.

Listed without a GPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.config import ARITHMETICS, ReplayMode
from deepinfer.models.deepseek_v41.dspark import Drafter
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.runtime.async_batch import NgramVocab, Remap
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.cache_layout import CacheLayout
from deepinfer.runtime.caches import Caches
from deepinfer.runtime.graphs import DecodeGraphs, GraphSizes
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.synthetic_step import synthetic_batch, synthetic_inputs
from deepinfer.sampling.confidence import ConfidenceScale
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.sampler import Sampler
from tests.support.forward_harness import ForwardHarness
from tests.support.launch_list import META, Launches, listed, on_meta
from tests.support.models import fold_map, load_config
from tests.support.paths import MODELS
from tilelang_ops.build import programs
from tilelang_ops.common.sizes import ModelSizes

SEQS, DRAFTS, CONTEXT = 8, 3, 1000
ROWS = SEQS * (1 + DRAFTS)


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=META)


@pytest.fixture(scope="module", params=[False, True], ids=["bfloat16", "fp8_products"])
def models(request: pytest.FixtureRequest) -> tuple[DeepseekV41Model, DeepseekV41Model, Drafter]:
    """The packed model on the CPU, and it and its drafter on "meta"."""
    config = load_config("v41-tiny")
    arithmetic = dataclasses.replace(ARITHMETICS["w8a8"], fp8_products=request.param)
    with CheckpointReader(MODELS["v41-tiny"]) as reader:
        weights = Weights(reader, is_packed=True, takes_codes=request.param)
        model = DeepseekV41Model.load(weights, config, arithmetic)
        drafter = Drafter.load(weights, config, arithmetic, model)
    done: dict[int, object] = {}
    moved = on_meta(model, done), on_meta(drafter, done)
    with listed():
        moved[0].reserve(2 * CONTEXT)
        _ = moved[1]._confidence_vectors
    return model, *moved


@pytest.fixture
def runner(models: tuple[DeepseekV41Model, DeepseekV41Model, Drafter]) -> ModelRunner:
    _, model, drafter = models
    spec = model.spec
    layout = CacheLayout.build(spec, release=True, block_size=128, max_backtracking=6)
    return ModelRunner(
        model,
        drafter,
        Caches(layout, 64, SEQS + 1, META),
        Sampler(spec.vocab_size, banned_token_ids=(3, 7), device=META, fused=True),
        num_draft_tokens=DRAFTS,
        max_num_seqs=SEQS,
        confidence_scale=ConfidenceScale.of([1.0] * DRAFTS).to(META),
        eos_token_id=1,
        ngram_vocab=NgramVocab(zeros(spec.vocab_size), zeros(spec.vocab_size, dtype=torch.bool), 0),
        is_queued=True,
    )


def capture_in(runner: ModelRunner) -> None:
    """Give a runner graphs, which run their launches again where a device would replay them."""
    graphs = DecodeGraphs(
        runner._model,
        runner._drafter,
        runner._caches,
        runner._sampler,
        confidence_scale=runner._confidence_scale,
        eos_token_id=1,
        num_draft_tokens=DRAFTS,
        max_num_seqs=SEQS,
        rows_at_once=ROWS // 2 + 1,
        capture=lambda work, name: work() or work,
        sizes=GraphSizes([ROWS], [2 * CONTEXT], [SEQS]),
    )
    graphs.build()
    runner.graphs = graphs


def decode_step(runner: ModelRunner, remap: Remap | None, num_drafting: int = SEQS) -> Launches:
    pools, spec = runner._caches, runner._model.spec
    batch = synthetic_batch(
        SEQS,
        ROWS,
        CONTEXT,
        num_blocks=pools.blocks.shape[0],
        num_slots=pools.slots.shape[0],
        block_size=128,
        max_ngram=spec.max_ngram,
        vocab_size=spec.vocab_size,
        device=META,
    )
    return step(runner, batch, remap, synthetic_inputs(SEQS, ROWS, CONTEXT, META), num_drafting)


def step(
    runner: ModelRunner, batch: Batch, remap: Remap | None, inputs: SamplingInputs, num_drafting: int
) -> Launches:
    with listed() as launches:
        runner.prepare(batch, remap)
        runner.forward()
        runner.sample(inputs, num_drafting)
    return launches


def planned_behind(runner: ModelRunner, *, is_dealt: bool) -> Remap:
    """Of a step that was planned while another one ran, its rows dealt anew or not."""
    history = zeros(SEQS, runner._model.spec.max_ngram - 1)
    odds = (zeros(SEQS), torch.zeros(DRAFTS, device=META)) if is_dealt else (None, None)
    return Remap(zeros(SEQS), zeros(SEQS), history, *odds)


@cache
def built_ahead() -> set[str]:
    """What `python -m tilelang_ops.build` compiles for the model."""
    config = json.loads((MODELS["v41-tiny"] / "config.json").read_text())
    return {str(program) for program in programs("sm_90a", ModelSizes.from_config(config))}


def is_for_float_weights(program: str) -> bool:
    """For a layer whose weights this checkpoint has in float32 and the release in bfloat16."""
    parts = ("gemm.linear(columns=3072", "gemm.linear(columns=1536", "gemm.linear.sum_parts(")
    return program.startswith(parts) or "weight_dtype=float32" in program


def check(launches: Launches, most_copies: int) -> None:
    assert launches.of_torch == []
    unexpected = launches.with_sizes - built_ahead()
    assert [program for program in sorted(unexpected) if not is_for_float_weights(program)] == []
    assert launches.num_copies <= most_copies
    assert len(launches.programs) > 150


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_decode_steps(runner: ModelRunner, with_graphs: bool) -> None:
    if with_graphs:
        with listed():
            capture_in(runner)
    for is_dealt in (None, False, True):
        remap = None if is_dealt is None else planned_behind(runner, is_dealt=is_dealt)
        launches = decode_step(runner, remap)
        check(launches, 8)
        assert ("step_inputs.correct_rows" in launches.programs) == (remap is not None)
        assert ("step_inputs.deal_rows" in launches.programs) == bool(is_dealt)
        assert ("step_inputs.pad_inputs" in launches.programs) == with_graphs
    assert (runner.num_graph_steps, runner.num_eager_steps) == ((3, 0) if with_graphs else (0, 3))
    for num_drafting in (SEQS - 2, 0):
        check(decode_step(runner, planned_behind(runner, is_dealt=False), num_drafting), 8)


def prefill_step(
    runner: ModelRunner,
    model: DeepseekV41Model,
    chunks: Sequence[tuple[int, int]],
    replay: ReplayMode,
    has_image: bool,
) -> Launches:
    """Sequences of (tokens, rows of the step)."""
    ids = [model.config.image_token_id if has_image and t % 50 < 9 else 20 for t in range(CONTEXT)]
    harness = ForwardHarness(model, fold_map("v41-tiny"), max_tokens=2048, replay=replay)
    seqs = [harness.add(ids[:count], window_start=max(0, count - 140)) for count, _ in chunks]
    on_cpu = harness.batch([(seq, rows) for seq, (_, rows) in zip(seqs, chunks, strict=True)], "last")
    host = {name: getattr(on_cpu, name) for name in Batch.tensor_names()}
    batch = dataclasses.replace(
        on_cpu,
        **{name: tensor.to(META) for name, tensor in host.items()},
        host=host,
        planned={name: tensor.numpy() for name, tensor in host.items()},
    )
    counts = [int(n == rows) for n, rows in chunks]
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    inputs = synthetic_inputs(max(1, sum(counts)), max(1, sum(counts)), CONTEXT, META)
    if not sum(counts):
        inputs = inputs.slice(0, 0)
    inputs = dataclasses.replace(
        inputs, row_offsets=offsets.to(META), host={**inputs.host, "row_offsets": offsets.numpy()}
    )
    return step(runner, batch, None, inputs, len(chunks))


@pytest.mark.parametrize(
    ("chunks", "replay", "has_image"),
    [
        ([(700, 700), (150, 150), (300, 200)], ReplayMode.OFF, False),
        ([(700, 700), (30, 30)], ReplayMode.COMPACT, True),
        ([(700, 300)], ReplayMode.OFF, False),
    ],
    ids=["several", "replay and images", "no token yet"],
)
def test_prefill_steps(
    models: tuple[DeepseekV41Model, ...],
    runner: ModelRunner,
    chunks: list[tuple[int, int]],
    replay: ReplayMode,
    has_image: bool,
) -> None:
    runner._caches.score_bytes = 100_000  # rows of the indexer in parts
    check(prefill_step(runner, models[0], chunks, replay, has_image), 200)


def test_what_the_list_sees() -> None:
    x, places = torch.zeros(4, 6, device=META), zeros(2)
    with listed() as launches:
        x.view(2, 12)[:, 1:].unsqueeze(0)
        torch.empty_like(x).copy_(x)
        assert (launches.of_torch, launches.num_copies) == ([], 1)
        torch.empty_like(x).t().copy_(x.t())
        x.float().add_(1)
        x.long()
        x[:, 1:].contiguous()
        x[places]
    assert [name.split()[0] for name in launches.of_torch] == "copy_ add_ _to_copy clone index".split()
