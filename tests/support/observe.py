"""Records what goes through the parts of a model: mixes, inputs and outputs of sublayers, selections.

    observed, record = observe(model)
    ForwardHarness(observed, fold).prefill(...)
    record["layer3.attn_in"]                       # [rows, hidden], all steps one after the other

Names are those of the golden data: `streams_in`, `engram_out`, `attn_in`, `ffn_in`, `attn_out`, `ffn_out`,
`attn_hc.pre` ..., `ffn_hc.comb` under `layerN.`; `streams_final`, `pre_mix_final`, `hidden`; and before
`.layerN` `engram_ids`, `route_ids`, `route_weights`, `selected`, `candidates`. Rows are those that a layer
computed: ask for the outputs of all to find golden positions among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.hyper_connection import Streams
from deepinfer.models.deepseek_v41.indexer import Selection
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.model import DeepseekV41Model


class Record:
    """Values by name; what several steps recorded is joined along the rows.

    Args:
        prefixes: beginnings of the names to keep; None for all.
    """

    def __init__(self, prefixes: tuple[str, ...] | None = None) -> None:
        self._prefixes = prefixes
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, value: Tensor) -> None:
        if self._prefixes is None or name.startswith(self._prefixes):
            self._parts[name].append(value.detach().clone())

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(self._parts[name])

    def __contains__(self, name: str) -> bool:
        return name in self._parts


class Spy:
    """Calls through to an object and reports arguments and result of some of its methods."""

    def __init__(self, target: Any, **reports: Callable[..., None]) -> None:
        self._target = target
        self._reports = reports

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._wrap(name, value) if name in self._reports else value

    def __call__(self, *args: Any) -> Any:
        return self._wrap("call", self._target)(*args)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            result = function(*args)
            self._reports[name](result, *args)
            return result

        return wrapped


def observe(
    model: DeepseekV41Model, prefixes: tuple[str, ...] | None = None
) -> tuple[DeepseekV41Model, Record]:
    """The same model, with its parts reporting to a record of the names that begin with one of `prefixes`."""
    record = Record(prefixes)
    layers = [_observed(layer, record) for layer in model.layers]

    def final_streams(result: Streams, *_: Any) -> None:
        record.add("streams_final", result.settled().values)
        record.add("pre_mix_final", result.mixes.pre)

    layers[-1] = Spy(layers[-1], feed_forward=final_streams)
    norm = Spy(model.norm, call=lambda result, _: record.add("hidden", result))
    return replace(model, layers=tuple(layers), norm=norm), record


def _observed(layer: Layer, record: Record) -> Layer:
    number = f"layer{layer.layer_id}"

    def site(name: str) -> Callable[..., None]:
        def report(result: tuple[Tensor, Streams], _: Streams) -> None:
            streams = result[1]
            if name == "attn_hc" and layer.engram is None:
                record.add(f"{number}.streams_in", streams.values)
            for part in ("pre", "post", "comb"):
                record.add(f"{number}.{name}.{part}", getattr(streams.mixes, part))

        return report

    def engram(result: Tensor, streams: Tensor, table_rows: Tensor, *_: Any) -> None:
        record.add(f"{number}.streams_in", streams)
        record.add(f"{number}.engram_out", result)
        record.add(f"engram_ids.{number}", table_rows)

    def attention(result: tuple[Tensor, Selection | None], *_: Any) -> None:
        record.add(f"{number}.attn_out", result[0])
        if layer.attention.indexer is not None:
            record.add(f"selected.{number}", result[1].entries)
            if result[1].candidates is not None:
                record.add(f"candidates.{number}", result[1].candidates)

    def moe(result: Tensor, x: Tensor, *_: Any) -> None:
        record.add(f"{number}.ffn_out", result)
        ids, weights = layer.moe.route(x)
        record.add(f"route_ids.{number}", ids)
        record.add(f"route_weights.{number}", weights)

    return replace(
        layer,
        attn_hc=Spy(layer.attn_hc, call=site("attn_hc")),
        attn_norm=Spy(layer.attn_norm, call=lambda result, _: record.add(f"{number}.attn_in", result)),
        attention=Spy(layer.attention, forward=attention),
        ffn_hc=Spy(layer.ffn_hc, call=site("ffn_hc")),
        ffn_norm=Spy(layer.ffn_norm, call=lambda result, _: record.add(f"{number}.ffn_in", result)),
        moe=Spy(layer.moe, call=moe),
        engram=None if layer.engram is None else Spy(layer.engram, call=engram),
    )
