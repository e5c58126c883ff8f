"""All small inputs of a step into buffers of fixed shapes, which a captured graph reads.

The inputs of a step are matrices of int32, one behind the other in one array; so are the buffers. A table
says which matrix goes where:

    column   0            1     2      3            4      5       6
             source word  rows  width  target word  rows   width   value of what is left over
"""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend

COLUMNS = 7  # of the table


def pad_inputs(source: Tensor, table: Tensor, target: Tensor) -> None:
    """Copy every matrix of the table to the corner of its buffer and fill the rest of the buffer.

    Args:
        source: [words] int32.
        table: [num_matrices, 7] int32, on the same device; no buffer is smaller than its matrix or overlaps
            another.
        target: [words] int32, written where the table says.
    """
    assert table.dim() == 2 and table.shape[1] == COLUMNS, f"{table.shape=}"
    assert source.dim() == target.dim() == 1, f"{source.shape=} {target.shape=}"
    if table.shape[0] > 0:
        backend(__package__, source.device).run(source, table, target)
