"""What an engine allocates: how many blocks fit, which numbers an error names, what the plan says."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from deepinfer.engine import arg_utils, parts
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.memory_plan import (
    GRAPH_BYTES,
    CacheDemand,
    MemoryItem,
    MemoryPlan,
    RankBudget,
    blocks_to_allocate,
    most_seqs,
    poorest,
    slots_for,
    workspace_bytes,
)
from deepinfer.runtime.memory import held_bytes
from deepinfer.settings import Settings
from tests.support.engines import generate, greedy, make_llm, prompt_of
from tests.support.fake_queue import FakeQueue, fake_device

DEMAND = CacheDemand(
    max_model_len=1000, max_num_seqs=10, slots_ratio=1.2, block_size=128
)  # 8 blocks, 13 slots


def budget(cache_bytes: int, rank: int = 0) -> RankBudget:
    return RankBudget(rank, cache_bytes, block_bytes=1000, slot_bytes=500)


def bytes_for(num_blocks: int, num_slots: int = 13) -> int:
    return num_blocks * 1000 + num_slots * 500


# Ranks


def test_a_gpu_does_not_hold_what_stays_on_the_host() -> None:
    items = (MemoryItem("a", 5, "x"), MemoryItem("b", 7, "y", on_host=True))
    assert MemoryPlan(None, items).num_bytes == 12
    plan = MemoryPlan(None, items, of_gpu=True)
    assert plan.num_bytes == 5 and "on the host: y" in plan.text()


def test_the_minimum_over_ranks_counts():
    """The mean of 40, 12 and 38 blocks would be 30, which rank 1 does not have."""
    ranks = [budget(bytes_for(blocks), rank) for rank, blocks in enumerate((40, 12, 38))]
    assert poorest(ranks, 13).rank == 1
    assert blocks_to_allocate(ranks, DEMAND) == 12
    assert all(rank.num_blocks(13) >= 12 for rank in ranks)
    assert blocks_to_allocate(ranks[:1], DEMAND) == 40


def test_no_more_than_all_requests_can_fill():
    assert blocks_to_allocate([budget(10**9), budget(10**8, 1)], DEMAND) == 80


def test_ranks_with_other_layouts():
    """What is poor depends on the sizes, not on the bytes."""
    ranks = [RankBudget(0, 100_000, 4000, 500), RankBudget(1, 50_000, 1000, 500)]
    assert poorest(ranks, 13).rank == 0 and blocks_to_allocate(ranks, DEMAND) == (100_000 - 6500) // 4000


def test_an_error_names_the_rank():
    with pytest.raises(ValueError, match=r"^rank 1: 7 usable cache blocks .* lower max_model_len to 896, or"):
        blocks_to_allocate([budget(bytes_for(40)), budget(bytes_for(7), 1)], DEMAND)
    with pytest.raises(ValueError, match="at least one rank"):
        blocks_to_allocate([], DEMAND)


# Numbers that would fit


@pytest.mark.parametrize("spare", [0, 1, 499, 500, 999])
@pytest.mark.parametrize("blocks", [-5, 0, 1, 7])
def test_every_piece_of_advice_fits_and_no_more_does(blocks: int, spare: int):
    room = budget(bytes_for(blocks) + spare)
    with pytest.raises(ValueError, match="usable cache blocks") as error:
        blocks_to_allocate([room], DEMAND)
    text = str(error.value)
    if found := re.search(r"lower max_model_len to (\d+)", text):
        fits = int(found[1])
        assert blocks_to_allocate([room], dataclasses.replace(DEMAND, max_model_len=fits)) == fits // 128
        with pytest.raises(ValueError, match="usable"):
            blocks_to_allocate([room], dataclasses.replace(DEMAND, max_model_len=fits + 1))
    if found := re.search(r"lower max_num_seqs to (\d+)(?!\d| and)", text):
        fits = int(found[1])
        fewer = dataclasses.replace(DEMAND, max_num_seqs=fits)
        assert blocks_to_allocate([room], fewer) >= 8
        with pytest.raises(ValueError, match="usable"):
            blocks_to_allocate([room], dataclasses.replace(DEMAND, max_num_seqs=fits + 1))
    needed = int(re.search(r"give the caches (\d+) bytes", text)[1])
    assert blocks_to_allocate([budget(needed)], DEMAND) == 8
    with pytest.raises(ValueError, match="usable"):
        blocks_to_allocate([budget(needed - 1)], DEMAND)
    more = int(re.search(r"or (\d+) bytes more", text)[1])
    assert room.cache_bytes + more == needed


def test_neither_alone_would_do():
    """Ten requests need 6,500 bytes of slots, one of full length 8,000 of blocks; 4,000 are there."""
    with pytest.raises(ValueError, match="lower max_num_seqs to 1 and max_model_len to 384, or give"):
        blocks_to_allocate([budget(4000)], DEMAND)
    with pytest.raises(ValueError, match=r"are there for them: give the caches 14500 bytes"):
        blocks_to_allocate([budget(900)], DEMAND)


def test_most_requests_is_the_largest_that_fits():
    for cache_bytes in range(7000, 16000, 250):
        room = cache_bytes - 8000
        expected = max((n for n in range(11) if slots_for(n, 1.2) * 500 <= room), default=0)
        assert most_seqs(budget(cache_bytes), DEMAND) == expected


def resolve(memory: int, used: int = 0, **options):
    options = {"enable_prefix_caching": False, **options}
    args = EngineArgs("m", max_num_seqs=10, max_model_len=1000, **options)
    scheduler = args.resolve_scheduler(Settings(), 4096, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arg_utils, "_physical_memory", lambda: memory)
        return args.resolve_cache(scheduler, Settings(), 1000, 500, 6, used)


def test_a_share_of_the_memory_is_for_everything():
    assert resolve(100_000, 20_000, gpu_memory_utilization=0.5).num_blocks == (30_000 - 6500) // 1000 + 1
    assert resolve(100_000, 20_000, gpu_memory_utilization=1.0).num_blocks == (80_000 - 6500) // 1000 + 1
    assert resolve(10**9, 20_000, gpu_memory_utilization=0.9).num_blocks == 81
    assert resolve(100_000, 20_000).num_blocks == (25_000 - 6500) // 1000 + 1, "a quarter for the caches"
    both = resolve(100_000, 20_000, gpu_memory_utilization=0.5, cache_bytes=16_000)
    assert both.num_blocks == (16_000 - 6500) // 1000 + 1, "cache_bytes overrides"


def test_too_small_a_share():
    with pytest.raises(ValueError, match=r"is 10000 bytes, .* alone take 20000: raise it above 0\.200"):
        resolve(100_000, 20_000, gpu_memory_utilization=0.1)
    with pytest.raises(ValueError, match="to 384, or lower max_num_seqs to 3, or give the caches 14500"):
        resolve(100_000, 20_000, gpu_memory_utilization=0.3)


def test_a_given_number_of_blocks():
    with pytest.raises(
        ValueError, match=r"num_blocks=8: 7 usable .* raise it to 9, or lower max_model_len to 896"
    ):
        resolve(100_000, num_blocks=8)
    assert resolve(100_000, num_blocks=9).num_blocks == 9


@pytest.mark.parametrize("share", [0, -0.1, 1.01, True, "0.9", float("nan")])
def test_shares_that_make_no_sense(share):
    with pytest.raises(
        ValueError, match=r"gpu_memory_utilization=.*: expected a number above 0 and at most 1"
    ):
        EngineArgs("m", gpu_memory_utilization=share)


# The plan


def test_text_and_sum():
    plan = MemoryPlan(
        10 << 20, (MemoryItem("weights", 3 << 20, "read"), MemoryItem("slots", 1 << 20, "state"))
    )
    assert plan.num_bytes == 4 << 20 and plan["slots"].why == "state"
    assert plan.text().splitlines()[-1].split() == "together 4.0 MiB of 10.0 MiB".split()


def test_shared_tensors_count_once():
    @dataclasses.dataclass
    class Part:
        weight: torch.Tensor
        rest: object = None

    table = torch.zeros(10, 4)
    assert held_bytes(Part(table, [table[2:], {"a": torch.zeros(3)}]), (table,)) == 160 + 12


def test_an_engine_says_once_what_it_holds(monkeypatch: pytest.MonkeyPatch):
    said = []
    monkeypatch.setattr(parts.logger, "info", lambda text, *values: said.append(text % values))
    with make_llm(max_num_seqs=4, swap_space=0.25) as llm:
        generate(llm, [list(prompt_of(20))], greedy(3))
        plan, runner = llm.llm_engine.memory_plan, llm.llm_engine.model_runner
        assert plan["cache blocks"].num_bytes == runner._caches.blocks.nbytes
        assert plan["state slots"].num_bytes == runner._caches.slots.nbytes
        assert plan["weights"].num_bytes == held_bytes(runner._model, runner._drafter) > 10**7
        assert plan["draft scores"].num_bytes == 4 * 4 * 5 * runner._model.spec.vocab_size
        assert plan["workspace"].num_bytes > 0 and plan["swap space"].num_bytes == 1 << 28
        assert plan["host pools"].num_bytes >= 4 * 4 * 1024  # token ids of four requests
        assert all(item.why for item in plan.items)
        assert plan.limit is None and plan.num_bytes == sum(item.num_bytes for item in plan.items)
    assert said == ["memory plan\n" + plan.text()]


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        ({"cache_bytes": 6_000_000, "max_num_seqs": 8}, "lower max_num_seqs to"),
        ({"cache_bytes": 8_500_000, "max_num_seqs": 8, "max_model_len": 4096}, "lower max_model_len to"),
    ],
)
def test_advice_works_in_an_engine(limits, advice):
    with pytest.raises(ValueError, match=advice) as error:
        make_llm(**limits)
    name, value = re.search(
        r"lower (\w+) to (\d+)", str(error.value)[str(error.value).index(advice) :]
    ).groups()
    make_llm(**{**limits, name: int(value)}).close()


def test_captured_steps_have_a_place_of_their_own() -> None:
    """Their pool is nobody else's: the caches of a GPU get what it leaves."""
    queue = FakeQueue()
    with fake_device(queue), make_llm(max_num_seqs=4, settings=Settings(graph_interval=8)) as llm:
        engine = llm.llm_engine
        graphs, sizes = engine.memory_plan["graphs"], engine.model_runner.graphs.sizes
        spec = engine.model_runner._model.spec
        most = workspace_bytes(spec, 4 * (1 + engine.scheduler_config.num_draft_tokens), 4)
        count = sum(name.startswith(("a forward", "sampling", "drafts")) for name in queue.captured)
        assert list(sizes.rows) == [1, 2, 4, 8, 16, 24] and f"up to {sizes.rows[-1]} rows" in graphs.why
        assert graphs.num_bytes == most + count * GRAPH_BYTES
        assert engine.memory_plan.num_bytes == sum(item.num_bytes for item in engine.memory_plan.items)
    for settings in (Settings(enforce_eager=True), Settings(num_draft_tokens=0, enforce_eager=True)):
        with fake_device(FakeQueue()), make_llm(max_num_seqs=4, settings=settings) as llm:
            assert all(item.name != "graphs" for item in llm.llm_engine.memory_plan.items)
