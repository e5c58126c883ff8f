"""When drafting stops because plain decoding is faster, and when it comes back."""

from __future__ import annotations

import re

import numpy as np

from tests.core.harness import core, tokens_of
from tests.core.test_draft_budget import STEEP, make_budget


class Decoding:
    """Sequences that decode on and on; drafts are proposed when the plan wants them."""

    def __init__(self, num_seqs: int, points, undrafted, confidence: float = 0.5) -> None:
        self.engine = make_budget(
            num_seqs,
            2,
            points,
            undrafted,
            max_model_len=5000,
            num_blocks=650 * num_seqs,
            max_num_batched_tokens=5120,
        )
        self.ids = [self.engine.add(core.SequenceParams(), tokens_of(3)) for _ in range(num_seqs)]
        self.confidence = confidence
        self.step()

    def step(self):
        plan = self.engine.schedule()
        rows, seqs = plan.num_samples, plan.num_seqs
        drafts = confidences = None
        if plan.num_drafting:
            drafts = np.full((seqs, 2), 9, np.int32)
            drafts[: seqs - plan.num_drafting] = -1
            confidences = np.full((seqs, 2), self.confidence, np.float32)
        self.engine.commit(plan, np.full(rows, 7, np.int32), drafts=drafts, confidences=confidences)
        if plan.step % 8 == 0:
            self.engine.check_integrity()
        return plan

    def steps(self, count: int) -> tuple[str, list[int]]:
        """Which of `count` steps want drafts ("1" or "0"), and how many drafts each verifies."""
        plans = [self.step() for _ in range(count)]
        wanted = "".join(str(int(plan.num_drafting > 0)) for plan in plans)
        return wanted, [plan.num_draft_rows for plan in plans]


WIDE = [(n, n * width, 4.0 + 0.5 * n + 0.1 * n * width) for n in (1, 64) for width in (1, 3)]
LINE = [(n, n * width, 4.0 + n * width) for n in (1, 8) for width in (1, 3)]


def test_drafting_stops_when_it_costs_much():
    """A step without drafts takes 4 of 8 ms: drafting stops when three such steps are lost."""
    decoding = Decoding(4, LINE, [(1, 2.0), (8, 8.0)], confidence=0.3)
    wanted, verified = decoding.steps(12)
    assert wanted.startswith("11") and wanted.endswith("0000") and sum(verified[2:]) == 0
    wanted, verified = decoding.steps(600)
    probes = [i for i, flag in enumerate(wanted) if flag == "1"]
    assert np.diff(probes).tolist() == [128, 256] and probes[0] < 64
    assert sum(verified) == 0
    stats = decoding.engine.draft_budget_stats()
    assert stats.num_probes == len(probes) and stats.num_undrafted > 590


def test_probes_are_small():
    """Of one in 8 sequences, the newest ones; of all in the rarest ones."""
    decoding = Decoding(40, WIDE, [(1, 4.5), (64, 25.0)], confidence=0.05)
    for _ in range(12):
        decoding.step()
    sizes = {}
    for step in range(4050):
        plan = decoding.step()
        if plan.num_drafting:
            sizes[step] = plan.num_drafting
            assert plan.num_seqs == 40
    assert list(sizes.values()) == [5] * 5 + [40]
    assert np.diff(list(sizes)).tolist() == [128, 256, 512, 1024, 2048]
    drafted = [decoding.engine.metrics(seq_id).num_drafted for seq_id in decoding.ids]
    assert drafted == [drafted[0]] * 35 + [drafted[0] + 2 * 5] * 5


def test_a_small_probe_speaks_for_all():
    """Eight sequences with good drafts bring drafting back for 64, whose own are known to have been bad."""
    decoding = Decoding(64, WIDE, [(1, 4.5), (64, 25.0)], confidence=0.05)
    assert decoding.steps(60)[0].endswith("0" * 30)
    decoding.confidence = 0.99
    sizes = [decoding.step().num_drafting for _ in range(60)]
    assert 8 in sizes and sizes[sizes.index(8) + 1 :].count(64) > 3


def test_a_prefill_counts_with_those_that_will_run():
    """Drafting pauses for 4 sequences and not for one: who makes them four again has no first drafts."""
    decoding = Decoding(4, LINE, [(1, 4.9), (8, 8.0)], confidence=0.6)
    assert decoding.steps(30)[0].endswith("0" * 10)
    for seq_id in decoding.ids[1:]:
        decoding.engine.abort(seq_id)
    decoding.confidence = 0.9
    assert "1" in decoding.steps(8)[0][-3:]
    decoding.engine.add(core.SequenceParams(), tokens_of(3))
    for _ in range(2):
        decoding.engine.add(core.SequenceParams(), tokens_of(3))
    plan = decoding.step()
    assert plan.is_prefill and plan.num_seqs == 3 and plan.num_drafting == 0


def test_drafts_of_a_probe_have_to_pay_in_a_step_that_proposes_none():
    """Of 12 ms a step with drafts needs 9 to propose: without, the rate falls from 4 / 3 to 6.4 / 7."""
    points = [(4, 4, 12.0), (4, 12, 16.0)]
    decoding = Decoding(4, points, [(4, 3.0)], confidence=0.55)
    decoding.steps(20)
    wanted, verified = decoding.steps(100)
    assert wanted.count("1") == 1 and sum(verified) == 0


def test_drafting_stops_after_200_steps_that_gain_nothing():
    decoding = Decoding(4, STEEP, [])
    wanted, _ = decoding.steps(260)
    assert wanted.index("0") == 200


def test_drafting_resumes_when_a_probe_finds_better_drafts():
    decoding = Decoding(1, LINE, [(1, 3.0), (8, 11.0)], confidence=0.05)
    assert decoding.steps(40)[0].endswith("000")
    decoding.confidence = 0.99
    wanted, verified = decoding.steps(80)
    assert "1" * 10 in wanted and verified[wanted.index("1" * 10) + 9] == 2


def test_every_pause_is_longer_unless_drafts_have_paid():
    """At least 64 steps, 256, 1024, ...; a probe after 64 more, 128 more, ... has found good drafts."""
    decoding = Decoding(1, LINE, [(1, 3.0), (8, 11.0)], confidence=0.05)

    def pause() -> int:
        """Steps until drafting is back: a probe finds good drafts, which do not last."""
        decoding.confidence = 0.05
        while not (wanted := decoding.steps(7)[0]).endswith("0" * 7):  # more than to look at plain steps
            assert "1" in wanted
        decoding.confidence = 0.99
        count = 7
        while decoding.steps(2)[0] != "11":
            count += 2
        return count

    pauses = [pause() for _ in range(3)]
    assert all(abs(length - least) <= 4 for length, least in zip(pauses, (64, 256, 1024))), pauses
    decoding.steps(12)  # good ones that last
    assert abs(pause() - 64) <= 4


def test_drafting_resumes_at_once_when_the_load_falls():
    """The newest estimates are weighed at every step, for the number of sequences that there are."""
    points = [(1, 1, 10.0), (1, 3, 10.1), (8, 8, 80.0), (8, 24, 240.0)]
    decoding = Decoding(8, points, [(1, 9.0), (8, 40.0)], confidence=0.6)
    assert decoding.steps(10)[0].endswith("000")
    for seq_id in decoding.ids[1:]:
        decoding.engine.abort(seq_id)
    wanted, verified = decoding.steps(4)
    assert wanted == "1111" and verified == [0, 2, 2, 2]


def test_while_drafts_pay_a_few_plain_steps_are_looked_at():
    """They show what plain decoding really takes: here that the curve was wrong."""
    decoding = Decoding(1, LINE, [(1, 4.9), (8, 11.0)], confidence=0.8)
    wanted, _ = decoding.steps(70)
    assert wanted.startswith("1" * 15) and [len(run) for run in re.findall("0+", wanted)] == [6, 6]
    assert len(max(re.findall("1+", wanted), key=len)) == 32
    decoding.engine.add_step_time(1, 1, 0.1, False)
    for _ in range(5):
        decoding.engine.add_step_time(1, 1, 1.0, is_drafted=False)
    assert decoding.steps(20)[0].endswith("0" * 10)


def test_what_steps_with_drafts_bring_counts():
    """Promised are 2.44 tokens a step, one comes: less than plain decoding gives."""
    decoding = Decoding(1, LINE, [(1, 4.9), (8, 11.0)], confidence=0.8)
    assert decoding.steps(14)[0] == "1" * 14
    for _ in range(7):
        decoding.engine.add_step_time(1, 3, 7.0, num_emitted=1)
    assert "1" * 10 in decoding.steps(20)[0], "seven steps are few"
    for _ in range(8):
        decoding.engine.add_step_time(1, 3, 7.0, num_emitted=1)
    assert decoding.steps(24)[0] == "1" * 13 + "0" * 11
    decoding.engine.set_step_times(LINE, [(1, 4.9), (8, 11.0)])
    assert decoding.steps(20)[0] == "1" * 6 + "0" * 6 + "1" * 8, "of another curve nothing is known"


def test_prefills_propose_no_drafts_either_while_drafting_is_off():
    decoding = Decoding(2, LINE, [(1, 1.0), (8, 2.0)], confidence=0.1)
    decoding.steps(20)
    decoding.engine.abort(decoding.ids[0])
    decoding.engine.add(core.SequenceParams(), tokens_of(3))
    plan = decoding.step()
    assert plan.is_prefill and plan.num_drafting == 0
    assert decoding.step().seqlens_q.tolist() == [1, 1]
