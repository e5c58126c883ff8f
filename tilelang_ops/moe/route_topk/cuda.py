"""route_topk on CUDA: a warp takes the best expert of a row's that are left, once per choice.

All threads of a block make scores, whose logarithm takes long: a block has one row where there are few.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.moe.route_topk.reference import WEIGHT_EPS

ROWS = 4  # of a block of many, one a warp
THREADS = ROWS * 32
FEW_ROWS = 512  # up to here a block has one
MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000  # bits of a float32 without its sign, and of infinity
LEAST = -(2**31)  # below the keys of all numbers: of what was taken, and of NaN


@cuda_kernel(
    builds=lambda model: [
        {"num_experts": experts, "num_selected": selected, "has_images": has_images, "rows": rows}
        for experts, selected in (
            (model.n_routed_experts, model.num_experts_per_tok),
            (model.dspark_n_routed_experts, model.dspark_num_experts_per_tok),
        )
        for has_images in (False, True)
        for rows in (1, ROWS)
    ]
)
def kernel(num_experts: int, num_selected: int, has_images: bool, rows: int):
    n = T.dynamic("n")
    steps = T.ceildiv(num_experts, 32)

    def score_of(logit):
        return T.sqrt(T.max(logit, 0.0) + T.log1p(T.exp(-T.abs(logit))))

    def order(value):
        """An integer, larger for larger values: a maximum of integers takes a warp one instruction."""
        bits = T.reinterpret(T.if_then_else(value == 0.0, 0.0, value), "int32")
        key = bits ^ ((bits >> 31) & MAGNITUDE)
        return T.if_then_else((bits & MAGNITUDE) > INFINITY, LEAST, key)

    @T.prim_func
    def route_topk(
        logits: T.Tensor((n, num_experts), "float32"),
        bias: T.Tensor((num_experts,), "float32"),
        image_bias: T.Tensor((num_experts,), "float32"),
        is_image: T.Tensor((n,), "bool"),
        ids: T.Tensor((n, num_selected), "int32"),
        weights: T.Tensor((n, num_selected), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            thread = T.get_thread_binding()
            own, lane = thread // 32 % rows, thread % 32
            keys = T.alloc_local((steps,), "int32")  # expert = step * 32 + lane
            best = T.alloc_var("int32")
            place = T.alloc_var("int32")
            scores = T.alloc_shared((rows, num_experts), "float32")
            shifts = T.alloc_shared((rows, num_experts), "float32")
            chosen = T.alloc_shared((rows, num_selected), "int32")
            for r, expert in T.Parallel(rows, num_experts):
                row = T.min(block * rows + r, n - 1)
                shifts[r, expert] = bias[expert]
                if has_images:
                    shifts[r, expert] = T.if_then_else(is_image[row], image_bias[expert], bias[expert])
                scores[r, expert] = score_of(logits[row, expert])
            T.sync_threads()
            for k in T.unroll(steps):
                keys[k] = LEAST
                if k * 32 + lane < num_experts:
                    keys[k] = order(scores[own, k * 32 + lane] + shifts[own, k * 32 + lane])
            for slot in T.serial(num_selected):
                best = LEAST
                for k in T.unroll(steps):
                    best = T.max(best, keys[k])
                best = T.warp_reduce_max(best)
                place = num_experts - 1
                for k in T.unroll(steps):
                    if keys[k] == best:
                        place = T.min(place, k * 32 + lane)
                place = T.warp_reduce_min(place)
                for k in T.unroll(steps):
                    if k * 32 + lane == place:
                        keys[k] = LEAST
                if thread == own * 32:
                    chosen[own, slot] = place
            T.sync_threads()
            for r, slot in T.Parallel(rows, num_selected):
                total = T.alloc_var("float32")
                total = 0.0
                for other in T.serial(num_selected):
                    total = total + scores[r, chosen[r, other]]
                if block * rows + r < n:
                    ids[block * rows + r, slot] = chosen[r, slot]
                    score = scores[r, chosen[r, slot]]
                    weights[block * rows + r, slot] = score / (total + WEIGHT_EPS) * scale

    return route_topk


def run(
    logits: Tensor,
    bias: Tensor,
    num_selected: int,
    scale: float,
    image_bias: Tensor | None,
    is_image: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, num_selected, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, num_selected, dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        program = kernel(
            num_experts=num_experts,
            num_selected=num_selected,
            has_images=is_image is not None,
            rows=1 if num_rows <= FEW_ROWS else ROWS,
        )
        images = None if is_image is None else image_bias
        program(logits.contiguous(), bias, images, is_image, ids, weights, scale)
    return ids, weights
