"""advance_norm and its parts on CUDA: a block per row; a thread mixes 8 channels of all streams at a time."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import e8m0_inverse, e8m0_value, fp8_scale_byte, magnitude_bits
from tilelang_ops.common.cuda_row_codes import group_in_unit, unit_code
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import E4M3
from tilelang_ops.common.row_codes import UNIT, RowCodes
from tilelang_ops.common.sizes import ModelSizes
from tilelang_ops.hyper_connection.advance_norm.op import Advanced
from tilelang_ops.moe.combine_slots.op import SlotOutputs

THREADS = 128
GROUP = 32
NORM_BLOCKS = 4  # of an SM; without a bound the norm's variant holds too much at once
SLOT_BLOCKS = 2  # where it adds up slots besides
MANY_ROWS = 512  # from here on that is faster than another launch


def _builds(model: ModelSizes) -> list[dict[str, Any]]:
    normed = {"collapsed": "norm"}
    encodings = ("rounded", "units") if model.hidden_size % UNIT == 0 else ("rounded",)
    alone, kept = ([(encoding, keeps) for encoding in encodings] for keeps in (False, True))
    kinds = [
        {"expands": True, **normed, "keeps_values": keeps, "encoding": encoding, "num_slots": slots}
        for slots, forms in (
            (model.num_experts_per_tok, (*kept, *alone, ("", True))),
            (model.dspark_num_experts_per_tok, (*alone, ("", True))),
        )
        for encoding, keeps in forms
    ]
    kinds += [
        {"expands": expands, **normed, "keeps_values": keeps, "encoding": encoding, "num_slots": 0}
        for expands in (True, False)
        for encoding, keeps in (("", True), *kept, *alone)
    ]
    kinds += [
        {
            "expands": expands,
            "collapsed": collapsed,
            "keeps_values": False,
            "encoding": "",
            "num_slots": 0,
        }
        for expands, collapsed in ((True, "plain"), (False, "plain"), (True, ""))
    ]
    return [
        {"width": model.hidden_size, "num_streams": model.hc_mult, "source": "bfloat16", **kind}
        for kind in kinds
    ]


@cuda_kernel(builds=_builds)
def kernel(
    width: int,
    num_streams: int,
    source: str,
    expands: bool,
    collapsed: str,
    keeps_values: bool,
    encoding: str,
    num_slots: int,
):
    """`expands` adds a pending output, or with slots the sum of those of experts and of a shared one;
    `collapsed` is "plain", "norm" or "" for no collapsed vector; the `encoding` of the normalised one is
    "codes", "units", "rounded" or "" for none."""
    quantizes = encoding != ""
    code_type = source if encoding == "rounded" else "float8_e4m3fn"
    n = T.dynamic("n")
    num_outputs = T.dynamic("num_outputs") if num_slots > 0 else n
    m = num_streams
    step = 8 if width % 8 == 0 else 1  # channels of a thread at a time
    parts = width // step
    # Items of the loop: a number that divides, or is divided by, that of the threads.
    items = T.ceildiv(parts, THREADS) * THREADS if parts > THREADS else max(4, 1 << (parts - 1).bit_length())
    quads = items // 4  # four neighbours share a scale
    collapses, norms = collapsed != "", collapsed == "norm"
    in_units = encoding == "units"
    near = 4 if in_units else 1  # quads of a unit
    far = quads // near
    assert not in_units or width % UNIT == 0, f"{width=}: no whole units"
    scale_shape = (width // UNIT, T.dynamic("padded")) if in_units else (n, max(1, width // GROUP))
    scale_type = "float32" if in_units else "uint8"

    @T.prim_func
    def advance_norm(
        streams: T.Tensor((n, m, width), source),
        pre: T.Tensor((n, m), "float32"),
        output: T.Tensor((num_outputs, width), source),
        places: T.Tensor((n, max(1, num_slots)), "int32"),
        shared: T.Tensor((n, width), source),
        post: T.Tensor((n, m), "float32"),
        comb: T.Tensor((n, m, m), "float32"),
        weight: T.Tensor((width,), "float32"),
        advanced: T.Tensor((n, m, width), source),
        mean_square: T.Tensor((n,), "float32"),
        values: T.Tensor((n, width), source),
        codes: T.Tensor((n, width), code_type),
        scales: T.Tensor(scale_shape, scale_type),
        eps: T.float32,
    ):
        with T.Kernel(n, threads=THREADS) as row:
            T.annotate_min_blocks_per_sm(1 if not norms else NORM_BLOCKS if num_slots == 0 else SLOT_BLOCKS)
            squares = T.alloc_fragment((far, near, 4), "float32")
            quad_sums = T.alloc_fragment((far, near), "float32")
            unit_sums = T.alloc_fragment((far,), "float32")
            total = T.alloc_fragment((1,), "float32")
            own_squares = T.alloc_fragment((far, near, 4), "float32")
            inverse = T.alloc_fragment((1,), "float32")
            held = T.alloc_fragment((far, near, 4, step), source)
            mix = T.alloc_local((m, m), "float32")
            spread = T.alloc_local((m,), "float32")
            weights = T.alloc_local((m,), "float32")
            if num_slots > 0:
                place = T.alloc_local((num_slots,), "int32")
                for s in T.serial(num_slots):
                    place[s] = places[row, s]
            if expands:
                for i, j in T.grid(m, m):
                    mix[i, j] = comb[row, i, j]
                for j in T.serial(m):
                    spread[j] = post[row, j]
            if collapses:
                for j in T.serial(m):
                    weights[j] = pre[row, j]
            for f, e, lane in T.Parallel(far, near, 4):
                p = (f * near + e) * 4 + lane
                old = T.alloc_local((m, step), "float32")
                added = T.alloc_local((step,), "float32")
                sum_ = T.alloc_local((step,), "float32")
                vector = T.alloc_local((step,), "float32")
                square = T.alloc_var("float32")
                own_square = T.alloc_var("float32")
                square = 0.0
                own_square = 0.0
                for k in T.unroll(step):
                    vector[k] = 0.0
                if p < parts:
                    for i in T.unroll(m):
                        for k in T.vectorized(step):
                            old[i, k] = T.cast(streams[row, i, p * step + k], "float32")
                    if num_slots > 0:
                        part = T.alloc_local((num_slots, step), source)
                        for s in T.unroll(num_slots):
                            for k in T.vectorized(step):
                                part[s, k] = output[T.max(place[s], 0), p * step + k]
                        for k in T.unroll(step):
                            added[k] = 0.0
                        # Branches, and TileLang's checks of the loads: without both a thread holds 217
                        # registers instead of 159, and 1,024 rows take 81 us instead of 47.
                        for s in T.unroll(num_slots):
                            if place[s] >= 0:
                                for k in T.unroll(step):
                                    added[k] = added[k] + T.cast(part[s, k], "float32")
                        for k in T.vectorized(step):
                            part[0, k] = shared[row, p * step + k]
                        for k in T.unroll(step):
                            added[k] = added[k] + T.cast(part[0, k], "float32")
                            added[k] = T.cast(T.cast(added[k], source), "float32")
                    elif expands:
                        for k in T.vectorized(step):
                            added[k] = T.cast(output[row, p * step + k], "float32")
                    for j in T.unroll(m):
                        for k in T.unroll(step):
                            if expands:
                                sum_[k] = mix[0, j] * old[0, k]
                                for i in T.unroll(m - 1):
                                    sum_[k] = sum_[k] + mix[i + 1, j] * old[i + 1, k]
                                sum_[k] = T.cast(T.cast(sum_[k] + spread[j] * added[k], source), "float32")
                            else:
                                sum_[k] = old[j, k]
                            if collapses:
                                vector[k] = vector[k] + weights[j] * sum_[k]
                                square = square + sum_[k] * sum_[k]
                        if expands:
                            for k in T.vectorized(step):
                                advanced[row, j, p * step + k] = T.cast(sum_[k], source)
                    if collapses and not norms:
                        for k in T.vectorized(step):
                            values[row, p * step + k] = T.cast(vector[k], source)
                if norms:
                    for k in T.unroll(step):
                        vector[k] = T.cast(T.cast(vector[k], source), "float32")
                        own_square = own_square + vector[k] * vector[k]
                    for k in T.vectorized(step):
                        held[f, e, lane, k] = T.cast(vector[k], source)
                    own_squares[f, e, lane] = own_square
                if collapses:
                    squares[f, e, lane] = square
            if collapses:
                T.reduce_sum(squares, quad_sums, dim=2)
                T.reduce_sum(quad_sums, unit_sums, dim=1)
                T.reduce_sum(unit_sums, total, dim=0)
                for k in T.Parallel(1):
                    mean_square[row] = total[k] / (m * width)
            if norms:
                T.reduce_sum(own_squares, quad_sums, dim=2)
                T.reduce_sum(quad_sums, unit_sums, dim=1)
                T.reduce_sum(unit_sums, inverse, dim=0)
                largest = T.alloc_fragment((far, near, 4), "int32")
                normed = T.alloc_fragment((far, near, 4, step), "float32")
                for k in T.Parallel(1):
                    inverse[k] = 1.0 / T.sqrt(inverse[k] / width + eps)
                for f, e, lane in T.Parallel(far, near, 4):
                    p = (f * near + e) * 4 + lane
                    v = T.alloc_local((step,), "float32")
                    gain = T.alloc_local((step,), "float32")
                    top = T.alloc_var("int32")
                    top = 0
                    for k in T.vectorized(step):
                        v[k] = T.cast(held[f, e, lane, k], "float32")
                    if p < parts:
                        for k in T.vectorized(step):
                            gain[k] = weight[p * step + k]
                        for k in T.unroll(step):
                            v[k] = T.cast(T.cast(v[k] * inverse[0] * gain[k], source), "float32")
                            top = T.max(top, magnitude_bits(v[k]))
                        if keeps_values:
                            for k in T.vectorized(step):
                                values[row, p * step + k] = T.cast(v[k], source)
                    if quantizes:
                        largest[f, e, lane] = top
                        for k in T.vectorized(step):
                            normed[f, e, lane, k] = v[k]
                if quantizes:
                    amax = T.alloc_fragment((far, near), "int32")
                    factor = T.alloc_fragment((far, near), "float32")
                    scale = T.alloc_fragment((far, near), "float32")
                    T.reduce_max(largest, amax, dim=2)
                    if in_units:
                        top_of = T.alloc_fragment((far,), "int32")
                        T.reduce_max(amax, top_of, dim=1)
                        for f in T.Parallel(far):
                            top_of[f] = fp8_scale_byte(top_of[f])
                            if f * 16 < parts:
                                scales[f, row] = e8m0_value(top_of[f])
                    for f, e in T.Parallel(far, near):
                        byte = fp8_scale_byte(amax[f, e])
                        factor[f, e] = e8m0_inverse(byte)
                        if in_units:
                            scale[f, e] = group_in_unit(byte, top_of[f])
                        elif encoding == "rounded":
                            scale[f, e] = e8m0_value(byte)
                        elif f * 4 < parts:
                            scales[row, f] = T.cast(byte, "uint8")
                    for f, e, lane in T.Parallel(far, near, 4):
                        p = (f * near + e) * 4 + lane
                        if p < parts:
                            if in_units:
                                for k in T.vectorized(step):
                                    codes[row, p * step + k] = unit_code(
                                        normed[f, e, lane, k], factor[f, e], scale[f, e]
                                    )
                            elif encoding == "codes":
                                for k in T.vectorized(step):
                                    codes[row, p * step + k] = T.cast(
                                        normed[f, e, lane, k] * factor[f, e], "float8_e4m3fn"
                                    )
                            else:
                                code = T.alloc_local((step,), "float8_e4m3fn")
                                for k in T.vectorized(step):
                                    code[k] = T.cast(normed[f, e, lane, k] * factor[f, e], "float8_e4m3fn")
                                for k in T.vectorized(step):
                                    codes[row, p * step + k] = T.cast(
                                        T.cast(code[k], "float32") * scale[f, e], source
                                    )

    return advance_norm


def launch(
    streams: Tensor,
    pre: Tensor | None,
    norm: tuple[Tensor, float] | None,
    pending: tuple[Tensor | SlotOutputs, Tensor, Tensor] | None,
    *,
    keeps_values: bool,
    encoding: str,
) -> Advanced:
    """The streams with what is `pending`; the collapsed vector if there is `pre`, normalised if `norm`."""
    num_rows, num_streams, width = streams.shape
    advanced = streams if pending is None else torch.empty_like(streams)
    values = mean_square = codes = scales = rounded = units = None
    if pre is not None:
        mean_square = streams.new_empty(num_rows, dtype=torch.float32)
        if keeps_values or norm is None:
            values = streams.new_empty(num_rows, width)
    if encoding == "rounded":
        rounded = streams.new_empty(num_rows, width)
    elif encoding == "units":
        units = RowCodes.empty(num_rows, width, streams.device)
    elif encoding:
        codes = streams.new_empty(num_rows, width, dtype=torch.uint8)
        scales = streams.new_empty(num_rows, width // GROUP, dtype=torch.uint8)
    output = None if pending is None else pending[0]
    slots = output if isinstance(output, SlotOutputs) else None
    output = output if slots is None else slots.outputs
    if num_rows > 0:
        program = kernel(
            width=width,
            num_streams=num_streams,
            source=str(streams.dtype).removeprefix("torch."),
            expands=pending is not None,
            collapsed="" if pre is None else "plain" if norm is None else "norm",
            keeps_values=keeps_values,
            encoding=encoding,
            num_slots=0 if slots is None else slots.places.shape[1],
        )
        weight, eps = norm or (None, 0.0)
        of_slots = (None, None) if slots is None else (slots.places, slots.shared)
        pre, output, post, comb = (
            None if t is None else t.contiguous() for t in (pre, output, *(pending or (None, None, None))[1:])
        )
        new = None if pending is None else advanced
        if units is not None:
            encoded = units.codes.view(E4M3), units.scales
        else:
            encoded = rounded if codes is None else codes.view(E4M3), scales
        outputs = (new, mean_square, values, *encoded)
        program(streams, pre, output, *of_slots, post, comb, weight, *outputs, eps)
    return Advanced(advanced, mean_square, values, codes, scales, rounded, units)


def run(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    output: Tensor | SlotOutputs | None,
    post: Tensor | None,
    comb: Tensor | None,
    keeps_values: bool,
    encoding: str,
) -> Advanced:
    if isinstance(output, SlotOutputs) and streams.shape[0] < MANY_ROWS:
        output = output.combined()
    pending = None if output is None else (output, post, comb)
    return launch(streams, pre, (weight, eps), pending, keeps_values=keeps_values, encoding=encoding)
