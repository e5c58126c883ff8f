"""Cases of the expert operators without matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, alike, equal, near, seeded
from tilelang_ops.moe import (
    GroupedInputs,
    GroupedRows,
    combine_slots,
    gather_grouped,
    group_rows,
    route_topk,
    swiglu,
    swiglu_quantize,
)
from tilelang_ops.moe.combine_slots import reference as combine_reference
from tilelang_ops.moe.gather_grouped import reference as gather_reference
from tilelang_ops.moe.group_rows import reference as group_reference
from tilelang_ops.moe.swiglu import reference as swiglu_reference
from tilelang_ops.moe.swiglu_quantize import reference as swiglu_quantize_reference

WIDTH, HIDDEN, EXPERTS, SELECTED = 2304, 5120, 384, 6
RESIDENT = 7  # experts of a rank


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    kinds = (_swiglu, _swiglu_quantize, _route, _group, _gather, _combine)
    return [kind(rows) for kind in kinds for rows in ((5,) if small else (256, 4096))]


def _gate_up(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 2 * WIDTH, generator=seeded(seed)).bfloat16()


def _in_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


def _swiglu(rows: int) -> Case:
    return Case(
        op="moe.swiglu",
        size=f"{rows} rows, {WIDTH} channels",
        bytes=rows * WIDTH * 3 * 2,
        flops=0,
        make=lambda seed: (_gate_up(rows, seed),),
        run=lambda x: swiglu(x, 10.0, torch.bfloat16),
        torch=_in_torch,
        check=near(
            lambda x: swiglu_reference.run(x, 10.0, torch.float32, None), rtol=1.5 * 2.0**-7, atol=1e-5
        ),
    )


def _swiglu_quantize(rows: int) -> Case:
    def in_torch(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu_quantize_reference.run(x, 10.0, weight, None)

    return Case(
        op="moe.swiglu_quantize",
        size=f"{rows * SELECTED} slots, {WIDTH} channels to FP8",
        bytes=rows * SELECTED * (WIDTH * 5 + WIDTH // 32 + 4),
        flops=0,
        make=lambda seed: (
            _gate_up(rows * SELECTED, seed),
            torch.rand(rows * SELECTED, generator=seeded(seed)),
        ),
        run=lambda x, weight: swiglu_quantize(x, 10.0, weight),
        torch=in_torch,
        check=alike(in_torch, share=1e-3),
    )


def _route(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        logits = torch.randn(rows, EXPERTS, generator=seeded(seed))
        return logits, torch.randn(EXPERTS, generator=seeded(seed + 1)) / 8

    def in_torch(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.nn.functional.softplus(logits).sqrt()
        ids = (scores + bias).topk(SELECTED, dim=1).indices
        weights = scores.gather(1, ids)
        return ids.int(), weights / weights.sum(1, keepdim=True) * 1.5

    def check(out: tuple[Tensor, Tensor], args: tuple[Tensor, Tensor]) -> None:
        ids, weights = in_torch(*args)
        assert (ids != out[0]).float().mean() < 1e-3
        torch.testing.assert_close(out[1].sum(1), weights.sum(1))

    return Case(
        op="moe.route_topk",
        size=f"{rows} rows, {SELECTED} of {EXPERTS}",
        bytes=rows * (EXPERTS * 4 + SELECTED * 8),
        flops=0,
        make=make,
        run=lambda logits, bias: route_topk(logits, bias, SELECTED, 1.5),
        torch=in_torch,
        check=check,
    )


def _group(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor]:
        scores = torch.rand(rows, EXPERTS, generator=seeded(seed))
        return (scores.topk(SELECTED, dim=1).indices.int(),)

    def in_torch(ids: Tensor) -> GroupedRows:
        return GroupedRows(*_sorted(ids, EXPERTS))

    return Case(
        op="moe.group_rows",
        size=f"{rows} rows, {SELECTED} of {EXPERTS}",
        bytes=rows * SELECTED * 16 + EXPERTS * 4,
        flops=0,
        make=make,
        run=lambda ids: group_rows(ids, EXPERTS, 1),
        torch=in_torch,
        check=equal(lambda ids: group_reference.run(ids, EXPERTS, 1)),
    )


def _sorted(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, places, offsets and experts of `group_rows` with tiles of one row and no slot left out."""
    experts, order = ids.flatten().sort(stable=True)
    places = torch.empty_like(experts)
    places[order] = torch.arange(order.shape[0], dtype=torch.int32, device=ids.device)
    offsets = torch.searchsorted(experts, torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device))
    return order.int(), places.view(ids.shape), offsets.int(), experts


def _gather(rows: int) -> Case:
    """All slots are at a rank's experts."""

    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = seeded(seed)
        x = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
        weights = torch.rand(rows, SELECTED, generator=generator)
        scores = torch.rand(rows, RESIDENT, generator=generator)
        return x, weights, scores.topk(SELECTED, dim=1).indices.int()

    def in_torch(x: Tensor, weights: Tensor, ids: Tensor) -> GroupedInputs:
        slots, places, offsets, _ = _sorted(ids, RESIDENT)
        return GroupedInputs(x[slots // SELECTED], weights.flatten()[slots], places, offsets)

    return Case(
        op="moe.gather_grouped",
        size=f"{rows} rows, {SELECTED} of {RESIDENT}",
        bytes=rows * HIDDEN * 2 * (1 + SELECTED) + rows * SELECTED * 16,
        flops=0,
        make=make,
        run=lambda x, weights, ids: gather_grouped(x, weights, ids, RESIDENT),
        torch=in_torch,
        check=equal(lambda *args: gather_reference.run(*args, RESIDENT)),
    )


def _combine(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = seeded(seed)
        outputs = torch.randn(rows * SELECTED, HIDDEN, generator=generator).bfloat16()
        places = torch.randperm(rows * SELECTED, generator=generator).int()
        shared = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
        return outputs, places.view(rows, SELECTED), shared

    def in_torch(outputs: Tensor, places: Tensor, shared: Tensor) -> Tensor:
        return (outputs[places].float().sum(1) + shared.float()).bfloat16()

    return Case(
        op="moe.combine_slots",
        size=f"{rows} rows, {SELECTED} slots of {HIDDEN}",
        bytes=rows * HIDDEN * 2 * (SELECTED + 2),
        flops=0,
        make=make,
        run=lambda outputs, places, shared: combine_slots(outputs, places, None, shared),
        torch=in_torch,
        check=near(
            lambda outputs, places, shared: combine_reference.run(
                outputs, places, None, shared, torch.bfloat16
            ),
            rtol=2.0**-7,
            atol=1e-3,
        ),
    )
