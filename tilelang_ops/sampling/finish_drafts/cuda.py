"""finish_drafts on CUDA: a thread per sequence."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.sampling.finish_drafts.op import MAX_LOGIT, NO_DRAFTS

THREADS = 64


@cuda_kernel(builds=lambda model: [{"has_places": has_places} for has_places in (False, True)])
def kernel(has_places: bool):
    n, num_seqs, k, num_placed = (T.dynamic(x) for x in ("n", "num_seqs", "k", "num_placed"))

    @T.prim_func
    def finish_drafts(
        tokens: T.Tensor((k, n), "int32"),
        logits: T.Tensor((n, k), "float32"),
        temperatures: T.Tensor((k,), "float32"),
        offsets: T.Tensor((k,), "float32"),
        drafts: T.Tensor((num_seqs, k), "int32"),
        confidences: T.Tensor((num_seqs, k), "float32"),
        kept_logits: T.Tensor((num_seqs, k), "float32"),
        places: T.Tensor((num_placed,), "int32"),
        eos_token_id: T.int32,
        first: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_seqs, THREADS), threads=THREADS) as block:
            seq = block * THREADS + T.get_thread_binding()
            place = T.alloc_local((1,), "int32")
            token = T.alloc_local((1,), "int32")
            logit = T.alloc_local((1,), "float32")
            confidence = T.alloc_local((1,), "float32")
            is_over = T.alloc_local((1,), "int32")  # the text has ended
            if seq < num_seqs:
                place[0] = seq - first
                if has_places and seq >= first:
                    place[0] = places[seq]
                is_over[0] = 0
                for step in T.serial(k):
                    token[0] = T.if_then_else(seq < first, NO_DRAFTS, 0)
                    logit[0] = T.float32(0.0)
                    confidence[0] = T.float32(0.0)
                    if place[0] >= 0:
                        token[0] = tokens[step, place[0]]
                        logit[0] = logits[place[0], step]
                        if is_over[0] == 0:
                            scaled = logit[0] / temperatures[step] + offsets[step]
                            bounded = T.min(T.max(scaled, T.float32(-MAX_LOGIT)), T.float32(MAX_LOGIT))
                            confidence[0] = T.float32(1.0) / (T.float32(1.0) + T.exp(-bounded))
                        if token[0] == eos_token_id:
                            is_over[0] = 1
                    drafts[seq, step] = token[0]
                    kept_logits[seq, step] = logit[0]
                    confidences[seq, step] = confidence[0]

    return finish_drafts


def run(
    tokens: Tensor,
    logits: Tensor,
    temperatures: Tensor,
    offsets: Tensor,
    eos_token_id: int,
    drafts: Tensor,
    confidences: Tensor,
    kept_logits: Tensor,
    places: Tensor | None,
    first: int,
) -> None:
    kernel(has_places=places is not None)(
        tokens,
        logits,
        temperatures,
        offsets,
        drafts,
        confidences,
        kept_logits,
        drafts.view(-1) if places is None else places,
        eos_token_id,
        first,
    )
