"""combine_slots on CUDA: a block per row and tile of channels, 8 channels a thread."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(
    builds=lambda model: [
        {
            "width": model.hidden_size,
            "num_slots": slots,
            "source": "bfloat16",
            "result": "bfloat16",
            "is_weighted": is_weighted,
            "has_shared": True,
        }
        for slots in (model.num_experts_per_tok, model.dspark_num_experts_per_tok)
        for is_weighted in (False,)
    ]
)
def kernel(width: int, num_slots: int, source: str, result: str, is_weighted: bool, has_shared: bool):
    n, num_places = T.dynamic("n"), T.dynamic("num_places")
    step = 8 if width % 8 == 0 else 1
    parts = width // step

    @T.prim_func
    def combine_slots(
        outputs: T.Tensor((num_places, width), source),
        places: T.Tensor((n, num_slots), "int32"),
        weights: T.Tensor((n, num_slots), "float32"),
        shared: T.Tensor((n, width), source),
        out: T.Tensor((n, width), result),
    ):
        with T.Kernel(n, T.ceildiv(parts, THREADS), threads=THREADS) as (row, tile):
            for p in T.Parallel(THREADS):
                start = (tile * THREADS + p) * step
                if start < width:
                    total = T.alloc_local((step,), "float32")
                    part = T.alloc_local((num_slots, step), "float32")
                    extra = T.alloc_local((step,), "float32")
                    for s in T.unroll(num_slots):
                        place = T.max(places[row, s], 0)
                        for k in T.vectorized(step):
                            part[s, k] = T.cast(outputs[place, start + k], "float32")
                    if has_shared:
                        for k in T.vectorized(step):
                            extra[k] = T.cast(shared[row, start + k], "float32")
                    for k in T.unroll(step):
                        total[k] = 0.0
                    for s in T.unroll(num_slots):
                        if places[row, s] >= 0:
                            for k in T.unroll(step):
                                if is_weighted:
                                    total[k] = total[k] + part[s, k] * weights[row, s]
                                else:
                                    total[k] = total[k] + part[s, k]
                    if has_shared:
                        for k in T.unroll(step):
                            total[k] = total[k] + extra[k]
                    for k in T.vectorized(step):
                        out[row, start + k] = T.cast(total[k], result)

    return combine_slots


def run(
    outputs: Tensor, places: Tensor, weights: Tensor | None, shared: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (num_rows, num_slots), width = places.shape, outputs.shape[1]
    out = torch.empty(num_rows, width, dtype=dtype, device=outputs.device)
    source, result = (str(d).removeprefix("torch.") for d in (outputs.dtype, dtype))
    program = kernel(
        width=width,
        num_slots=num_slots,
        source=source,
        result=result,
        is_weighted=weights is not None,
        has_shared=shared is not None,
    )
    program(outputs, places, weights, shared, out)
    return out
