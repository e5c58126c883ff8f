"""Kernels of other libraries in the place of our own, chosen by name: DEEPINFER_EXTERNAL_KERNELS.

None is used by default, and none has run here: they need an SM100 GPU. A library serves an operator where its
documented function reads our tensors as they lie:

    deep_gemm     gemm.linear                  bf16_gemm_nt
                  indexer.index_scores         fp8_fp4_paged_mqa_logits
    flash_mla     attention.sparse_attention   flash_mla_with_kvcache
    deep_select   kv_index.select_entries      topk

DeepGEMM's products of FP8 and FP4 are not among them: they take weights and scales as a checkpoint has them
and activations as codes, while our operators get weights packed for our kernels and activations in bfloat16.

What a library's function cannot serve, such as caches in float32, is an error: there is no second choice.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilelang_ops.attention.sparse_attention.op import MAIN_BYTES, WIDTH, WINDOW_BYTES
from tilelang_ops.common.dispatch import register
from tilelang_ops.common.numerics import encode_mxfp4
from tilelang_ops.indexer.index_scores.op import CODE_BYTES, SCALE_BYTES
from tilelang_ops.kv_index.select_entries.op import entries_of

Run = Callable[..., Tensor]
KEYS_AT_ONCE = 64  # FlashMLA takes lists of keys in multiples of it
MAX_SELECTED = 4096  # DeepSelect
PAGES = (32, 64, 128)  # entries of a block that DeepGEMM reads
NOWHERE = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Library:
    """A package and the operators that it can serve.

    Attributes:
        address: where it is installed from.
        operators: operator's package -> of the imported module, the function with the operator's signature.
    """

    address: str
    operators: Mapping[str, Callable[[ModuleType], Run]]


def use_external_kernels(names: Sequence[str], device: torch.device) -> None:
    """Let the libraries `names` serve their operators on the GPUs of this process.

    Args:
        names: of `LIBRARIES`; the later of two that serve the same operator does.
        device: where the engine runs.

    Raises:
        ValueError: an unknown name, a package that is not installed, a device that is no SM100 GPU.
    """
    for name in names:
        if name not in LIBRARIES:
            raise ValueError(f"there are no kernels of {name!r} here, only of {', '.join(LIBRARIES)}")
    if not names:
        return
    where = f"DEEPINFER_EXTERNAL_KERNELS={','.join(names)}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10:
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ValueError(f"{where} needs an SM100 GPU, the engine runs on {kind}; unset it")
    for name in names:
        library = LIBRARIES[name]
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"{where}: the package {name} cannot be imported ({error}); install it from "
                f"{library.address} or leave it out"
            ) from error
        for operator, make in library.operators.items():
            register(operator, "cuda", make(module))


def _linear(deep_gemm: ModuleType) -> Run:
    def run(x: Tensor, weight: Tensor, dtype: torch.dtype, num_parts: int) -> Tensor:
        """`tilelang_ops.gemm.linear`; a weight of several terms takes one product and a sum."""
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype if num_parts == 1 else torch.float32)
        deep_gemm.bf16_gemm_nt(x.contiguous(), weight, out)
        return out if num_parts == 1 else out.unflatten(1, (num_parts, -1)).sum(1).to(dtype)

    return run


def _index_scores(deep_gemm: ModuleType) -> Run:
    def run(
        q: Tensor,
        weights: Tensor,
        code_pool: Tensor,
        scale_pool: Tensor | None,
        block_tables: Tensor,
        row_seq: Tensor,
        num_visible: Tensor,
        max_visible: int,
    ) -> Tensor:
        """`tilelang_ops.indexer.index_scores`: every row is a request of one query.

        Queries are encoded again, which is exact: they are MXFP4 values already.
        """
        keys = _index_section(code_pool, scale_pool)
        codes, scales = encode_mxfp4(q)  # [Q, heads, 64], [Q, heads, 4]
        query = codes.view(torch.int8).unsqueeze(1), scales.view(torch.int32).movedim(2, 1)
        lengths = num_visible.unsqueeze(1).contiguous()
        scores = deep_gemm.fp8_fp4_paged_mqa_logits(
            query,
            keys,
            weights.float().contiguous(),
            lengths,
            block_tables.index_select(0, row_seq),
            deep_gemm.get_paged_mqa_logits_metadata(lengths, keys.shape[1], deep_gemm.get_num_sms()),
            max_visible,
            clean_logits=False,
        )
        columns = torch.arange(max_visible, device=q.device)
        return scores.masked_fill_(columns >= lengths, -torch.inf)

    return run


def _index_section(code_pool: Tensor, scale_pool: Tensor | None) -> Tensor:
    """uint8 [blocks, entries, 1, 68]: of each block the codes of all entries, then the scales of all.

    Raises:
        ValueError: the pools are not the two halves of such sections.
    """
    blocks, entries = code_pool.shape[:2]
    is_section = (
        scale_pool is not None
        and scale_pool.data_ptr() - code_pool.data_ptr() == entries * CODE_BYTES
        and code_pool.stride()[1:] == (CODE_BYTES, 1)
        and scale_pool.stride()[1:] == (SCALE_BYTES, 1)
        and (blocks == 1 or code_pool.stride(0) == scale_pool.stride(0))
    )
    if not is_section or entries not in PAGES:
        raise ValueError(
            f"deep_gemm scores MXFP4 keys in blocks of {PAGES} entries, scales behind codes; not "
            f"{code_pool.dtype} {code_pool.shape=} {code_pool.stride()=}"
        )
    width = CODE_BYTES + SCALE_BYTES
    stride = code_pool.stride(0) if blocks > 1 else entries * width
    return code_pool.as_strided((blocks, entries, 1, width), (stride, width, width, 1))


def _sparse_attention(flash_mla: ModuleType) -> Run:
    def run(
        q: Tensor,
        window_pool: Tensor,
        window_index: Tensor,
        main_pool: Tensor | None,
        main_index: Tensor | None,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        """`tilelang_ops.attention.sparse_attention`: every row is a request of one query."""
        heads = q.shape[1]
        padding = (64 if heads <= 64 else 128) - heads
        if q.dtype != torch.bfloat16 or padding < 0 or window_pool.shape[2] != WINDOW_BYTES:
            raise ValueError(
                f"flash_mla attends with bfloat16 queries of at most 128 heads over FP8 records; not "
                f"{q.dtype} {q.shape=} {window_pool.dtype} {window_pool.shape=}"
            )
        extra = {}
        if main_pool is not None and main_index is not None and main_index.shape[1] > 0:
            if main_pool.shape[2] != MAIN_BYTES:
                raise ValueError(f"flash_mla reads FP4 records; not {main_pool.dtype} {main_pool.shape=}")
            extra = {
                "extra_k_cache": main_pool.unsqueeze(2),
                "extra_indices_in_kvcache": _whole_lists(main_index),
            }
        if padding > 0:
            q, sink = pad(q, (0, 0, 0, padding)), pad(sink, (0, padding))
        out, _ = flash_mla.flash_mla_with_kvcache(
            q.unsqueeze(1),
            window_pool.unsqueeze(2),
            None,
            None,
            WIDTH,
            flash_mla.get_mla_metadata()[0],
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=_whole_lists(window_index),
            attn_sink=sink,
            **extra,
        )
        return out[:, 0, :heads]

    return run


def _whole_lists(index: Tensor) -> Tensor:
    """int32 [Q, 1, n] of [Q, width]: n a multiple of `KEYS_AT_ONCE`, not zero, filled up with -1."""
    width = index.shape[1]
    whole = max(1, -(-width // KEYS_AT_ONCE)) * KEYS_AT_ONCE
    return pad(index, (0, whole - width), value=-1).unsqueeze(1)


def _select_entries(deep_select: ModuleType) -> Run:
    row_bytes = deep_select.get_stride_requirement()[0]

    def run(scores: Tensor, k: int, blocks: Tensor | None = None, block_size: int = 0) -> Tensor:
        """`tilelang_ops.kv_index.select_entries`, but for ties: any of equal scores may be chosen."""
        if k > MAX_SELECTED:
            raise ValueError(f"deep_select selects at most {MAX_SELECTED} entries, not {k}")
        width = scores.shape[1]
        missing = -width % (row_bytes // scores.element_size())
        if missing > 0 or not scores.is_contiguous():
            scores = pad(scores, (0, missing), value=-torch.inf).contiguous()
        values, columns = deep_select.topk(
            scores, k, indices_type=torch.int32, sorted_index=True, abort_when_nan_found=False
        )
        # What is impossible goes behind the others: a place beyond the row's end among it, and a NaN's mark.
        is_entry = (values > -torch.inf) & (columns < width)
        columns = torch.where(is_entry, columns, NOWHERE).sort(1).values
        return entries_of(torch.where(columns < NOWHERE, columns, -1), blocks, block_size)

    return run


LIBRARIES: dict[str, Library] = {
    "deep_gemm": Library(
        "https://github.com/deepseek-ai/DeepGEMM",
        {"tilelang_ops.gemm.linear": _linear, "tilelang_ops.indexer.index_scores": _index_scores},
    ),
    "flash_mla": Library(
        "https://github.com/deepseek-ai/FlashMLA",
        {"tilelang_ops.attention.sparse_attention": _sparse_attention},
    ),
    "deep_select": Library(
        "https://github.com/deepseek-ai/DeepSelect",
        {"tilelang_ops.kv_index.select_entries": _select_entries},
    ),
}
