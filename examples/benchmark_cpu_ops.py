"""Speed of the CPU kernels, beside torch's own product where there is one.

    python examples/benchmark_cpu_ops.py [--threads N] [--instruction-set avx2]

Sizes are those of the bundled model (hidden 256, 16 experts of 128, 4 heads of 512) and of single matrices;
each line is the best of many runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from deepinfer.native import load_cpu_ops
from deepinfer.ops import cpu
from deepinfer.ops.experts import routed_experts
from deepinfer.ops.gemm import linear
from deepinfer.ops.index_scores import index_scores
from deepinfer.ops.quant import encode_fp4, encode_fp8, encode_mxfp4
from tilelang_ops.attention import sparse_attention


def best_seconds(call: Callable[..., object], *args: object) -> float:
    """Shortest of at least three runs in 0.3 seconds."""
    call(*args)
    best, spent, runs = float("inf"), 0.0, 0
    while spent < 0.3 or runs < 3:
        start = time.perf_counter()
        call(*args)
        elapsed = time.perf_counter() - start
        best, spent, runs = min(best, elapsed), spent + elapsed, runs + 1
    return best


def report(what: str, operations: float, seconds: float, note: str = "") -> None:
    print(f"{what:42s} {seconds * 1e6:10.1f} us {operations / seconds / 1e9:8.1f} GFLOP/s  {note}")


def products() -> None:
    for rows in (1, 16, 1024):
        for columns, width in ((128, 256), (2048, 128), (256, 1024), (4096, 256)):
            x, weight = torch.randn(rows, width), torch.randn(columns, width).bfloat16()
            wide = weight.float()
            library = best_seconds(torch.nn.functional.linear, x, wide)
            note = f"torch, float32 weight: {library * 1e6:.1f} us"
            seconds = best_seconds(linear, x, weight)
            report(f"linear {rows} x {width} -> {columns}", 2 * rows * columns * width, seconds, note)


def experts() -> None:
    w13, w2 = torch.randn(16, 256, 256).bfloat16(), torch.randn(16, 256, 128).bfloat16()
    for rows in (1, 16, 1024):
        x, weights = torch.randn(rows, 256), torch.rand(rows, 4)
        ids = torch.rand(rows, 16).argsort(1)[:, :4].int().contiguous()
        seconds = best_seconds(routed_experts, x, ids, weights, w13, w2, 10.0)
        report(f"routed experts, {rows} rows, 4 of 16", 2 * rows * 4 * 3 * 256 * 128, seconds)


def attention() -> None:
    window = torch.cat(encode_fp8(torch.randn(1, 2048, 512)), dim=-1)
    entries = torch.cat(encode_fp4(torch.randn(16, 64, 512)), dim=-1)
    for rows, heads in ((1, 4), (16, 4), (1024, 4), (64, 64)):
        q, sink = torch.randn(rows, heads, 512), torch.zeros(heads)
        window_index = (torch.arange(rows)[:, None] + torch.arange(128)).int()  # a prompt's sliding windows
        main_index = torch.arange(0, 1024, 16, dtype=torch.int32).repeat(rows, 1)
        seconds = best_seconds(
            sparse_attention, q, window, window_index, entries, main_index, sink, 512**-0.5
        )
        report(
            f"sparse attention, {rows} rows, {heads} heads, 192 keys", 4 * rows * heads * 192 * 512, seconds
        )


def index() -> None:
    codes, scales = encode_mxfp4(torch.randn(64, 64, 128))
    table = torch.arange(64, dtype=torch.int32)[None]
    for rows, visible in ((1, 1024), (1, 4096), (256, 4096)):
        q, weights = torch.randn(rows, 8, 128), torch.randn(rows, 8)
        row_seq, counts = torch.zeros(rows).int(), torch.full((rows,), visible, dtype=torch.int32)
        seconds = best_seconds(index_scores, q, weights, codes, scales, table, row_seq, counts, visible)
        report(f"index scores, {rows} rows, {visible} entries", 2 * rows * 8 * visible * 128, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--instruction-set", default="auto", choices=("auto", *load_cpu_ops().instruction_sets())
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cpu.use(load_cpu_ops().Context(args.threads, args.instruction_set))
    print(f"{args.threads} threads, {cpu.context().instruction_set}")
    with torch.inference_mode():
        products()
        experts()
        attention()
        index()


if __name__ == "__main__":
    main()
