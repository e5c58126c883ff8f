"""Step times: what is measured, and the files that keep it; what is torn, foreign or old is not believed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from deepinfer.engine import parts
from deepinfer.runtime import step_time
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.step_time import StepSize, StepTimeCache, StepTimes, measure, sizes_to_measure
from deepinfer.runtime.synthetic_step import synthetic_batch, synthetic_inputs
from deepinfer.settings import Settings
from tests.support.engines import generate, greedy, make_llm, prompt_of

KEY = {"model": Path("some/model"), "threads": (2, 1), "max_num_seqs": 4}
TIMES = StepTimes({StepSize(1, 1): 1.5, StepSize(1, 6): 2.5, StepSize(1, 1, is_drafted=False): 1.25})


# --- measuring --------------------------------------------------------------------------------------------


def test_sizes():
    sizes = sizes_to_measure(20, 5)
    assert sorted({size.num_seqs for size in sizes}) == [1, 2, 4, 8, 16, 20]
    assert {(s.num_tokens // s.num_seqs, s.is_drafted) for s in sizes} == {
        (1, True),
        (4, True),
        (6, True),
        (1, False),
    }
    assert len(sizes) == len(set(sizes)) == 6 * 4
    assert {size.num_tokens // size.num_seqs for size in sizes_to_measure(1, 1)} == {1, 2}


class Clock:
    """Time that passes only while steps run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_of) -> None:
        self.now, self.runs, self.seconds_of = 0.0, [], seconds_of
        monkeypatch.setattr(step_time.time, "perf_counter", lambda: self.now)

    def run(self, size: StepSize) -> None:
        self.runs.append(size)
        self.now += self.seconds_of(size, len(self.runs))


def test_the_least_of_six_rounds_counts(monkeypatch):
    """A slow moment falls on all sizes, and leaves no trace."""
    slow_runs = {2, 3, 8, 9}
    clock = Clock(monkeypatch, lambda size, run: 0.010 * size.num_seqs + 0.030 * (run in slow_runs))
    sizes = [StepSize(1, 1), StepSize(2, 4)]
    times = measure(clock.run, sizes).ms
    assert times == {sizes[0]: pytest.approx(10.0), sizes[1]: pytest.approx(20.0)}
    assert clock.runs == [sizes[0]] + 6 * [sizes[1], sizes[0]]


def test_long_steps_run_once(monkeypatch):
    clock = Clock(monkeypatch, lambda size, run: 0.4 * size.num_seqs)
    sizes = [StepSize(1, 1), StepSize(2, 2), StepSize(4, 4)]
    times = measure(clock.run, sizes).ms
    assert [times[size] for size in sizes] == [pytest.approx(ms) for ms in (400, 800, 1600)]
    assert [size.num_seqs for size in clock.runs] == [1, 4, 2, 1, 1]


def test_arguments_of_the_core():
    drafted, undrafted = TIMES.for_core()
    assert drafted == [(1, 1, 1.5), (1, 6, 2.5)] and undrafted == [(1, 1.25)]


@pytest.mark.parametrize(("num_seqs", "width"), [(1, 1), (3, 4), (9, 6)])
def test_synthetic_steps_are_steps(num_seqs, width):
    batch = synthetic_batch(
        num_seqs,
        num_seqs * width,
        250,
        num_blocks=5,
        num_slots=4,
        block_size=128,
        max_ngram=3,
        vocab_size=100,
    )
    rows = num_seqs * width
    assert batch.num_rows == rows and batch.num_seqs == num_seqs and not batch.is_prefill
    for name in Batch.tensor_names():
        assert getattr(batch, name).dtype == torch.int32 and getattr(batch, name).is_contiguous(), name
    assert batch.positions.view(num_seqs, width).tolist() == [list(range(250, 250 + width))] * num_seqs
    assert (batch.seqlens_k == 250 + width).all() and batch.max_seqlen_k == 250 + width
    assert int(batch.block_tables.min()) >= 1 and int(batch.block_tables.max()) <= 4
    assert batch.block_tables.shape == (num_seqs, 2 if width <= 6 else 3)
    assert int(batch.state_slots.min()) >= 1 and int(batch.state_slots.max()) <= 3
    inputs = synthetic_inputs(num_seqs, rows, 250)
    assert inputs.num_rows == rows and (inputs.token_index == batch.positions + 1).all()
    assert inputs.row_offsets.tolist() == batch.cu_seqlens_q.tolist()
    assert inputs.draft_ids.view(num_seqs, width)[:, -1].tolist() == [-1] * num_seqs


# --- files ------------------------------------------------------------------------------------------------


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_curve_comes_back(tmp_path):
    cache = StepTimeCache(tmp_path / "new" / "folder", 60)
    assert cache.read(KEY) is None
    cache.write(KEY, TIMES)
    assert cache.read(KEY) == TIMES
    assert cache.read({**KEY, "threads": (1, 1)}) is None
    (name,) = files_of(tmp_path / "new" / "folder")
    assert name.startswith(step_time.FILE_PREFIX) and name.endswith(".json")
    other = StepTimes({StepSize(1, 1): 9.0})
    cache.write(KEY, other)
    assert cache.read(KEY) == other and len(files_of(tmp_path / "new" / "folder")) == 1


def written(tmp_path: Path) -> tuple[StepTimeCache, Path]:
    cache = StepTimeCache(tmp_path, 60)
    cache.write(KEY, TIMES)
    (name,) = files_of(tmp_path)
    return cache, tmp_path / name


@pytest.mark.parametrize("age", [61, -1])
def test_old_curves_and_those_from_the_future_are_ignored(tmp_path, age):
    cache, path = written(tmp_path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "measured_at": time.time() - age}))
    assert cache.read(KEY) is None and path.exists()
    assert StepTimeCache(tmp_path, 0).read(KEY) is None


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_torn_files_are_ignored(tmp_path, length, caplog):
    cache, path = written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:length])
    assert cache.read(KEY) is None
    cache.write(KEY, TIMES)
    assert cache.read(KEY) == TIMES


@pytest.mark.parametrize(
    "change",
    [
        {"key": {"model": "another"}},
        {"times": []},
        {"times": [[1, 1, True]]},
        {"times": [[1, 1, True, -1.0]]},
        {"times": [[1, 1, True, "fast"]]},
        {"times": [[1, 1, True, float("nan")]]},
        {"times": 5},
        {"measured_at": None},
    ],
)
def test_foreign_contents_are_ignored(tmp_path, change):
    cache, path = written(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cache.read(KEY) is None
    path.write_bytes(b"\xff\xfe[]")
    assert cache.read(KEY) is None
    path.write_text("[1, 2]")
    assert cache.read(KEY) is None


def test_foreign_files_stay(tmp_path):
    foreign = {"notes.txt": b"mine", "step-time-abc.json": b"{}", "step-time-x.tmp": b"", "other.json": b"{}"}
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "folder").mkdir()
    cache = StepTimeCache(tmp_path, 60)
    cache.read(KEY)
    cache.write(KEY, TIMES)
    assert cache.read(KEY) == TIMES
    (tmp_path / "folder").rmdir()
    found = files_of(tmp_path)
    assert {name: found[name] for name in foreign} == foreign and len(found) == len(foreign) + 1


def test_readers_see_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    """The name changes hands in one move, of a complete file; a failure leaves the old one."""
    cache, path = written(tmp_path)
    seen = []

    def replace(source: str, target: Path) -> None:
        seen.append(json.loads(Path(source).read_text())["times"])
        assert cache.read(KEY) == TIMES
        raise OSError("no space left")

    monkeypatch.setattr(step_time.os, "replace", replace)
    cache.write(KEY, StepTimes({StepSize(2, 2): 7.0}))
    assert seen == [[[2, 2, True, 7.0]]]
    assert cache.read(KEY) == TIMES and list(files_of(tmp_path)) == [path.name], "no part stays behind"


def test_a_directory_that_cannot_be_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = StepTimeCache(tmp_path / "file", 60)
    cache.write(KEY, TIMES)
    assert cache.read(KEY) is None


# --- in an engine -----------------------------------------------------------------------------------------


def settings(**changes) -> Settings:
    return Settings(**{"use_draft_budget": True, "num_draft_tokens": 3, **changes})


def test_an_engine_measures_once_and_keeps_the_curve(tmp_path, monkeypatch):
    measured = []

    def counted(run, sizes):
        measured.append(len(sizes))
        return measure(run, sizes)

    monkeypatch.setattr(parts, "measure", counted)
    with make_llm(settings=settings(step_time_dir=str(tmp_path)), max_num_seqs=2) as llm:
        first = [llm.llm_engine.core.step_ms(n, n * width) for n in (1, 2) for width in (1, 2, 4)]
        assert min(first) > 0 and llm.llm_engine.core.undrafted_step_ms(1) > 0
        assert llm.llm_engine.model_runner.timers.seconds == {}
        expected = generate(llm, [prompt_of(40)], greedy(8))[0].outputs[0].token_ids
    assert measured == [8] and len(list(tmp_path.iterdir())) == 1
    with make_llm(settings=settings(step_time_dir=str(tmp_path)), max_num_seqs=2) as llm:
        again = [llm.llm_engine.core.step_ms(n, n * width) for n in (1, 2) for width in (1, 2, 4)]
        assert again == first and measured == [8]
        assert generate(llm, [prompt_of(40)], greedy(8))[0].outputs[0].token_ids == expected
    with make_llm(settings=settings(step_time_dir=str(tmp_path)), max_num_seqs=3):
        assert len(measured) == 2, "another maximum is another curve"
    with make_llm(settings=settings(step_time_dir=str(tmp_path), step_time_max_age=0), max_num_seqs=2):
        assert len(measured) == 3, "too old at once"
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_measured_without_need(monkeypatch):
    monkeypatch.setattr(parts, "measure", None)
    for changes in ({"use_draft_budget": False}, {"num_draft_tokens": 0}):
        with make_llm(settings=settings(**changes), max_num_seqs=2) as llm:
            assert llm.llm_engine.core.step_ms(1, 1) == 0.0
            generate(llm, [prompt_of(5)], greedy(3))
