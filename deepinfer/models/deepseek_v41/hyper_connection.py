"""Residual streams of a block of rows, and the site in front of a sublayer that mixes them (mHC).

A row carries m residual streams instead of one. In front of every sublayer a site computes, from the
streams, three mixes: `pre` collapses the streams into one vector, `post` spreads the sublayer's output
over them and `comb` mixes them among themselves. The scheme is single-pass: a site's `post` and `comb`
serve its own sublayer, its `pre` serves the next one, so collapsing never waits for the site's product.

Adding an output is lazy: `Streams` keeps it pending, and the next site computes new streams, their
mean square and the collapsed input in one operator. Nothing needs a site's mixes before that, so a GPU makes
them aside, beside the sublayer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.embedding import Embedding
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.linear import DenseLinear, Projection
from deepinfer.layers.norm import RMSNorm
from deepinfer.layers.rows import take_rows
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.utils.aside import Aside, aside
from tilelang_ops.hyper_connection import (
    advance_norm,
    advance_streams,
    expand_streams,
    mix_coefficients,
    project_mix,
    start_streams,
)
from tilelang_ops.moe import SlotOutputs


class Mixes(NamedTuple):
    """What a site computes.

    Attributes:
        pre: [n, m] float32, the mix that collapses the streams for the next sublayer.
        post: [n, m] float32 and
        comb: [n, m, m] float32, the mixes that add the output of the sublayer being computed; None before
            the first site.
    """

    pre: Tensor
    post: Tensor | None = None
    comb: Tensor | None = None


@dataclass(frozen=True)
class Streams:
    """The residual streams of n rows.

    Attributes:
        values: [n, m, hidden] compute dtype.
        making: the mixes of the site behind, which may be under way.
        output: [n, hidden] compute dtype, a sublayer's output that `values` does not hold yet, or what adds
            up to it.
    """

    values: Tensor
    making: Aside[Mixes]
    output: Tensor | SlotOutputs | None = None

    @classmethod
    def start(cls, embed: Embedding, token_ids: Tensor, num_streams: int) -> Streams:
        """Every stream a copy of the embedding of the row's token ([n] int32); the first sublayer reads
        stream 0."""
        values, pre = start_streams(embed.weight, token_ids, num_streams, embed.dtype)
        return cls(values, Aside(Mixes(pre)))

    @property
    def mixes(self) -> Mixes:
        """Those of the site behind; what is launched from here on comes behind them."""
        return self.making.result()

    def add(self, output: Tensor | SlotOutputs) -> Streams:
        """With a sublayer's output ([n, hidden]) pending."""
        return replace(self, output=output)

    def settled(self) -> Streams:
        """With nothing pending."""
        if self.output is None:
            return self
        _, post, comb = self.mixes
        values = expand_streams(self.values, _added(self.output), post, comb)
        return replace(self, values=values, output=None)

    def take(self, places: Tensor) -> Streams:
        """The rows at `places` ([k] int64)."""

        def taken(part: Tensor | None) -> Tensor | None:
            return None if part is None else take_rows(part, places)

        mixes = Mixes(*(taken(part) for part in self.mixes))
        return Streams(take_rows(self.values, places), Aside(mixes), taken(_added(self.output)))

    def mean(self) -> Tensor:
        """[n, hidden] mean of the streams in float32, rounded once; nothing may be pending."""
        assert self.output is None, "an output is pending"
        return self.values.float().mean(1).to(self.values.dtype)

    def collapse(self, norm: RMSNorm | None = None) -> Tensor:
        """[n, hidden]: settle and collapse with the last mix, after the last sublayer; then the norm."""
        pre, post, comb = self.mixes
        if norm is None or self.values.is_cpu:
            collapsed = advance_streams(self.values, pre, _added(self.output), post, comb)[1]
            return collapsed if norm is None else norm(collapsed)
        values = advance_norm(self.values, pre, norm.weight, norm.eps, self.output, post, comb).values
        assert values is not None
        return values


def _added(output: Tensor | SlotOutputs | None) -> Tensor | None:
    return output.combined() if isinstance(output, SlotOutputs) else output


@dataclass(frozen=True)
class HyperConnection:
    """The site in front of one sublayer.

    Attributes:
        project: [(2 + m) * m, m * hidden], from the streams side by side to the entries of the three mixes.
        scale: [(2 + m) * m] float32, the checkpoint's three scales spread over the entries of their mixes.
        base: [(2 + m) * m] float32.
    """

    project: Projection
    scale: Tensor
    base: Tensor
    num_streams: int
    num_rounds: int
    eps: float
    norm_eps: float
    arithmetic: Arithmetic

    @classmethod
    def load(
        cls, weights: Weights, prefix: str, config: DeepseekV41Config, arithmetic: Arithmetic
    ) -> HyperConnection:
        """Read the site whose tensors are `<prefix>_fn`, `_scale` and `_base` ("layers.0.hc_attn")."""
        m = config.hc_mult
        scale = weights.tensor(f"{prefix}_scale", torch.float32)
        return cls(
            project=weights.float32_linear(f"{prefix}_fn"),
            scale=torch.cat([scale[i : i + 1].expand(n) for i, n in enumerate((m, m, m * m))]),
            base=weights.tensor(f"{prefix}_base", torch.float32),
            num_streams=m,
            num_rounds=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
            arithmetic=arithmetic,
        )

    def __call__(self, streams: Streams) -> tuple[Tensor, Streams]:
        """The sublayer's input before its norm, [n, hidden], and settled streams with this site's mixes."""
        pre, post, comb = streams.mixes
        values, collapsed, mean_square = advance_streams(
            streams.values, pre, _added(streams.output), post, comb
        )
        return collapsed, Streams(values, aside(values.device, self._mix, values, mean_square))

    def normed(self, streams: Streams, norm: RMSNorm, *, keeps_values: bool) -> tuple[Inputs, Streams]:
        """As the call, with the sublayer's input behind its norm, for products on a device.

        Args:
            streams: n rows, an output pending or not.
            norm: the sublayer's.
            keeps_values: some product takes the input as it is, not rounded.
        """
        rounds, in_units = self.arithmetic.quantize_activations, self.arithmetic.fp8_products
        pre, post, comb = streams.mixes
        advanced = advance_norm(
            streams.values,
            pre,
            norm.weight,
            norm.eps,
            streams.output,
            post,
            comb,
            keeps_values=keeps_values or not rounds,
            encoding="units" if in_units else "rounded" if rounds else "",
        )
        making = aside(streams.values.device, self._mix, advanced.streams, advanced.mean_square)
        return Inputs(advanced.values, advanced.rounded, advanced.units), Streams(advanced.streams, making)

    def _mix(self, values: Tensor, mean_square: Tensor) -> Mixes:
        """This site's mixes, from settled streams [n, m, hidden] and their mean square [n] float32."""
        if isinstance(self.project, DenseLinear):
            return Mixes(
                *project_mix(
                    values,
                    self.project.weight,
                    mean_square,
                    self.scale,
                    self.base,
                    num_parts=self.project.num_parts,
                    num_rounds=self.num_rounds,
                    eps=self.eps,
                    norm_eps=self.norm_eps,
                )
            )
        return Mixes(
            *mix_coefficients(
                self.project(values.flatten(1), self.arithmetic, torch.float32),
                mean_square,
                self.scale,
                self.base,
                num_streams=self.num_streams,
                num_rounds=self.num_rounds,
                eps=self.eps,
                norm_eps=self.norm_eps,
            )
        )
