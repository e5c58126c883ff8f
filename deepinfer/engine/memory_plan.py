"""MemoryPlan: what an engine allocates and why, how many blocks fit, and what would fit where they do not.

Plain arithmetic on bytes; nothing here allocates. `EngineArgs.resolve_cache` asks how many blocks fit, the
engine logs the plan once when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.config import CacheConfig, SchedulerConfig
from deepinfer.models.base import ModelSpec
from deepinfer.runtime.cache_layout import CacheLayout
from deepinfer.runtime.graphs import GraphSizes
from deepinfer.runtime.model_runner import logits_bytes

MIB = 1 << 20
GRAPH_BYTES = 8 * MIB  # of a captured part's launches, at most, in the driver


@dataclass(frozen=True)
class RankBudget:
    """What one device has for the cache pools.

    Attributes:
        cache_bytes: memory left for both pools; may be negative.
        block_bytes: of one paged block.
        slot_bytes: of one state slot.
    """

    rank: int
    cache_bytes: int
    block_bytes: int
    slot_bytes: int

    def num_blocks(self, num_slots: int) -> int:
        """Blocks that fit beside the slots; negative when the slots do not fit."""
        return (self.cache_bytes - num_slots * self.slot_bytes) // max(self.block_bytes, 1)


def poorest(budgets: Sequence[RankBudget], num_slots: int) -> RankBudget:
    """The rank with the fewest blocks, the first of equals.

    All ranks run the same plan, and none may have less than the scheduler hands out: the minimum counts, not
    the mean.
    """
    if not budgets:
        raise ValueError("a plan needs the budget of at least one rank")
    return min(budgets, key=lambda budget: budget.num_blocks(num_slots))


@dataclass(frozen=True)
class CacheDemand:
    """What requests need.

    Attributes:
        max_model_len: tokens of the longest request.
        max_num_seqs: requests at once.
        slots_ratio: state slots for each of them.
        block_size: tokens of a block.
    """

    max_model_len: int
    max_num_seqs: int
    slots_ratio: float
    block_size: int

    @property
    def blocks_per_seq(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_slots(self) -> int:
        """Usable slots and the reserved one."""
        return slots_for(self.max_num_seqs, self.slots_ratio)


def slots_for(max_num_seqs: int, ratio: float) -> int:
    """State slots of a pool, the reserved first one included."""
    return int(max_num_seqs * ratio) + 1


def blocks_to_allocate(budgets: Sequence[RankBudget], demand: CacheDemand) -> int:
    """Blocks that every rank allocates: as many as all requests could fill, or as the poorest rank can hold.

    Raises:
        ValueError: not even one request of `max_model_len` fits, with the numbers that would.
    """
    budget = poorest(budgets, demand.num_slots)
    room = budget.num_blocks(demand.num_slots)
    if room < demand.blocks_per_seq:
        rank = f"rank {budget.rank}: " if len(budgets) > 1 else ""
        raise ValueError(
            f"{rank}{max(room, 0)} usable cache blocks of {demand.block_size} tokens cannot hold one request "
            f"of max_model_len={demand.max_model_len}, which takes {demand.blocks_per_seq} blocks of "
            f"{budget.block_bytes} bytes beside {demand.num_slots} state slots of {budget.slot_bytes} bytes "
            f"for max_num_seqs={demand.max_num_seqs}; {max(budget.cache_bytes, 0)} bytes are there for them: "
            f"{what_fits(budget, demand)}"
        )
    return min(demand.max_num_seqs * demand.blocks_per_seq, room)


def what_fits(budget: RankBudget, demand: CacheDemand) -> str:
    """Advice with numbers: each one alone makes the demand fit."""
    advice = []
    longest = budget.num_blocks(demand.num_slots) * demand.block_size
    if longest > 0:
        advice.append(f"lower max_model_len to {longest}")
    most = most_seqs(budget, demand)
    if most > 0:
        advice.append(f"lower max_num_seqs to {most}")
    needed = demand.num_slots * budget.slot_bytes + demand.blocks_per_seq * budget.block_bytes
    if not advice:
        one = RankBudget(0, budget.cache_bytes, budget.block_bytes, budget.slot_bytes)
        longest = one.num_blocks(slots_for(1, demand.slots_ratio)) * demand.block_size
        if longest > 0:
            advice.append(f"lower max_num_seqs to 1 and max_model_len to {longest}")
    advice.append(
        f"give the caches {needed} bytes (cache_bytes, or {needed - budget.cache_bytes} bytes more by a "
        "higher gpu_memory_utilization)"
    )
    return ", or ".join(advice)


def most_seqs(budget: RankBudget, demand: CacheDemand) -> int:
    """Most requests at once whose slots leave room for one request of the full length; 0 when none does."""
    room = budget.cache_bytes - demand.blocks_per_seq * budget.block_bytes
    low, high = 0, demand.max_num_seqs  # low fits, or is 0
    while low < high:
        middle = (low + high + 1) // 2
        if slots_for(middle, demand.slots_ratio) * budget.slot_bytes <= room:
            low = middle
        else:
            high = middle - 1
    return low


def workspace_bytes(spec: ModelSpec, num_rows: int, itemsize: int, device_type: str = "cpu") -> int:
    """About what a step of so many rows holds at once: activations, scratch, and two copies of its logits."""
    logits = min(logits_bytes(device_type), 4 * spec.vocab_size * num_rows)
    return num_rows * spec.values_per_row * itemsize + spec.scratch_bytes + 2 * logits


def graph_bytes(
    spec: ModelSpec, scheduler: SchedulerConfig, sizes: GraphSizes, itemsize: int, device_type: str
) -> int:
    """About what captured decode steps keep: their pool, as large as the largest of them needs, and launches.

    Nobody else can use the pool, so it comes on top of the workspace. Graphs run one after the other and
    share it.
    """
    rows = max(sizes.rows[-1], scheduler.max_num_seqs * spec.draft_block_size if sizes.drafting else 0)
    count = len(sizes.rows) * (len(sizes.bounds) + 1) + len(sizes.drafting)
    return workspace_bytes(spec, rows, itemsize, device_type) + count * GRAPH_BYTES


@dataclass(frozen=True)
class MemoryItem:
    """One allocation, or the most that a step holds at once; on a GPU some stay on the host."""

    name: str
    num_bytes: int
    why: str
    on_host: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine holds on one device and on the host.

    Attributes:
        limit: bytes that the items may take, None where nobody set one.
        items: in the order in which they are allocated.
        of_gpu: the limit is that of a GPU, where items on the host do not count.
    """

    limit: int | None
    items: tuple[MemoryItem, ...]
    of_gpu: bool = False

    @property
    def num_bytes(self) -> int:
        """All items that count."""
        return sum(item.num_bytes for item in self.items if not (self.of_gpu and item.on_host))

    def __getitem__(self, name: str) -> MemoryItem:
        """The item of that name."""
        return next(item for item in self.items if item.name == name)

    def text(self) -> str:
        """A table, in MiB."""
        width = max(len(item.name) for item in self.items)
        lines = []
        for item in self.items:
            place = "on the host: " if self.of_gpu and item.on_host else ""
            lines.append(f"{item.name:<{width}} {item.num_bytes / MIB:>10.1f} MiB  {place}{item.why}")
        limit = "" if self.limit is None else f"  of {self.limit / MIB:.1f} MiB"
        return "\n".join([*lines, f"{'together':<{width}} {self.num_bytes / MIB:>10.1f} MiB{limit}"])


def plan_fixed(
    spec: ModelSpec,
    scheduler: SchedulerConfig,
    weights: int,
    itemsize: int,
    swap_bytes: int = 0,
    device_type: str = "cpu",
    graphs: GraphSizes | None = None,
) -> tuple[MemoryItem, ...]:
    """What is held beside the caches; the caches get what this leaves.

    Args:
        spec: the model.
        scheduler: limits of a step.
        weights: bytes of the weights.
        itemsize: bytes of an activation.
        swap_bytes: host memory for preempted sequences.
        device_type: "cpu" or "cuda".
        graphs: decode steps that are captured; None for none.
    """
    rows, drafts = scheduler.max_num_batched_tokens, scheduler.num_draft_tokens
    items = [
        MemoryItem("weights", weights, "backbone, head and tables" + (", drafter" if drafts else "")),
        MemoryItem(
            "workspace",
            workspace_bytes(spec, rows, itemsize, device_type),
            f"a step of {rows} rows, about; while it runs",
        ),
    ]
    if graphs is not None:
        num_bytes = graph_bytes(spec, scheduler, graphs, itemsize, device_type)
        items.append(
            MemoryItem("graphs", num_bytes, f"decode steps of up to {graphs.rows[-1]} rows, captured, about")
        )
    if drafts:
        scores = 4 * scheduler.max_num_seqs * drafts * spec.vocab_size
        items.append(
            MemoryItem("draft scores", scores, "with the first request that is verified by ratio; not before")
        )
    tokens = 4 * scheduler.max_num_seqs * scheduler.max_model_len
    inputs = 4 * rows * (6 + spec.max_ngram)
    items.append(
        MemoryItem("host pools", tokens + inputs, "token ids of the requests, inputs of a step", True)
    )
    if swap_bytes:
        items.append(MemoryItem("swap space", swap_bytes, "host copies of preempted requests, at most", True))
    return tuple(items)


def plan_caches(
    layout: CacheLayout, cache: CacheConfig, scheduler: SchedulerConfig
) -> tuple[MemoryItem, ...]:
    """Both cache pools."""
    wanted = scheduler.max_num_seqs * -(-scheduler.max_model_len // cache.block_size)
    reason = "every request at full length" if cache.num_blocks > wanted else "what fits"
    return (
        MemoryItem(
            "cache blocks",
            cache.num_blocks * layout.block_bytes,
            f"{cache.num_blocks} of {layout.block_bytes} bytes for {cache.block_size} tokens each: {reason}",
        ),
        MemoryItem(
            "state slots",
            cache.num_state_slots * layout.slot_bytes,
            f"{cache.num_state_slots} of {layout.slot_bytes} bytes for {scheduler.max_num_seqs} requests"
            + (f" and {cache.num_prefix_states} states of prefixes" if cache.num_prefix_states else ""),
        ),
    )
