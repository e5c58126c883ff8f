"""expand_streams, collapse_streams and advance_streams: golden blocks, float64, the fusion, single rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.hyper_connection import advance_streams, collapse_streams, expand_streams
from tilelang_ops.hyper_connection.expand_streams.reference import WIDE_ROWS

SIZES = [(1, 4, 32), (3, 4, 256), (WIDE_ROWS, 2, 96), (WIDE_ROWS + 1, 4, 256), (130, 4, 257), (2, 3, 1024)]


def random_site(num_rows: int, num_streams: int, width: int, dtype: torch.dtype):
    streams = torch.randn(num_rows, num_streams, width).to(dtype)
    output = torch.randn(num_rows, width).to(dtype)
    pre, post = torch.rand(num_rows, num_streams), 2 * torch.rand(num_rows, num_streams)
    comb = torch.rand(num_rows, num_streams, num_streams)
    return streams, pre, output, post, comb


def test_golden_block(units) -> None:
    site = units.under("mhc")
    expanded = expand_streams(site["streams"], site["sublayer_out"], site["post"], site["comb"])
    torch.testing.assert_close(expanded, site["expanded"], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(
        collapse_streams(site["streams"], site["pre"]), site["collapsed"], rtol=1e-6, atol=2e-6
    )


@pytest.mark.parametrize(("num_rows", "num_streams", "width"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(num_rows: int, num_streams: int, width: int, dtype: torch.dtype) -> None:
    streams, pre, output, post, comb = random_site(num_rows, num_streams, width, dtype)
    wide, out = streams.double(), output.double()
    expanded = torch.einsum("nij,nid->njd", comb.double(), wide) + post.double()[..., None] * out[:, None]
    collapsed = torch.einsum("ni,nid->nd", pre.double(), wide)
    # One rounding: half a unit in the last place of the dtype, and float32's own error of a few additions.
    tolerance = {"rtol": 2.0**-8 if dtype == torch.bfloat16 else 1e-6, "atol": 4e-6}
    torch.testing.assert_close(expand_streams(streams, output, post, comb).double(), expanded, **tolerance)
    torch.testing.assert_close(collapse_streams(streams, pre).double(), collapsed, **tolerance)


@pytest.mark.parametrize(("num_rows", "num_streams", "width"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fusion_is_its_parts(num_rows: int, num_streams: int, width: int, dtype: torch.dtype) -> None:
    streams, pre, output, post, comb = random_site(num_rows, num_streams, width, dtype)
    expanded = expand_streams(streams, output, post, comb)
    new, collapsed, mean_square = advance_streams(streams, pre, output, post, comb)
    assert_same_bits(new, expanded, "streams")
    assert_same_bits(collapsed, collapse_streams(expanded, pre), "collapsed")
    exact = expanded.double().square().mean((1, 2))
    torch.testing.assert_close(mean_square.double(), exact, rtol=1e-6, atol=0)
    settled, again, _ = advance_streams(expanded, pre)
    assert_same_bits(settled, expanded, "settled")
    assert_same_bits(again, collapsed, "collapsed again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_alone_is_row_in_batch(dtype: torch.dtype) -> None:
    site = random_site(150, 4, 256, dtype)
    batch = advance_streams(*site)
    for start, stop in [(0, 1), (149, 150), (7, 8), (3, 20), (0, 32), (1, 34), (20, 150)]:
        part = advance_streams(*(x[start:stop].contiguous() for x in site))
        for name, actual, expected in zip(("streams", "collapsed", "mean square"), part, batch, strict=True):
            assert_same_bits(actual, expected[start:stop], f"{name} of rows {start}..{stop}")


def test_no_rows() -> None:
    new, collapsed, mean_square = advance_streams(*random_site(0, 4, 64, torch.bfloat16))
    assert new.shape == (0, 4, 64) and collapsed.shape == (0, 64) and mean_square.shape == (0,)


def test_on_device(device: str) -> None:
    check_against_cpu(
        advance_streams, *random_site(5, 4, 256, torch.float32), device=device, rtol=1e-6, atol=1e-6
    )
