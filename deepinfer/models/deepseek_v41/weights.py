"""Weights: what the modules of DeepSeek-V4.1 load from; streams a checkpoint and checks values on the way.

Every value that is read is checked: a NaN scale byte or a number that is not finite is an error that names
tensor and file.

Matrices come in one of three forms, for the device that they go to:

    form     FP8 matrix        others            routed experts     float32 matrices
    exact    Linear            Linear            Experts            Linear                CPU
    packed   Fp8Linear         DenseLinear       PackedExperts      DenseLinear, 3 terms  GPU
    codes    CodesLinear       DenseLinear       PackedExperts      DenseLinear, 3 terms  GPU, FP8 products

Bytes go to the device slice by slice while they are read, and are packed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.checkpoint.dequantize import GROUP, NAN_E4M3, NAN_SCALE, dequantize_fp4, dequantize_fp8
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.layers.experts import Experts, PackedExperts, RoutedExperts
from deepinfer.layers.linear import CodesLinear, DenseLinear, Fp8Linear, Linear, Projection
from deepinfer.models.deepseek_v41.tensors import is_stray
from tilelang_ops.common.dense_packing import pack_units
from tilelang_ops.common.packing import pack_fp8, pack_mxfp4, split_float32

MIN_BFLOAT16_SCALE = (
    3  # E8M0 byte: 2^-9, the smallest E4M3 value, times its power is 2^-133, bfloat16's smallest
)
WIDEN_BYTES = 2 << 20  # float32 values made at a time


@dataclass(frozen=True)
class QuantTable:
    """A table of rows kept as stored; `tilelang_ops.memory.gather_dequantize` widens the rows it gathers.

    Attributes:
        rows: [num_rows, width] uint8 (E4M3 bytes) with `scales`, or bfloat16 / float32 without.
        scales: [num_rows, width / 32] uint8 (E8M0 bytes), or None.
    """

    rows: Tensor
    scales: Tensor | None


class Weights:
    """The tensors of a proved checkpoint, in the form that modules hold them on a device.

    Args:
        reader: the checkpoint; `tensors.verify` has passed.
        on_read: called with the stored bytes of each tensor when it has been read (progress).
        device: where the tensors go.
        is_packed: hand out the packed form; by default everywhere but on a CPU.
        takes_codes: of the packed forms hand out the one of FP8 products.
        tables_on_host: keep Engram tables in pinned host memory, where a GPU reads the rows that it needs.

    Attributes:
        is_packed: which form `linear`, `float32_linear` and `experts` hand out.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        on_read: Callable[[int], object] | None = None,
        *,
        device: torch.device | str = "cpu",
        is_packed: bool | None = None,
        takes_codes: bool = False,
        tables_on_host: bool = False,
    ):
        self._reader = reader
        self._on_read = on_read
        self._unread = {name for name in reader.names if not is_stray(name)}
        self._device = torch.device(device)
        self._tables_on_host = tables_on_host and self._device.type != "cpu"
        self.is_packed = self._device.type != "cpu" if is_packed is None else is_packed
        self._takes_codes = takes_codes

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A bf16 or float32 tensor, in `dtype` or, when None, as stored."""
        info = self._reader.info(name)
        out = None
        for start, chunk in self._chunks(name):
            if out is None:
                out = torch.empty(info.shape, dtype=dtype or chunk.dtype, device=self._device)
            _check_finite(self._reader, name, chunk)
            out[start : start + chunk.shape[0]] = chunk
        self._done(name)
        assert out is not None, f"{name=} {info.shape=}"
        return out

    def linear(self, *prefixes: str, num_groups: int = 1) -> Projection:
        """One matrix [N, K]; several are stacked on rows, for example w1 and w3.

        Args:
            prefixes: names without `.weight`; the first names the result. All must be stored alike.
            num_groups: blocks of rows that each belong to a group of columns, for `by_group`.
        """
        quantized = {f"{prefix}.scale" in self._reader for prefix in prefixes}
        assert len(quantized) == 1, f"{prefixes=} {quantized=}"
        is_quantized = quantized.pop()
        if self.is_packed and is_quantized:
            return self._packed_linear(prefixes, num_groups)
        weight = self._exact(prefixes)
        if not self.is_packed:
            return Linear(weight, is_quantized, prefixes[0])
        if num_groups > 1:
            self._refuse_unscaled(prefixes[0])
        return _dense(weight.to(self._device), prefixes[0])

    def float32_linear(self, name: str) -> Projection:
        """A matrix that is multiplied in float32, by its full name."""
        weight = self.tensor(name, torch.float32)
        return _dense(weight, name) if self.is_packed else Linear(weight, False, name)

    def experts(self, prefix: str, num_experts: int) -> RoutedExperts:
        """The routed experts under `prefix` ("layers.0.ffn.experts"); w13 holds w1's rows, then w3's."""
        inner, hidden = self._logical_shape(f"{prefix}.0.w1")
        if self.is_packed:
            if f"{prefix}.0.w1.scale" not in self._reader:
                self._refuse_unscaled(f"{prefix}.0.w1")
            w13 = self._packed_experts(prefix, num_experts, ("w1", "w3"), gated=True)
            w2 = self._packed_experts(prefix, num_experts, ("w2",), gated=False)
            return PackedExperts(w13, w2, hidden, inner)
        parts = [f"{prefix}.{expert}.{name}" for expert in range(num_experts) for name in ("w1", "w3", "w2")]
        dtype = self._held_dtype(parts)
        w13 = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype)
        w2 = torch.empty(num_experts, hidden, inner, dtype=dtype)
        for expert in range(num_experts):
            self._fill(f"{prefix}.{expert}.w1", w13[expert, :inner])
            self._fill(f"{prefix}.{expert}.w3", w13[expert, inner:])
            self._fill(f"{prefix}.{expert}.w2", w2[expert])
        return Experts(w13, w2, quantized=f"{prefix}.0.w1.scale" in self._reader)

    def table(self, prefix: str) -> QuantTable:
        """An Engram table under `prefix` ("layers.1.engram.embed"), as stored."""
        rows = self._stored(f"{prefix}.weight", on_host=self._tables_on_host)
        if f"{prefix}.scale" not in self._reader:
            return QuantTable(rows, None)
        scales = self._stored(f"{prefix}.scale", on_host=self._tables_on_host)
        return QuantTable(rows.view(torch.uint8), scales)

    def check_unread(self) -> None:
        """Check the values of tensors that no module has read, for example a drafter that is not used."""
        for name in sorted(self._unread):
            for _, chunk in self._chunks(name):
                self._check(name, chunk)
            self._done(name)

    def _exact(self, prefixes: Sequence[str]) -> Tensor:
        """Matrices stacked on rows, on the host.

        Values are exact: bfloat16 where it holds them, as for every usual FP8 and FP4 matrix, else float32.
        """
        shapes = [self._logical_shape(prefix) for prefix in prefixes]
        assert len({shape[1] for shape in shapes}) == 1, f"{prefixes=} {shapes=}"
        weight = torch.empty(
            sum(shape[0] for shape in shapes), shapes[0][1], dtype=self._held_dtype(prefixes)
        )
        start = 0
        for prefix, shape in zip(prefixes, shapes):
            self._fill(prefix, weight[start : start + shape[0]])
            start += shape[0]
        return weight

    def _packed_linear(self, prefixes: Sequence[str], num_groups: int) -> Fp8Linear | CodesLinear:
        """FP8 matrices stacked on rows; all but the last have whole blocks of 32 rows."""
        if self._reader.info(f"{prefixes[0]}.weight").dtype != "F8_E4M3":
            raise self._reader.error(
                f"{prefixes[0]}.weight", "is not FP8: a GPU multiplies scaled matrices outside experts in FP8"
            )
        rows = [self._logical_shape(prefix)[0] for prefix in prefixes]
        assert all(count % GROUP == 0 for count in rows[:-1]), f"{prefixes=} {rows=}"
        codes = torch.cat([self._stored(f"{prefix}.weight").view(torch.uint8) for prefix in prefixes])
        scales = torch.cat([self._stored(f"{prefix}.scale") for prefix in prefixes])
        if int(scales.min()) < MIN_BFLOAT16_SCALE:
            raise self._reader.error(
                f"{prefixes[0]}.scale",
                f"has a scale byte below {MIN_BFLOAT16_SCALE}, whose products a GPU's bfloat16 cannot hold",
            )
        columns = codes.shape[0]
        codes, scales = (t.unflatten(0, (num_groups, -1)) for t in (codes, scales))
        if self._takes_codes:
            return CodesLinear(*self._pack(pack_units, prefixes[0], codes, scales), prefixes[0])
        packed = self._pack(pack_fp8, prefixes[0], codes, scales)
        return Fp8Linear(packed, columns, num_groups, prefixes[0])

    def _packed_experts(
        self, prefix: str, num_experts: int, names: tuple[str, ...], *, gated: bool
    ) -> Tensor:
        """FP4 matrices of all experts, those of one stacked on rows: [experts, ..] int32."""
        out = None
        for expert in range(num_experts):
            parts = [f"{prefix}.{expert}.{name}" for name in names]
            codes = torch.cat([self._stored(f"{part}.weight").view(torch.uint8) for part in parts])
            scales = torch.cat([self._stored(f"{part}.scale") for part in parts])
            packed = self._pack(pack_mxfp4, parts[0], codes[None], scales[None], gated=gated)
            if out is None:
                out = packed.new_empty(num_experts, *packed.shape[1:])
            out[expert] = packed[0]
        assert out is not None, f"{prefix} has no experts"
        return out

    def _pack(self, pack: Callable[..., Any], prefix: str, *args: Tensor, **options: bool) -> Any:
        try:
            return pack(*args, **options)
        except ValueError as error:
            raise self._reader.error(f"{prefix}.scale", f"cannot be multiplied on a GPU: {error}") from error

    def _refuse_unscaled(self, prefix: str) -> None:
        raise self._reader.error(
            f"{prefix}.weight",
            "is stored without scales: a GPU takes experts in FP4 and grouped output projections in FP8 "
            "only; give a quantised checkpoint, or run on the CPU (DEEPINFER_ACCELERATOR=cpu)",
        )

    def _logical_shape(self, prefix: str) -> tuple[int, int]:
        rows, columns = self._reader.info(f"{prefix}.weight").shape
        return rows, columns * 2 if self._reader.info(f"{prefix}.weight").dtype == "I8" else columns

    def _held_dtype(self, prefixes: Sequence[str]) -> torch.dtype:
        """bfloat16 when it holds every value of these matrices exactly, else float32.

        FP8 and FP4 values have at most four significant bits; only the smallest scales of an FP8 matrix would
        put them below bfloat16's range.
        """
        for prefix in prefixes:
            stored = self._reader.info(f"{prefix}.weight").dtype
            if stored == "F32":
                return torch.float32
            if stored == "F8_E4M3" and int(self._reader.read(f"{prefix}.scale").min()) < MIN_BFLOAT16_SCALE:
                return torch.float32
        return torch.bfloat16

    def _fill(self, prefix: str, out: Tensor) -> None:
        """Dequantise one matrix into `out` [rows, columns], a range of rows at a time."""
        name, scale_name = f"{prefix}.weight", f"{prefix}.scale"
        has_scale = scale_name in self._reader
        dense = has_scale and self._reader.info(name).dtype == "F8_E4M3"
        scale = self._stored(scale_name) if has_scale else None
        for start, chunk in self._chunks(name, multiple=GROUP):
            stop = start + chunk.shape[0]
            if scale is None:
                out[start:stop] = chunk
            elif dense:
                _widen(
                    dequantize_fp8, chunk, scale[start // GROUP : -(-stop // GROUP)], GROUP, out[start:stop]
                )
            else:
                _widen(dequantize_fp4, chunk, scale[start:stop], 1, out[start:stop])
            _check_finite(self._reader, name, out[start:stop])
        self._done(name)

    def _stored(self, name: str, *, on_host: bool = False) -> Tensor:
        """A tensor as stored, read and checked in slices; with `on_host` in pinned memory of the host."""
        if self._device.type == "cpu":
            data = self._reader.read(name)  # into place at once
            for start, stop in self._reader.row_ranges(name):
                self._check(name, data[start:stop])
            self._done(name)
            return data
        data = None
        for start, chunk in self._chunks(name):
            self._check(name, chunk)
            if data is None:
                where = {"pin_memory": True} if on_host else {"device": self._device}
                data = torch.empty(self._reader.info(name).shape, dtype=chunk.dtype, **where)
            data[start : start + chunk.shape[0]] = chunk
        self._done(name)
        assert data is not None, f"{name=} has no rows"
        return data

    def _chunks(self, name: str, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
        for start, stop in self._reader.row_ranges(name, multiple):
            yield start, self._reader.read_rows(name, start, stop)

    def _check(self, name: str, chunk: Tensor) -> None:
        """Refuse values that mean NaN or infinity in the tensor's own format."""
        dtype = self._reader.info(name).dtype
        if dtype == "F8_E8M0":
            if chunk.numel() and int(chunk.max()) == NAN_SCALE:
                raise self._reader.error(name, "holds a NaN scale byte (E8M0 255)")
        elif dtype == "F8_E4M3":
            if bool(((chunk.view(torch.uint8) & NAN_E4M3) == NAN_E4M3).any()):
                raise self._reader.error(name, "holds a NaN (E4M3)")
        elif chunk.is_floating_point():
            _check_finite(self._reader, name, chunk)

    def _done(self, name: str) -> None:
        """Count a tensor as read."""
        if name in self._unread:
            self._unread.remove(name)
            if self._on_read is not None:
                self._on_read(self._reader.info(name).nbytes)


def _dense(weight: Tensor, name: str) -> DenseLinear:
    if weight.dtype == torch.float32:
        return DenseLinear(split_float32(weight), 3, name)
    return DenseLinear(weight, 1, name)


def _widen(
    dequantize: Callable[[Tensor, Tensor, Tensor], None],
    data: Tensor,
    scale: Tensor,
    rows_per_scale: int,
    out: Tensor,
) -> None:
    """Dequantise rows into `out` through a float32 buffer of a few MiB where `out` is not float32 itself."""
    if out.dtype == torch.float32:
        return dequantize(data, scale, out)
    step = max(WIDEN_BYTES // (4 * out.shape[1]) // GROUP, 1) * GROUP
    for start in range(0, out.shape[0], step):
        stop = min(start + step, out.shape[0])
        wide = torch.empty(stop - start, out.shape[1], dtype=torch.float32)
        dequantize(data[start:stop], scale[start // rows_per_scale : -(-stop // rows_per_scale)], wide)
        out[start:stop] = wide


def _check_finite(reader: CheckpointReader, name: str, values: Tensor) -> None:
    """Refuse NaN and infinity; minimum and maximum show both in one pass without a temporary."""
    if values.numel():
        low, high = torch.aminmax(values)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise reader.error(name, "holds a value that is not finite")
