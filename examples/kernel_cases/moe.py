"""Cases of the expert operators without matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
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
from tilelang_ops.moe.group_rows import reference as group_reference

WIDTH, HIDDEN, EXPERTS, SELECTED = 2304, 5120, 384, 6
RESIDENT = 7  # experts of a rank


def cases() -> list[Case]:
    """The cases of this family."""
    kinds = (_swiglu, _swiglu_quantize, _route, _group, _gather, _combine)
    return [kind(rows) for kind in kinds for rows in (256, 4096)]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _gate_up(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 2 * WIDTH, generator=_generator(seed), device="cuda").bfloat16()


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
        check=lambda out, args: torch.testing.assert_close(
            out.float(), _in_torch(args[0].float()), rtol=2.0**-7, atol=1e-5
        ),
    )


def _swiglu_quantize(rows: int) -> Case:
    return Case(
        op="moe.swiglu_quantize",
        size=f"{rows * SELECTED} slots, {WIDTH} channels to FP8",
        bytes=rows * SELECTED * (WIDTH * 5 + WIDTH // 32 + 4),
        flops=0,
        make=lambda seed: (
            _gate_up(rows * SELECTED, seed),
            torch.rand(rows * SELECTED, generator=_generator(seed), device="cuda"),
        ),
        run=lambda x, weight: swiglu_quantize(x, 10.0, weight),
        torch=None,
        check=lambda out, args: None,
    )


def _route(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        logits = torch.randn(rows, EXPERTS, generator=_generator(seed), device="cuda")
        return logits, torch.randn(EXPERTS, generator=_generator(seed + 1), device="cuda") / 8

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
        scores = torch.rand(rows, EXPERTS, generator=_generator(seed), device="cuda")
        return (scores.topk(SELECTED, dim=1).indices.int(),)

    def in_torch(ids: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(ids.flatten(), stable=True)
        return order, torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0)

    def check(out: GroupedRows, args: tuple[Tensor]) -> None:
        expected = group_reference.run(args[0].cpu(), EXPERTS, 1)
        for name in ("slots", "places", "offsets", "tile_experts"):
            assert torch.equal(getattr(out, name).cpu(), getattr(expected, name)), name

    return Case(
        op="moe.group_rows",
        size=f"{rows} rows, {SELECTED} of {EXPERTS}",
        bytes=rows * SELECTED * 16 + EXPERTS * 4,
        flops=0,
        make=make,
        run=lambda ids: group_rows(ids, EXPERTS, 1),
        torch=None,  # torch.bincount cannot be captured
        check=check,
    )


def _gather(rows: int) -> Case:
    """All slots are at a rank's experts."""

    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = _generator(seed)
        x = torch.randn(rows, HIDDEN, generator=generator, device="cuda").bfloat16()
        weights = torch.rand(rows, SELECTED, generator=generator, device="cuda")
        scores = torch.rand(rows, RESIDENT, generator=generator, device="cuda")
        return x, weights, scores.topk(SELECTED, dim=1).indices.int()

    def check(out: GroupedInputs, args: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weights, ids = args
        grouped = group_reference.run(ids.cpu(), RESIDENT, 1)
        slots = grouped.slots.cuda().long()
        assert torch.equal(out.offsets.cpu(), grouped.offsets), "offsets"
        assert torch.equal(out.places.cpu(), grouped.places), "places"
        assert torch.equal(out.rows, x[slots // SELECTED]), "rows"
        assert torch.equal(out.factors, weights.view(-1)[slots]), "factors"

    return Case(
        op="moe.gather_grouped",
        size=f"{rows} rows, {SELECTED} of {RESIDENT}",
        bytes=rows * HIDDEN * 2 * (1 + SELECTED) + rows * SELECTED * 16,
        flops=0,
        make=make,
        run=lambda x, weights, ids: gather_grouped(x, weights, ids, RESIDENT),
        torch=None,  # torch.bincount cannot be captured
        check=check,
    )


def _combine(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = _generator(seed)
        outputs = torch.randn(rows * SELECTED, HIDDEN, generator=generator, device="cuda").bfloat16()
        places = torch.randperm(rows * SELECTED, generator=generator, device="cuda").int()
        shared = torch.randn(rows, HIDDEN, generator=generator, device="cuda").bfloat16()
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
        check=lambda out, args: torch.testing.assert_close(
            out.float(), in_torch(*args).float(), rtol=2.0**-7, atol=1e-3
        ),
    )
