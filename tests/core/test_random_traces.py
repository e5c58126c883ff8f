"""Random traces of more than 100,000 operations: no block or slot is ever lost or shared, nobody starves."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from tests.core.harness import EOS, VOCAB, core, make_config

OPERATIONS_PER_TRACE = 25_000


class Trace:
    """Random operations on one engine; results are random tokens, drafts and faults."""

    def __init__(self, seed: int, **config: object):
        self.rng = random.Random(seed)
        self.random = np.random.default_rng(seed)
        self.config = make_config(**config)
        self.engine = core.EngineCore(self.config)
        self.change_price_of_drafts()
        self.plans: list = []
        self.live: list[int] = []
        self.done: list[int] = []
        self.prompts: list[np.ndarray] = []
        self.counts: Counter[str] = Counter()
        self.held: dict[int, int] = {}  # blocks of the sequences that are swapped out

    def change_price_of_drafts(self) -> None:
        """Step times by which drafts cost nothing, something, or more than they can bring."""
        if self.config.use_draft_budget:
            ms = self.rng.choice([0.0, 0.02, 0.05, 0.1, 20.0])
            points = [(n, n * rows, 1.0 + n * (rows - 1) * ms) for n in (1, 8) for rows in (1, 6)]
            self.engine.set_step_times(points, [(1, 0.99), (8, 0.99)])

    def add(self) -> None:
        rng = self.rng
        length = rng.choice([1, 8, rng.randint(1, 20), rng.randint(1, self.config.max_model_len - 1)])
        params = core.SequenceParams(
            max_tokens=rng.choice([1, 2, rng.randint(1, 40), -1]),
            min_tokens=rng.choice([0, 0, 2]),
            eos_token_id=EOS,
            ignore_eos=rng.random() < 0.3,
            needs_text=rng.random() < 0.2,
            num_logprobs=rng.choice([-1, -1, 1]),
            num_prompt_logprobs=rng.choice([-1, -1, -1, 0]),
            presence=rng.choice([0.0, 0.0, 0.5]),
            is_ratio=rng.random() < 0.3,
        )
        prompt = self.random.integers(0, VOCAB, length, np.int32)
        if self.config.prefix_caching:
            prompt = self.related(prompt)
        self.live.append(self.engine.add(params, prompt))

    def related(self, prompt: np.ndarray) -> np.ndarray:
        """Mostly a prompt that came before, or one that shares its beginning."""
        rng = self.rng
        if self.prompts and rng.random() < 0.8:
            older = rng.choice(self.prompts)
            if rng.random() < 0.4:
                prompt = older
            else:
                whole = np.concatenate([older[: rng.randint(0, len(older))], prompt])
                prompt = whole[: self.config.max_model_len - 1]
        self.prompts = [*self.prompts[-9:], prompt]
        return prompt

    def pick(self) -> int:
        return self.rng.choice(self.live)

    def schedule(self) -> None:
        most = 2 if self.config.async_scheduling else 1
        if len(self.plans) == most:
            self.commit()
        self.swap_in()
        kind = self.rng.choice([None, None, None, core.StepKind.DECODE, core.StepKind.PREFILL])
        plan = self.engine.schedule(kind)
        self.swap_out()
        self.counts["schedule"] += 1
        if plan is None:
            if kind is None and not self.plans and self.engine.num_unfinished > len(self.held):
                raise AssertionError("an idle engine has work that it does not schedule")
            return
        self.counts["prefill" if plan.is_prefill else "decode"] += 1
        self.counts["matched"] += plan.num_matched
        self.counts["snapshots"] += len(plan.state_copies) - len(plan.forked_ids)
        self.counts["partial"] += int((plan.num_sampled_rows == 0).sum())
        assert plan.num_rows <= self.config.max_num_batched_tokens
        assert plan.num_seqs <= self.config.max_num_seqs
        assert plan.seqlens_k.max() <= self.config.max_model_len
        layout = self.engine.batch_layout(plan)
        self.engine.fill_batch(plan, np.empty(layout.nbytes, np.uint8))
        if plan.can_redistribute:
            self.engine.set_seqlens_q(plan, self.deal(plan))
        self.plans.append(plan)

    def swap_in(self) -> None:
        self.swap_out()
        if self.rng.random() < 0.6:
            return
        for seq_id, blocks, slot in self.engine.admit_swapped():
            assert len(blocks) == self.held.pop(seq_id) and slot > 0
            self.counts["swapped in"] += 1

    def swap_out(self) -> None:
        outs, drops = self.engine.take_swaps()
        for seq_id, blocks, slot, num_scores in outs:
            assert slot > 0 and num_scores <= self.config.num_draft_tokens
            self.held[seq_id] = len(blocks)
            self.counts["swapped out"] += 1
            self.counts["scores"] += num_scores
        for seq_id in drops:
            del self.held[seq_id]

    def deal(self, plan) -> np.ndarray:
        """Rows of a plan dealt anew, within its limits."""
        lengths, limits, is_free = plan.seqlens_q, plan.max_seqlens_q, plan.remap >= 0
        for giver, taker in self.random.integers(0, plan.num_seqs, (8, 2)):
            if is_free[giver] and is_free[taker] and lengths[giver] > 1 and lengths[taker] < limits[taker]:
                lengths[giver] -= 1
                lengths[taker] += 1
        self.counts["dealt"] += int((lengths != plan.seqlens_q).any())
        return lengths

    def commit(self) -> None:
        if not self.plans:
            return
        plan = self.plans.pop(0)
        layout = self.engine.sampling_layout(plan)
        self.engine.fill_sampling(plan, np.empty(layout.nbytes, np.uint8))
        k, rows, seqs = self.config.num_draft_tokens, plan.num_samples, plan.num_seqs
        emitted = np.array([self.rng.randint(1, max(1, n)) for n in plan.num_sampled_rows], np.int32)
        self.counts["rejected"] += int((emitted < plan.num_sampled_rows).sum())
        faults = (self.random.random(rows) < 0.002).astype(np.uint8)
        drafts = self.random.integers(0, VOCAB, (seqs, k), np.int32)
        drafts[self.random.random((seqs, k)) < 0.1] = -1
        drafts[: seqs - plan.num_drafting] = -1
        wanted = max(0, plan.max_num_logprobs)
        result = self.engine.commit(
            plan,
            self.random.integers(0, VOCAB, rows, np.int32),
            num_emitted=emitted,
            logprobs=np.zeros(rows, np.float32),
            top_ids=np.zeros((rows, wanted), np.int32),
            top_logprobs=np.zeros((rows, wanted), np.float32),
            faults=faults,
            drafts=drafts if k and plan.num_drafting else None,
            confidences=self.random.random((seqs, k), np.float32) if k and plan.num_drafting else None,
        )
        if not plan.is_prefill:
            ms = self.engine.step_ms(plan.num_seqs, plan.num_rows)
            self.engine.add_step_time(plan.num_seqs, plan.num_rows, 1e-3 + ms * self.rng.uniform(0.8, 1.2))
        self.counts["commit"] += 1
        self.counts["finished"] += len(result.finished_ids)

    def sweep(self) -> None:
        """Releases what has finished."""
        finished = [i for i in self.live if self.engine.status(i) == core.SequenceStatus.FINISHED]
        self.live = [i for i in self.live if i not in set(finished)]
        for seq_id in finished:
            assert self.engine.finish_reason(seq_id) != core.FinishReason.NONE
            self.engine.release(seq_id)
            with pytest.raises(KeyError):
                self.engine.status(seq_id)

    def operate(self) -> None:
        choice = self.rng.random()
        if choice < 0.10 and len(self.live) < 40:
            self.add()
        elif choice < 0.13 and self.live:
            self.counts["abort"] += self.engine.abort(self.pick())
        elif choice < 0.17 and self.live:
            self.counts["preempt"] += self.engine.preempt(self.pick())
        elif choice < 0.18 and self.live:
            seq_id = self.pick()
            self.engine.stop(seq_id, self.rng.randint(0, self.engine.num_output_tokens(seq_id)))
        elif choice < 0.19 and self.live:
            self.engine.fail(self.pick(), core.ErrorKind.GRAMMAR)
        elif choice < 0.192:
            self.change_price_of_drafts()
        elif choice < 0.195:
            self.counts["discard"] += self.engine.discard_in_flight()
            self.plans.clear()
            lost = [seq_id for seq_id in self.held if self.rng.random() < 0.2]
            kept = self.engine.keep_swaps([seq_id for seq_id in self.held if seq_id not in lost])
            self.held = {seq_id: self.held[seq_id] for seq_id in kept}
            self.counts["lost"] += len(lost)
        elif choice < 0.2 and self.config.prefix_caching:
            self.counts["reset"] += self.engine.reset_prefix_cache()
        elif choice < 0.25:
            self.sweep()
        elif choice < 0.6:
            self.commit()
        else:
            self.schedule()

    def run(self, num_operations: int) -> None:
        """Operations and the end, with a proof of integrity behind each."""
        for _ in range(num_operations):
            self.operate()
            self.engine.check_integrity()
        self.finish()
        self.engine.check_integrity()

    def finish(self) -> None:
        while self.plans or self.engine.has_unfinished:
            if self.plans:
                self.commit()
            else:
                self.schedule()
        self.sweep()
        self.swap_out()
        assert not self.live and not self.held
        assert self.engine.num_free_blocks == self.config.num_blocks - 1
        assert self.engine.num_free_slots == self.config.num_state_slots - 1


CONFIGS = [
    {"num_draft_tokens": 0, "async_scheduling": False, "num_blocks": 12},
    {
        "num_draft_tokens": 3,
        "async_scheduling": False,
        "num_blocks": 12,
        "max_num_seqs": 8,
        "num_state_slots": 9,
    },
    {"num_draft_tokens": 0, "async_scheduling": True, "num_blocks": 14, "max_num_batched_tokens": 16},
    {
        "num_draft_tokens": 5,
        "async_scheduling": True,
        "num_blocks": 12,
        "max_num_seqs": 6,
        "num_state_slots": 8,
    },
    {"num_draft_tokens": 2, "async_scheduling": True, "num_blocks": 60, "admission_headroom_tokens": 16},
    {"num_draft_tokens": 1, "async_scheduling": False, "chunked_prefill": False, "num_blocks": 10},
    {
        "num_draft_tokens": 5,
        "async_scheduling": True,
        "num_blocks": 12,
        "max_num_seqs": 6,
        "num_state_slots": 8,
        "use_draft_budget": True,
    },
    {"num_draft_tokens": 4, "async_scheduling": False, "num_blocks": 12, "use_draft_budget": True},
    {"num_draft_tokens": 0, "async_scheduling": False, "num_blocks": 14, "prefix_caching": True},
    {
        "num_draft_tokens": 3,
        "async_scheduling": True,
        "num_blocks": 16,
        "max_num_seqs": 8,
        "num_state_slots": 11,
        "prefix_caching": True,
        "prefix_state_interval": 16,
    },
    {
        "num_draft_tokens": 2,
        "async_scheduling": True,
        "num_blocks": 60,
        "max_num_seqs": 10,
        "num_state_slots": 14,
        "max_num_batched_tokens": 30,
        "prefix_caching": True,
        "prefix_hash_bits": 5,
    },
    {
        "num_draft_tokens": 3,
        "async_scheduling": True,
        "num_blocks": 16,
        "max_num_seqs": 8,
        "num_state_slots": 11,
        "prefix_caching": True,
        "preemption_mode": core.PreemptionMode.SWAP,
        "swap_limit_bytes": 90,
        "block_bytes": 3,
        "slot_bytes": 10,
        "draft_score_bytes": 2,
    },
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(f"{v}" for v in c.values()))
def test_random_trace(seed, config):
    trace = Trace(seed, **config)
    trace.run(OPERATIONS_PER_TRACE)
    counts = trace.counts
    assert counts["prefill"] > 100 and counts["decode"] > 1000 and counts["finished"] > 100, counts
    assert counts["abort"] > 20 and counts["preempt"] > 20 and counts["discard"] > 0, counts
    assert trace.engine.num_preemptions > counts["preempt"] or config["num_blocks"] > 30, (
        "pressure preempted nobody"
    )
    if config["num_draft_tokens"]:
        assert counts["rejected"] > 100, counts
    if config.get("use_draft_budget"):
        stats = trace.engine.draft_budget_stats()
        assert min(stats.num_full, stats.num_cut, stats.num_none) > 50
        assert counts["dealt"] > 25 or not config["async_scheduling"], counts
    if config["async_scheduling"]:
        assert counts["matched"] > 1000, counts
    if config.get("prefix_caching"):
        stats = trace.engine.prefix_cache_stats()
        assert min(stats.num_hits, stats.num_forks, stats.num_evicted_snapshots) > 20, counts
        assert stats.num_evicted_blocks > 50 and counts["snapshots"] > 100, counts
        assert stats.num_hit_tokens < stats.num_query_tokens
    if "preemption_mode" in config:
        swaps = trace.engine.swap_stats()
        assert min(swaps.num_refused, counts["lost"], counts["scores"]) > 2, counts
        assert swaps.num_out >= counts["swapped out"] and swaps.num_in == counts["swapped in"]
        assert swaps.num_in > 100 and swaps.num_held == 0 and trace.engine.num_recomputed_rows > 100
        assert trace.engine.prefix_cache_stats().num_passed > 20
    if config.get("chunked_prefill", True):
        assert counts["partial"] > 10 or config.get("max_num_batched_tokens", 64) > 16, counts


def test_traces_are_long_enough():
    assert OPERATIONS_PER_TRACE * len(CONFIGS) >= 100_000
