"""route_topk on CUDA: a warp per row takes the best expert of those left, once per choice."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.moe.route_topk.reference import WEIGHT_EPS

ROWS = 4  # of a block, one a warp


@cuda_kernel(
    builds=lambda model: [
        {"num_experts": experts, "num_selected": selected, "has_images": has_images}
        for experts, selected in (
            (model.n_routed_experts, model.num_experts_per_tok),
            (model.dspark_n_routed_experts, model.dspark_num_experts_per_tok),
        )
        for has_images in (False, True)
    ]
)
def kernel(num_experts: int, num_selected: int, has_images: bool):
    n = T.dynamic("n")
    steps = T.ceildiv(num_experts, 32)

    def score_of(logit):
        return T.sqrt(T.max(logit, 0.0) + T.log1p(T.exp(-T.abs(logit))))

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
        with T.Kernel(T.ceildiv(n, ROWS), threads=ROWS * 32) as block:
            values = T.alloc_fragment((ROWS, 32, steps), "float32")  # expert = step * 32 + lane
            tops = T.alloc_fragment((ROWS, 32), "float32")
            places = T.alloc_fragment((ROWS, 32), "int32")
            best = T.alloc_fragment((ROWS,), "float32")
            place = T.alloc_fragment((ROWS,), "int32")
            chosen = T.alloc_shared((ROWS, num_selected), "int32")
            scores = T.alloc_shared((ROWS, num_selected), "float32")
            for r, lane in T.Parallel(ROWS, 32):
                row = T.min(block * ROWS + r, n - 1)
                for k in T.unroll(steps):
                    expert = T.min(k * 32 + lane, num_experts - 1)
                    shift = bias[expert]
                    if has_images:
                        shift = T.if_then_else(is_image[row], image_bias[expert], bias[expert])
                    value = score_of(logits[row, expert]) + shift
                    values[r, lane, k] = T.if_then_else(
                        k * 32 + lane < num_experts, value, -T.infinity("float32")
                    )
            for slot in T.serial(num_selected):
                for r, lane in T.Parallel(ROWS, 32):
                    top = T.alloc_var("float32")
                    top = -T.infinity("float32")
                    for k in T.unroll(steps):
                        top = T.max(top, values[r, lane, k])
                    tops[r, lane] = top
                T.reduce_max(tops, best, dim=1)
                for r, lane in T.Parallel(ROWS, 32):
                    first = T.alloc_var("int32")
                    first = num_experts
                    for k in T.unroll(steps):
                        if values[r, lane, k] == best[r]:
                            first = T.min(first, k * 32 + lane)
                    places[r, lane] = first
                T.reduce_min(places, place, dim=1)
                for r, lane in T.Parallel(ROWS, 32):
                    for k in T.unroll(steps):
                        if k * 32 + lane == place[r]:
                            values[r, lane, k] = -T.infinity("float32")
                for r in T.Parallel(ROWS):
                    chosen[r, slot] = T.min(place[r], num_experts - 1)  # a row of NaN has no best
            T.sync_threads()
            for r, slot in T.Parallel(ROWS, num_selected):
                scores[r, slot] = score_of(logits[T.min(block * ROWS + r, n - 1), chosen[r, slot]])
            T.sync_threads()
            for r, slot in T.Parallel(ROWS, num_selected):
                total = T.alloc_var("float32")
                total = 0.0
                for other in T.serial(num_selected):
                    total = total + scores[r, other]
                if block * ROWS + r < n:
                    ids[block * ROWS + r, slot] = chosen[r, slot]
                    weights[block * ROWS + r, slot] = scores[r, slot] / (total + WEIGHT_EPS) * scale

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
        program = kernel(num_experts=num_experts, num_selected=num_selected, has_images=is_image is not None)
        images = None if is_image is None else image_bias
        program(logits.contiguous(), bias, images, is_image, ids, weights, scale)
    return ids, weights
