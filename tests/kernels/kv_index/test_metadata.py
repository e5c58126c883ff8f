"""The kernels that derive a step's index tensors against their references."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_index.decode_metadata import cuda as decode_metadata_cuda
from tilelang_ops.kv_index.decode_metadata import reference as decode_metadata_reference
from tilelang_ops.kv_index.prefill_metadata import cuda as prefill_metadata_cuda
from tilelang_ops.kv_index.prefill_metadata import reference as prefill_metadata_reference


def test_decode_metadata(run_kernel: KernelRunner) -> None:
    for num_seqs, padding in ((1, 0), (1, 2), (5, 3), (131, 0)):
        seqlens_q = torch.randint(1, 7, (num_seqs,))
        seqlens_q[0] = 1
        cu_seqlens_q = torch.nn.functional.pad(seqlens_q.cumsum(0), (1, 0)).int()
        seqlens_k = (seqlens_q + torch.randint(0, 500, (num_seqs,))).int()
        seqlens_k[0] = 1
        args = (
            cu_seqlens_q,
            seqlens_k,
            torch.randint(1, 99, (num_seqs,), dtype=torch.int32),
            torch.randint(1, 9999, (num_seqs, 5), dtype=torch.int32),
            int(cu_seqlens_q[-1]) + padding,
            128,
            134,
            128,
            (1, 2),
        )
        actual = run_kernel(decode_metadata_cuda, *args)[0]
        expected = decode_metadata_reference.run(*args)
        for place, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, b, f"{num_seqs=} {padding=}, result {place}")


@pytest.mark.parametrize("is_bounded", [False, True])
def test_prefill_metadata(run_kernel: KernelRunner, is_bounded: bool) -> None:
    """Also for sequences without a row, which a trailing part of a step may have."""
    for num_seqs in (1, 4):
        counts = torch.randint(0, 150, (num_seqs,))
        counts[0] = 1
        counts[-1] = 140
        firsts = torch.randint(0, 200, (num_seqs,))
        firsts[0] = 0
        cu_rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        row_seq = torch.repeat_interleave(torch.arange(num_seqs), counts).int()
        positions = (torch.arange(row_seq.shape[0]) + (firsts - cu_rows[:-1])[row_seq]).int()
        starts = torch.randint(-5, 300, (num_seqs,), dtype=torch.int32)
        args = (
            positions,
            row_seq,
            cu_rows,
            torch.randint(1, 99, (num_seqs,), dtype=torch.int32),
            torch.randint(1, 9999, (num_seqs, 5), dtype=torch.int32),
            starts if is_bounded else None,
            128,
            134,
            128,
            (1, 2),
        )
        actual = run_kernel(prefill_metadata_cuda, *args)[0]
        expected = prefill_metadata_reference.run(*args)
        for place, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, b, f"{num_seqs=}, result {place}")
