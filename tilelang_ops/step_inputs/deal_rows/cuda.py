"""deal_rows on CUDA: every block sums the sequences' rows in shared memory; a thread for each row."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
CAPACITIES = (256, 4096)  # sequences; a program for each


@cuda_kernel(
    builds=lambda model: [{"capacity": CAPACITIES[0], "width": model.engram_max_ngram_size}],
)
def kernel(capacity: int, width: int):
    """At most `capacity` sequences; n-gram windows of `width` columns, or none for 0."""
    num_rows, num_seqs, num_bounds = T.dynamic("num_rows"), T.dynamic("num_seqs"), T.dynamic("num_bounds")
    window_rows = T.dynamic("window_rows")
    columns = max(1, width)

    @T.prim_func
    def deal_rows(
        seqlens_q: T.Tensor((num_seqs,), "int32"),
        cu_seqlens_q: T.Tensor((num_bounds,), "int32"),
        seqlens_k: T.Tensor((num_seqs,), "int32"),
        input_ids: T.Tensor((num_rows,), "int32"),
        ngram_ids: T.Tensor((window_rows, columns), "int32"),
        new_cu: T.Tensor((num_bounds,), "int32"),
        new_lens: T.Tensor((num_seqs,), "int32"),
        row_seq: T.Tensor((num_rows,), "int32"),
        positions: T.Tensor((num_rows,), "int32"),
        new_ids: T.Tensor((num_rows,), "int32"),
        new_ngram_ids: T.Tensor((window_rows, columns), "int32"),
    ):
        with T.Kernel(T.ceildiv(T.max(num_rows, num_seqs), THREADS), threads=THREADS) as block:
            ends = T.alloc_shared((capacity,), "int32")
            thread = T.get_thread_binding()
            # Conditions on a register lower several times faster than on an expression of threads.
            place = T.alloc_var("int32", init=block * THREADS + thread)
            for i in T.Parallel(capacity):
                ends[i] = T.if_then_else(i < num_seqs, seqlens_q[T.min(i, num_seqs - 1)], 0)
            T.cumsum(ends)
            if place == 0:
                new_cu[0] = 0
            if place < num_seqs:
                new_cu[place + 1] = ends[place]
                planned = cu_seqlens_q[place + 1] - cu_seqlens_q[place]
                new_lens[place] = seqlens_k[place] - planned + seqlens_q[place]
            if place < num_rows:
                low = T.alloc_var(
                    "int32", init=0
                )  # the first sequence that ends behind the row: low ... high
                high = T.alloc_var("int32", init=num_seqs - 1)
                for _ in T.serial(capacity.bit_length()):
                    if low < high:
                        middle = T.alloc_var("int32", init=(low + high) // 2)
                        if ends[middle] > place:
                            high = middle
                        else:
                            low = middle + 1
                first = T.alloc_var("int32", init=cu_seqlens_q[low])
                count = T.alloc_var("int32", init=cu_seqlens_q[low + 1] - first)
                ahead = T.alloc_var("int32", init=place - ends[low] + seqlens_q[low])
                old = T.alloc_var("int32", init=first + T.min(ahead, count - 1))
                row_seq[place] = low
                positions[place] = seqlens_k[low] - count + ahead
                new_ids[place] = input_ids[old]
                if width > 0:
                    for j in T.vectorized(columns):
                        new_ngram_ids[place, j] = ngram_ids[old, j]

    return deal_rows


def run(
    seqlens_q: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, input_ids: Tensor, ngram_ids: Tensor
) -> tuple[Tensor, ...]:
    num_seqs, num_rows = seqlens_q.shape[0], input_ids.shape[0]
    capacity = next((c for c in CAPACITIES if num_seqs <= c), None)
    assert capacity is not None, f"{num_seqs=} of at most {CAPACITIES[-1]}"
    width = ngram_ids.shape[1]
    sizes = [num_rows * width, num_rows, num_rows, num_rows, num_seqs, num_seqs + 1]
    # One piece of memory, so that one launch may copy all of it to where a graph reads it.
    windows, row_seq, positions, new_ids, new_lens, new_cu = input_ids.new_empty(sum(sizes)).split(sizes)
    new_ngram_ids = windows.view(num_rows, width)
    windows = (ngram_ids, new_ngram_ids) if width else ngram_ids.new_empty(2, 1, 1).unbind()
    program = kernel(capacity=capacity, width=width)
    given = seqlens_q, cu_seqlens_q, seqlens_k, input_ids, windows[0]
    program(*given, new_cu, new_lens, row_seq, positions, new_ids, windows[1])
    return new_cu, new_lens, row_seq, positions, new_ids, new_ngram_ids
