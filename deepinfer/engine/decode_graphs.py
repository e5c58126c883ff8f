"""Builds the graphs of decode steps: which sizes, and how long those take."""

from __future__ import annotations

import time

from deepinfer.config import SchedulerConfig
from deepinfer.models.base import Drafter, Model
from deepinfer.platform.base import DeviceQueue
from deepinfer.runtime.caches import Caches
from deepinfer.runtime.graph_sizes import candidate_sizes, context_bounds, spaced_sizes
from deepinfer.runtime.graphs import DecodeGraphs, GraphSizes
from deepinfer.runtime.model_runner import rows_at_once
from deepinfer.runtime.synthetic_step import synthetic_batch
from deepinfer.sampling.confidence import ConfidenceScale
from deepinfer.sampling.sampler import Sampler
from deepinfer.settings import Settings
from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

NUM_ROUNDS = 3  # replays of a size, of which the fastest counts
CONTEXT_TOKENS = 128  # of each measured sequence


def graph_sizes(settings: Settings, scheduler: SchedulerConfig, has_drafter: bool) -> GraphSizes:
    """What is captured for an engine; of rows that nobody chose, candidates."""
    most_rows = scheduler.max_num_seqs * (1 + scheduler.num_draft_tokens)
    interval = settings.graph_interval
    rows = candidate_sizes(most_rows) if interval is None else spaced_sizes(most_rows, interval)
    drafting: list[int] = []
    if has_drafter and not settings.draft_enforce_eager:
        interval, most = settings.draft_graph_interval, scheduler.max_num_seqs
        drafting = candidate_sizes(most) if interval is None else spaced_sizes(most, interval)
    bounds = context_bounds(scheduler.max_model_len)
    is_chosen = settings.graph_interval is not None
    return GraphSizes(rows, bounds, drafting, is_chosen, is_lazy=settings.graphs_on_demand)


def build_graphs(
    sizes: GraphSizes,
    queue: DeviceQueue,
    model: Model,
    drafter: Drafter | None,
    caches: Caches,
    sampler: Sampler,
    scheduler: SchedulerConfig,
    confidence_scale: ConfidenceScale,
    eos_token_id: int,
) -> DecodeGraphs:
    """Capture decode steps of some sizes, while nothing runs.

    Raises:
        GraphMemoryError: the device's memory does not suffice.
    """
    graphs = DecodeGraphs(
        model,
        drafter,
        caches,
        sampler,
        confidence_scale=confidence_scale,
        eos_token_id=eos_token_id,
        num_draft_tokens=scheduler.num_draft_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        rows_at_once=rows_at_once(model.spec.vocab_size, queue.device.type),
        capture=queue.capture(),
        sizes=sizes,
    )

    def measure(num_rows: int) -> float:
        batch = synthetic_batch(
            _num_seqs(num_rows, scheduler.max_num_seqs),
            num_rows,
            min(CONTEXT_TOKENS, scheduler.max_model_len - scheduler.num_draft_tokens - 1),
            num_blocks=caches.blocks.shape[0],
            num_slots=caches.slots.shape[0],
            block_size=caches.layout.block_size,
            max_ngram=model.spec.max_ngram,
            vocab_size=model.spec.vocab_size,
            device=caches.slots.device,
        )
        times = []
        for _ in range(NUM_ROUNDS):
            queue.drain()
            start = time.perf_counter()
            with queue.launching():
                graphs.forward(batch)
            queue.drain()
            times.append(1e3 * (time.perf_counter() - start))
        return min(times)

    before = queue.used_bytes()
    graphs.build(measure)
    graphs.num_bytes = queue.used_bytes() - before
    logger.info("the graphs took %.1f MiB", graphs.num_bytes / (1 << 20))
    caches.counters.reset()
    return graphs


def _num_seqs(num_rows: int, max_num_seqs: int) -> int:
    """Sequences of equal length with so many rows together, as many as may be."""
    return next(n for n in range(min(num_rows, max_num_seqs), 0, -1) if num_rows % n == 0)
