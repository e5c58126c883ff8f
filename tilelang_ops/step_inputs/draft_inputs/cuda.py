"""draft_inputs on CUDA: one block for each sequence."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(builds=lambda model: [{"block_size": model.dspark_block_size, "window": model.sliding_window}])
def kernel(block_size: int, window: int):
    n = T.dynamic("n")
    width = window + block_size

    @T.prim_func
    def draft_inputs(
        anchors: T.Tensor((n,), "int32"),
        positions: T.Tensor((n,), "int32"),
        state_slots: T.Tensor((n,), "int32"),
        input_ids: T.Tensor((block_size, n), "int32"),
        block_positions: T.Tensor((block_size, n), "int32"),
        ring_index: T.Tensor((block_size, n), "int64"),
        window_index: T.Tensor((block_size, n, width), "int32"),
        ring: T.int32,
        noise_token_id: T.int32,
    ):
        with T.Kernel(n, threads=THREADS) as seq:
            thread = T.get_thread_binding()
            position = T.alloc_var("int32", init=positions[seq])
            base = T.alloc_var("int32", init=state_slots[seq] * ring)
            for i in T.serial(T.ceildiv(width, THREADS)):
                place = i * THREADS + thread
                if place < width:
                    seen = T.alloc_var("int32", init=position - window + place)
                    record = T.alloc_var("int32", init=-1)
                    if seen >= 0:
                        record = base + T.cast(T.cast(seen, "uint32") % T.cast(ring, "uint32"), "int32")
                    for row in T.unroll(block_size):
                        window_index[row, seq, place] = record
                    if place >= window:
                        ring_index[place - window, seq] = T.cast(record, "int64")
                        block_positions[place - window, seq] = seen
                        token = T.alloc_var("int32", init=noise_token_id)
                        if place == window:
                            token = anchors[seq]
                        input_ids[place - window, seq] = token

    return draft_inputs


def run(
    anchors: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    block_size: int,
    window: int,
    ring: int,
    noise_token_id: int,
) -> tuple[Tensor, ...]:
    n = anchors.shape[0]
    input_ids, block_positions = anchors.new_empty(2, block_size, n)
    records = torch.empty(block_size, n, dtype=torch.int64, device=anchors.device)
    index = anchors.new_empty(block_size, n, window + block_size)
    program = kernel(block_size=block_size, window=window)
    program(
        anchors,
        positions,
        state_slots,
        input_ids,
        block_positions,
        records,
        index,
        ring,
        noise_token_id,
    )
    return input_ids.flatten(), block_positions.flatten(), records.flatten(), index.flatten(0, 1)
