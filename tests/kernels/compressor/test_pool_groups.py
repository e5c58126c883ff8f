"""pool_groups' kernel against its reference, over steps that cut groups and overrun the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.compressor.pool_groups import cuda, reference

WIDTH, RING = 16, 7


def _step(parts: list[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Arguments of a step from (slot, first position, length) of each sequence."""
    lengths = [length for _, _, length in parts]
    positions = torch.cat([torch.arange(start, start + length) for _, start, length in parts]).int()
    return {
        "states": 3 * torch.randn(sum(lengths), 2, WIDTH),
        "positions": positions,
        "slots": torch.cat([torch.full((length,), slot) for slot, _, length in parts]),
        "preceding": torch.cat([torch.arange(length) for length in lengths]),
        "following": torch.cat([torch.arange(length).flip(0) for length in lengths]),
    }


def _pool() -> Tensor:
    """Six slots that stand further apart than their rings are long."""
    slot = RING * 2 * WIDTH + 12
    return torch.randn(6 * slot).as_strided((6, RING, 2, WIDTH), (slot, 2 * WIDTH, WIDTH, 1))


def test_pool_groups(run_kernel: KernelRunner) -> None:
    steps = [
        [(2, 0, 1)],
        [(1, 0, 30), (5, 3, 1), (3, 7, 2)],  # a place that is read is written again in the same step
        [(4, 5, 13), (2, 1, 7), (0, 11, 8), (1, 8, 6), (3, 101, 23)],
        [(1, 6, 1)],  # no group ends
    ]
    pool = _pool()
    for ratio, parts in [(2, step) for step in steps] + [(4, steps[2])]:
        step = _step(parts)
        is_end = (step["positions"] + 1) % ratio == 0
        for ends in (
            is_end.nonzero().flatten(),
            torch.where(is_end, torch.arange(is_end.shape[0]), -1),
        ):
            arguments = (step["states"], pool, ends, *list(step.values())[1:], ratio)
            actual, after = run_kernel(cuda, *arguments, torch.float32)
            expected_pool = _pool()
            expected_pool.copy_(pool)
            expected = reference.run(step["states"], expected_pool, *arguments[2:], torch.float32)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
            assert_same_bits(after[1], expected_pool, f"ring behind {parts}")
        pool.copy_(expected_pool)


def test_batch_invariance_and_rounding(run_kernel: KernelRunner) -> None:
    step, pool = _step([(1, 3, 5), (2, 1, 9)]), _pool()
    ends = ((step["positions"] + 1) % 2 == 0).nonzero().flatten()
    arguments = (step["states"], pool, ends, *list(step.values())[1:], 2)
    wide, _ = run_kernel(cuda, *arguments, torch.float32)
    rounded, _ = run_kernel(cuda, *arguments, torch.bfloat16)
    assert_same_bits(rounded, wide.bfloat16())
    first = {name: value[:5] for name, value in step.items()}
    alone, _ = run_kernel(
        cuda, first["states"], pool, ends[ends < 5], *list(first.values())[1:], 2, torch.float32
    )
    assert_same_bits(alone, wide[: alone.shape[0]])
