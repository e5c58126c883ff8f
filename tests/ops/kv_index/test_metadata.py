"""A step's index tensors in one pass are those that the model derives one by one."""

from __future__ import annotations

import pytest
import torch

from deepinfer.layers.rotary import RotaryTable, RotaryTables, plain_frequencies
from deepinfer.models.deepseek_v41.rows import RowSet
from deepinfer.runtime.batch import Batch
from tests.support.compare import assert_same_bits
from tilelang_ops.kv_index import decode_metadata, prefill_metadata

BLOCK_SIZE, WINDOW, RING = 8, 6, 9


def make_batch(seqlens_q: list[int], seqlens_k: list[int], is_prefill: bool) -> Batch:
    def int32(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    num_seqs, num_rows = len(seqlens_q), sum(seqlens_q)
    rows = [(seq, k - q + i) for seq, (q, k) in enumerate(zip(seqlens_q, seqlens_k)) for i in range(q)]
    return Batch(
        input_ids=int32([0] * num_rows),
        positions=int32([position for _, position in rows]),
        row_seq=int32([seq for seq, _ in rows]),
        ngram_ids=int32([[0]] * num_rows),
        cu_seqlens_q=int32([0, *torch.tensor(seqlens_q).cumsum(0).tolist()]),
        seqlens_k=int32(seqlens_k),
        state_slots=(torch.randperm(num_seqs + 3)[:num_seqs] + 1).int(),
        block_tables=torch.randint(1, 500, (num_seqs, 9), dtype=torch.int32),
        total_lens=int32(seqlens_k),
        keep_all=int32([0] * num_seqs),
        window_starts=int32([max(0, k - q - 3) for q, k in zip(seqlens_q, seqlens_k)]),
        output_rows=int32(range(num_rows)),
        max_seqlen_k=max(seqlens_k),
        is_prefill=is_prefill,
    )


def make_rows(batch: Batch) -> RowSet:
    tables = RotaryTables(*(RotaryTable(plain_frequencies(8, 1e4)) for _ in range(2)))
    return RowSet.whole(batch, tables)


@pytest.mark.parametrize("case", range(12))
def test_decode(case: int) -> None:
    num_seqs = int(torch.randint(1, 6, ()))
    seqlens_q = torch.randint(1, 5, (num_seqs,)).tolist()
    seqlens_k = [q + int(torch.randint(0, 60, ())) for q in seqlens_q]
    batch = make_batch(seqlens_q, seqlens_k, is_prefill=False)
    rows, ratios = make_rows(batch), (1, 2, 4)
    padding = case % 3
    found = decode_metadata(
        batch.cu_seqlens_q,
        batch.seqlens_k,
        batch.state_slots,
        batch.block_tables,
        batch.num_rows + padding,
        window=WINDOW,
        ring=RING,
        block_size=BLOCK_SIZE,
        ratios=ratios,
    )
    n = batch.num_rows
    for name in ("row_seq", "positions", "slots", "preceding", "following"):
        assert_same_bits(getattr(found, name)[:n], getattr(rows, name), name)
    assert_same_bits(found.ring_index[:n], rows.ring_index(RING))
    assert_same_bits(found.window_index[:n], rows.window_in_ring(WINDOW, RING))
    for i, ratio in enumerate(ratios):
        assert_same_bits(found.num_visible[i, :n], rows.num_visible(ratio))
        groups = rows.groups(ratio, BLOCK_SIZE // ratio)
        ends, slots = found.group_ends[i, :n], found.group_slots[i, :n]
        assert_same_bits(ends[ends >= 0], groups.ends)
        assert_same_bits(slots[ends >= 0], groups.slots)
        assert (slots[ends < 0] == -1).all()
    for behind in (found.window_index, found.ring_index, *found.group_ends, *found.group_slots):
        assert (behind[n:] == -1).all()
    assert not found.num_visible[:, n:].any() and not found.slots[n:].any()


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("case", range(12))
def test_prefill(case: int, is_bounded: bool) -> None:
    """For all rows of a step and for a trailing part of them."""
    num_seqs = int(torch.randint(1, 6, ()))
    seqlens_q = torch.randint(1, 16, (num_seqs,)).tolist()
    seqlens_k = [q + int(torch.randint(0, 40, ())) for q in seqlens_q]
    batch = make_batch(seqlens_q, seqlens_k, is_prefill=True)
    rows, ratios = make_rows(batch), (1, 2, 4)
    if is_bounded:
        rows = rows.bounded(batch.window_starts)
    if case % 2:
        first = torch.randint(0, 20, (num_seqs,))
        first[0] = 0
        rows = rows.take((rows.preceding >= first[batch.row_seq]).nonzero().squeeze(1))
    counts = torch.bincount(rows.row_seq, minlength=num_seqs)
    cu_rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    found = prefill_metadata(
        rows.positions,
        rows.row_seq,
        cu_rows,
        batch.state_slots,
        batch.block_tables,
        window=WINDOW,
        ring=RING,
        block_size=BLOCK_SIZE,
        ratios=ratios,
        window_starts=batch.window_starts if is_bounded else None,
    )
    for name in ("slots", "preceding", "following"):
        assert_same_bits(getattr(found, name), getattr(rows, name), name)
    assert_same_bits(found.ring_index, rows.ring_index(RING))
    assert_same_bits(found.line_index, rows.line_index(WINDOW)[0])
    assert_same_bits(found.window_index, rows.window_in_line(WINDOW, rows))
    sources, targets = rows.history_index(WINDOW, RING)
    assert_same_bits(found.history_sources, sources)
    assert_same_bits(found.history_targets, targets)
    for i, ratio in enumerate(ratios):
        assert_same_bits(found.num_visible[i], rows.num_visible(ratio))
        groups = rows.groups(ratio, BLOCK_SIZE // ratio)
        ends, slots = found.group_ends[i], found.group_slots[i]
        assert_same_bits(ends[ends >= 0], groups.ends)
        assert_same_bits(slots[ends >= 0], groups.slots)
        assert (slots[ends < 0] == -1).all()
