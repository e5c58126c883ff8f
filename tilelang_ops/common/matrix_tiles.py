"""Tiles of the matrix products: how large they are and where channels are cut.

They decide on time, not on bits; `split_count` alone fixes the order of sums: by the weight, never the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from tilelang_ops.common.packing import BLOCK

PROCESSORS = 132  # of an H200
MANY_BLOCKS = PROCESSORS  # from here on a block sums all its segments
TILE_COSTS = {
    64: 30,
    96: 34,
    128: 38,
    192: 52,
    256: 65,
}  # activation rows of a tile -> time of a step on an H200, us / 100
SUM_COST, SUM_BYTES = 200, 30000  # of adding segments up: us / 100, and bytes of one of these
FEW_ROWS = 32  # up to here tiles of FP8 weights have 64 weight rows: twice as many processors read
# Activation rows of an expert in the mean, at most -> of its tile, so that few need a second one.
FEW_EXPERT_ROWS = {8: 16, 20: 32, 36: 48, 64: 64}
# Activation rows of a tile for more -> its weight rows, and time of a step on an H200, us / 100.
GATED_TILES = {128: (256, 78)}
PLAIN_TILES = {128: (256, 75), 224: (128, 64)}


def tile_rows(num_rows: int, column_tiles: int, choices: tuple[int, ...]) -> int:
    """Activation rows of a tile: those that take the least time, by rounds of blocks over the processors.

    Args:
        num_rows: of the batch.
        column_tiles: blocks of one row of tiles.
        choices: keys of `TILE_COSTS`.
    """

    def cost(rows: int) -> int:
        return -(-column_tiles * -(-num_rows // rows) // PROCESSORS) * TILE_COSTS[rows]

    return min(choices, key=cost)


def tile_of_splits(
    num_rows: int, columns: int, width: int, num_splits: int, choices: tuple[int, ...]
) -> tuple[bool, int]:
    """How the rows of a product whose channels are summed in segments are cut: what takes the least time.

    Args:
        num_rows: of the batch.
        columns: weight rows.
        width: channels.
        num_splits: segments, more than one.
        choices: keys of `TILE_COSTS`.

    Returns:
        whether a block sums all segments, or each is a block's and a program behind adds them up; and the
        activation rows of a tile.
    """
    tiles, steps = -(-columns // 128), -(-width // BLOCK)

    def cost(choice: tuple[bool, int]) -> float:
        in_turn, rows = choice
        blocks = tiles * -(-num_rows // rows) * (1 if in_turn else num_splits)
        time = -(-blocks // PROCESSORS) * TILE_COSTS[rows] * (steps if in_turn else steps // num_splits)
        return time if in_turn else time + SUM_COST + 8 * num_splits * num_rows * columns / SUM_BYTES

    return min(((in_turn, rows) for in_turn in (False, True) for rows in choices), key=cost)


def expert_rows(num_rows: int, num_experts: int, columns: int, tiles: Mapping[int, tuple[int, int]]) -> int:
    """Activation rows of the experts' tiles, by the mean of an expert's.

    Args:
        num_rows, num_experts: of the batch, and experts that they are spread over.
        columns: weight rows of an expert.
        tiles: `GATED_TILES` or `PLAIN_TILES`.
    """
    mean = num_rows / num_experts
    for most, rows in FEW_EXPERT_ROWS.items():
        if mean <= most:
            return rows

    def cost(rows: int) -> int:
        block_m, time = tiles[rows]
        blocks = num_experts * -(-columns // block_m) * ceil(mean / rows)
        return -(-blocks // PROCESSORS) * time

    return min(tiles, key=cost)


def split_count(columns: int, width: int) -> int:
    """Segments that the channels of a weight are summed in: enough blocks where weight rows are few.

    A property of the weight, not of the batch: it fixes the order of every row's sum.
    """
    tiles, steps = -(-columns // 128), -(-width // BLOCK)
    return max(
        s for s in range(1, steps + 1) if s == 1 or (steps % s == 0 and tiles * s <= 56 and steps >= 8 * s)
    )


def tile(fmt: str, block_n: int, width: int, arch: str) -> dict[str, int | bool | tuple[int, ...]]:
    """Weight rows of a tile of `block_n` activation rows, and its pipeline: what was fastest on an H200.

    Args:
        fmt, arch: as in `matrix_program`.
        block_n: activation rows.
        width: channels of a segment.
    """
    if arch == "sm_100a" or fmt == "bfloat16" or width % (4 * BLOCK):
        return {"block_m": 128, "stages": 4, "depth": 1}
    beside = {"depth": 4, "is_overlapped": True}
    if fmt == "mxfp4":
        if block_n == 224:
            return {"block_m": 128, "stages": 3, **beside, "depth": 2, "pieces": (112, 112)}
        if block_n == 128:
            return {"block_m": 256, "stages": 2, "granule": 32, "by_expert": True, **beside}
        if block_n == 64:
            return {"block_m": 128, "stages": 2, "depth": 4, "blocks_per_sm": 2}
        return {"block_m": 256, "stages": 3, **beside}
    if block_n >= 192:
        return {"block_m": 128, "stages": 4, "depth": 1}
    if block_n == 32:
        return {"block_m": 64, "stages": 3, **beside}
    return {"block_m": 128, "stages": 2, **beside}
