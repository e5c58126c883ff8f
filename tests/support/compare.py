"""Comparisons with messages that say where two tensors part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def relative_rms(actual: Tensor, expected: Tensor) -> Tensor:
    """Root mean square of the difference over the last dim, by the spread of `expected`; float64 [...].

    The golden data's measure of how close two rows of logits are.
    """
    expected = expected.double()
    difference = actual.double() - expected
    return difference.square().mean(-1).sqrt() / expected.std(-1, correction=0)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Same dtype, shape and bits (so NaN equals NaN, and -0 differs from 0)."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype=} {expected.dtype=}"
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)=} {tuple(expected.shape)=}"
    a, b = _bytes(actual), _bytes(expected)
    differs = (a != b).any(-1)
    if differs.any():
        first = int(differs.reshape(-1).nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), expected.shape or (1,)))
        got, want = actual.reshape(-1)[first].item(), expected.reshape(-1)[first].item()
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, "
            f"first at {index}: {got!r}, not {want!r}"
        )


def check_against_cpu(
    op: Callable[..., Any], *args: Any, device: torch.device | str, bitwise: bool = False, **tolerance: float
) -> None:
    """Run `op` on `device` and on the CPU on the same inputs and compare what it returns.

    Args:
        op: a public function of an operator, returning a tensor or a tuple of tensors.
        args: CPU tensors and plain values.
        bitwise: equal bits; else `torch.testing.assert_close` with `tolerance` (rtol and atol).
    """

    def run(where: torch.device | str) -> tuple[Tensor, ...]:
        moved = [arg.to(where, copy=True) if isinstance(arg, Tensor) else arg for arg in args]
        result = op(*moved)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    for number, (actual, expected) in enumerate(zip(run(device), run("cpu"), strict=True)):
        assert actual.device.type == torch.device(device).type, f"result {number} is on {actual.device}"
        if bitwise:
            assert_same_bits(actual.cpu(), expected, f"result {number}")
        else:
            torch.testing.assert_close(actual.cpu(), expected, equal_nan=True, **tolerance)


def _bytes(tensor: Tensor) -> Tensor:
    """[...] of any dtype -> uint8 [..., bytes of an element]."""
    return (
        tensor.detach()
        .contiguous()
        .reshape(-1, 1)
        .view(torch.uint8)
        .reshape(*tensor.shape, tensor.element_size())
    )
