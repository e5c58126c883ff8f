"""Buffers on the host, marks in a queue, and the cores near a device, on stand-ins."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer.platform.nvidia import spans
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.graphs import together
from deepinfer.runtime.step_buffers import StepBuffers, pack, places_of
from deepinfer.utils import numa
from deepinfer.utils.host_memory import HostArrays, HostRing, PackedArrays, split
from deepinfer.utils.timer import QueueTimers
from deepinfer.utils.upload import upload_one
from tests.sampling.rows import Row, make_inputs
from tests.support.fake_queue import CPU
from tests.support.table_model import batch_of, requests


class Mark:
    """A mark that the test reaches."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.is_reached, self.time = log, False, 0.0

    def record(self) -> None:
        self.is_reached = False
        self.log.append("record")

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.log.append("wait")
        self.is_reached = True

    def elapsed_time(self, end: Mark) -> float:
        return 1e3 * (end.time - self.time)


def test_a_buffer_is_filled_again_when_its_copy_has_ended():
    log: list[str] = []
    marks: list[Mark] = []

    def new_mark() -> Mark:
        marks.append(Mark(log))
        return marks[-1]

    ring = HostRing(2, lambda size: torch.empty(size, dtype=torch.uint8), new_mark)
    first = ring.take(100)
    ring.copied()
    assert first.shape == (100,) and first.untyped_storage().nbytes() == 128
    second = ring.take(100)
    ring.copied()
    assert second.data_ptr() != first.data_ptr() and log == ["record", "record"]
    marks[0].is_reached = True
    assert ring.take(128).data_ptr() == first.data_ptr() and ring.num_waits == 0
    ring.copied()
    assert ring.take(129).data_ptr() != second.data_ptr(), "it had to grow"
    assert ring.num_waits == 1 and log[-1] == "wait"
    assert ring.take(10).data_ptr() == ring.take(20).data_ptr(), "nothing was copied from it"


def test_the_least_size_of_a_buffer():
    ring = HostRing(1, lambda size: torch.empty(size, dtype=torch.uint8), lambda: Mark([]), 1000)
    assert ring.take(10).untyped_storage().nbytes() == 1024
    assert ring.take(1025).untyped_storage().nbytes() == 2048


def test_upload_on_a_cpu_is_the_array():
    array = np.arange(6, dtype=np.int64)[::2]
    assert upload_one(array, CPU).tolist() == [0, 2, 4]


def test_buffers_hold_a_batch_and_padding():
    """Against plain lists."""
    buffers = StepBuffers(16, 5, 0, 4, CPU)
    running = requests(3)
    for _ in range(2):  # what an earlier, larger step has left is padded over
        batch = batch_of(running, [[1, 2], [3], []], [2, 2, 2], CPU)
        buffers.put_batch(batch, 4, 2)
        shown = buffers.batch(8, 4, 200, 2)
        assert shown.input_ids.tolist() == [*batch.input_ids.tolist(), 0, 0]
        assert shown.positions.tolist() == [1, 2, 3, 1, 2, 1, 0, 0]
        assert shown.row_seq.tolist() == [0, 0, 0, 1, 1, 2, 3, 3], "the last sequence is nobody's"
        assert shown.cu_seqlens_q.tolist() == [0, 3, 5, 6, 6]
        assert shown.seqlens_k.tolist() == [4, 3, 2, 0] and shown.state_slots.tolist() == [1, 2, 3, 0]
        assert shown.block_tables.tolist() == [[1, 0], [1, 0], [1, 0], [0, 0]]
        assert shown.output_rows.tolist() == list(range(8))
        assert (shown.max_seqlen_k, shown.ngram_ids.shape) == (200, (8, 0))
        addresses = [tensor.data_ptr() for tensor in (shown.input_ids, shown.block_tables)]
        full = batch_of(requests(5), [[9, 9]] * 5, [3] * 5, CPU)
        buffers.put_batch(full, 6, 4)
        assert buffers.batch(16, 6, 512, 4).input_ids.tolist()[:15] == full.input_ids.tolist()
        shown = buffers.batch(8, 4, 200, 2)
        assert [tensor.data_ptr() for tensor in (shown.input_ids, shown.block_tables)] == addresses


def test_buffers_hold_sampling_parameters_and_padding():
    buffers = StepBuffers(4, 3, 0, 1, CPU)
    rows = [
        Row(seed=2**63 + 5, index=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, draft=6),
        Row(index=8),
    ]
    buffers.put_sampling(make_inputs(rows, [0, 2]))
    assert buffers.sampling("seeds", 4).tolist() == [5 - 2**63, 0, 0, 0]
    assert buffers.sampling("token_index", 3).tolist() == [7, 8, 0]
    assert buffers.sampling("inv_temperature", 4).tolist() == [2.0, 1.0, 0.0, 0.0], "padding is greedy"
    assert buffers.sampling("top_p", 4).tolist() == pytest.approx([0.9, 1.0, 1.0, 1.0])
    assert buffers.sampling("top_k", 4).tolist() == [3, -1, -1, -1]
    assert buffers.sampling("min_p", 4).tolist() == pytest.approx([0.1, 0.0, 0.0, 0.0])
    assert buffers.sampling("draft_ids", 4).tolist() == [6, -1, -1, -1]
    assert buffers.sampling("row_offsets", 5).tolist() == [0, 2, 2, 2, 2]


ENTRIES = (("input_ids", "int32", (3,), 4), ("seeds", "int64", (2,), 16), ("ngram_ids", "int32", (3, 2), 32))


def test_arrays_of_a_buffer():
    buffer = torch.arange(16, dtype=torch.int32).view(torch.uint8)
    views, arrays = split(buffer, ENTRIES), HostArrays(buffer.numpy(), ENTRIES)
    assert views["input_ids"].tolist() == [1, 2, 3]
    assert views["ngram_ids"].tolist() == [[8, 9], [10, 11], [12, 13]]
    assert views["seeds"].tolist() == [4 + (5 << 32), 6 + (7 << 32)]
    assert dict(arrays).keys() == views.keys() and "seeds" in arrays and "seed" not in arrays
    for name, view in views.items():
        assert view.data_ptr() == arrays[name].ctypes.data
        assert torch.equal(view, torch.from_numpy(arrays[name])), name
    assert places_of(ENTRIES) == {"ngram_ids": (8, 3, 2), "input_ids": (1, 3, 1), "seeds": (4, 2, 2)}


def test_arrays_are_found_in_the_memory_that_they_lie_in():
    host = torch.arange(16, dtype=torch.int32)
    batch = SimpleNamespace(**split(host.view(torch.uint8), ENTRIES))
    [(words, places)] = pack(batch, ("ngram_ids", "input_ids", "seeds"))
    assert words.data_ptr() == host.data_ptr() and places == places_of(ENTRIES)
    batch.input_ids, batch.seeds = torch.zeros(4, 2, dtype=torch.int32)[1:], torch.zeros(0, dtype=torch.int64)
    (moved, own), (words, places) = pack(batch, ("input_ids", "ngram_ids", "seeds"))
    assert own == {"input_ids": (2, 3, 2)} and moved.shape == (8,)
    assert words.data_ptr() == host.data_ptr() and places == {"ngram_ids": (8, 3, 2), "seeds": (0, 0, 1)}


def test_packed_arrays_fill_the_buffers_as_others_do():
    """Twice, the second time by the table that is kept; with other lengths in between."""
    running = requests(3)
    plain = [batch_of(running, drafts, [2, 2, 2], CPU) for drafts in ([[1, 2], [3], []], [[], [7], [8]])]
    found = []
    for is_packed in (False, True):
        buffers = StepBuffers(16, 5, 0, 4, CPU)
        for batch in (plain[0], plain[1], plain[0]):
            given = packed_batch(batch) if is_packed else batch
            buffers.put_batch(given, 4, 2)
            shown = buffers.batch(8, 4, 200, 2)
            found.append([getattr(shown, name).tolist() for name in Batch.tensor_names()])
    assert found[:3] == found[3:] and found[0] == found[2] != found[1]


def packed_batch(batch: Batch) -> Batch:
    """The same with all arrays in one buffer."""
    entries, end = [], 0
    for name in Batch.tensor_names():
        array = getattr(batch, name)
        entries.append((name, "int32", tuple(array.shape), end))
        end += array.nbytes
    buffer = torch.cat([getattr(batch, name).flatten() for name in Batch.tensor_names()])
    packed = PackedArrays(buffer, tuple(entries))
    return dataclasses.replace(batch, **split(buffer.view(torch.uint8), entries), packed=packed)


def test_what_is_fetched_lies_in_few_pieces():
    one, two, three = together(
        [(torch.int32, (5,)), (torch.uint8, (3,)), (torch.float32, (2, 2))], torch.device("cpu")
    )
    alone = torch.arange(4)
    one.copy_(torch.arange(5))
    three.fill_(2.5)
    tensors = [three[:1], alone, two[1:], one]
    pieces = spans(tensors)
    assert len(pieces) == 2
    for whole, parts in pieces:
        for number, start in parts:
            tensor = tensors[number]
            part = whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            assert torch.equal(part, tensor) and part.data_ptr() == tensor.data_ptr()


def test_timers_of_a_queue_count_what_has_ended():
    log: list[str] = []
    marks: list[Mark] = []

    def new_mark() -> Mark:
        marks.append(Mark(log))
        return marks[-1]

    timers = QueueTimers(new_mark)
    with timers.timed("forward"):
        pass
    assert dict(timers.seconds) == {}
    for mark, at in zip(marks, (1.0, 3.5), strict=True):
        mark.time, mark.is_reached = at, True
    assert dict(timers.seconds) == {"forward": 2.5}
    with timers.timed("forward"), timers.timed("draft"):
        pass
    assert len(marks) == 4, "marks come free"
    timers.clear()
    assert dict(timers.seconds) == {}


def test_cores_near_a_device(tmp_path, monkeypatch):
    assert numa.parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(set(cores)))
    (tmp_path / "0000:1b:00.0").mkdir()
    cpus = tmp_path / "0000:1b:00.0" / "local_cpulist"
    cpus.write_text("0-3\n")
    assert numa.bind_near("0000:1B:00.0", tmp_path) == {2, 3} and bound == [{2, 3}]
    cpus.write_text("9\n")
    assert numa.bind_near("0000:1b:00.0", tmp_path) is None, "none of them may be used"
    cpus.write_text("what\n")
    assert numa.bind_near("0000:1b:00.0", tmp_path) is None
    assert numa.bind_near("0000:1c:00.0", tmp_path) is None and len(bound) == 1
