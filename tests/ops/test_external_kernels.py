"""Kernels of other libraries: stand-ins for the packages check what they are called with, and compute it.

A stand-in takes what the library's documentation names: shapes, dtypes and layouts. Its result is the meaning
of the library's function in torch, so what our functions make of it can be compared with our operators'.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.parts import build_parts
from deepinfer.ops.external_kernels import LIBRARIES, use_external_kernels
from deepinfer.settings import Settings
from tilelang_ops.attention.sparse_attention import reference as attention_reference
from tilelang_ops.common import dispatch
from tilelang_ops.common.numerics import (
    decode_fp4,
    decode_fp8,
    decode_mxfp4,
    encode_fp4,
    encode_fp8,
    encode_mxfp4,
)
from tilelang_ops.common.packing import split_float32
from tilelang_ops.gemm.linear import reference as linear_reference
from tilelang_ops.indexer.index_scores import reference as scores_reference
from tilelang_ops.kv_index.select_entries import reference as select_reference

GPU = torch.device("cuda", 0)
SMS = 148


@pytest.fixture(autouse=True)
def sm100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with an SM100 GPU, to all appearances, whose dispatch is as before after the test."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "B200")
    monkeypatch.setattr(dispatch, "_registered", dict(dispatch._registered))
    dispatch._load.cache_clear()
    yield
    dispatch._load.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **functions) -> ModuleType:
    """A package of this name with these functions."""
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def run_of(operator: str, *names: str):
    """What serves an operator on the GPU when the libraries `names` are chosen."""
    use_external_kernels(names, GPU)
    return dispatch.backend(f"tilelang_ops.{operator}", GPU).run


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor) -> None:
    assert a.dtype == b.dtype == torch.bfloat16 and d.dtype in (torch.bfloat16, torch.float32)
    assert a.is_contiguous() and b.is_contiguous() and d.is_contiguous()
    assert d.shape == (a.shape[0], b.shape[0]) and a.shape[1] == b.shape[1]
    d.copy_(a.float() @ b.float().T)


@pytest.mark.parametrize(("parts", "dtype"), [(1, torch.bfloat16), (1, torch.float32), (3, torch.float32)])
def test_linear(monkeypatch: pytest.MonkeyPatch, parts: int, dtype: torch.dtype) -> None:
    installed(monkeypatch, "deep_gemm", bf16_gemm_nt=bf16_gemm_nt)
    x, whole = torch.randn(5, 64).bfloat16(), torch.randn(24, 64)
    weight = split_float32(whole) if parts == 3 else whole.bfloat16()
    out = run_of("gemm.linear", "deep_gemm")(x, weight, dtype, parts)
    torch.testing.assert_close(out, linear_reference.run(x, weight, dtype, parts), rtol=1e-4, atol=1e-4)


def paged_logits(q, keys, weights, lengths, tables, schedule, width, *, clean_logits):
    (codes, scales), (rows, heads) = q, weights.shape
    assert codes.dtype == torch.int8 and codes.shape == (rows, 1, heads, 64) and codes.is_contiguous()
    assert scales.dtype == torch.int32 and scales.shape == (rows, 1, heads) and scales.is_contiguous()
    entries, one, fields = keys.shape[1:]
    assert keys.dtype == torch.uint8 and (one, fields) == (1, 68) and keys.stride()[1:] == (68, 68, 1)
    assert weights.dtype == torch.float32 and lengths.dtype == tables.dtype == torch.int32
    assert lengths.shape == (rows, 1) and lengths.is_contiguous() and tables.shape[0] == rows
    assert schedule == (lengths.shape, entries, SMS) and not clean_logits
    query = decode_mxfp4(codes[:, 0].view(torch.uint8), scales[:, 0].unsqueeze(-1).view(torch.uint8))
    out = torch.full((rows, 512), 7e30)[:, :width]
    for row, length in enumerate(lengths[:, 0].tolist()):
        for j in range(length):
            section = keys[tables[row, j // entries]].flatten()
            place = j % entries
            scale = section[entries * 64 + place * 4 :][:4]
            key = decode_mxfp4(section[place * 64 :][:64], scale)
            out[row, j] = weights[row] @ (query[row] @ key).relu()
    return out


def test_index_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(
        monkeypatch,
        "deep_gemm",
        fp8_fp4_paged_mqa_logits=paged_logits,
        get_paged_mqa_logits_metadata=lambda lengths, entries, sms: (lengths.shape, entries, sms),
        get_num_sms=lambda: SMS,
    )
    rows, heads, entries, blocks = 3, 4, 32, 5
    section = torch.zeros(blocks, entries * 68 + 92, dtype=torch.uint8)  # other sections lie behind
    codes, scales = encode_mxfp4(torch.randn(blocks, entries, 128))
    section[:, : entries * 64] = codes.flatten(1)
    section[:, entries * 64 : entries * 68] = scales.flatten(1)
    code_pool = section[:, : entries * 64].unflatten(1, (entries, 64))
    scale_pool = section[:, entries * 64 : entries * 68].unflatten(1, (entries, 4))
    q = decode_mxfp4(*encode_mxfp4(torch.randn(rows, heads, 128) * 3)).bfloat16()
    args = (
        q,
        torch.randn(rows, heads),
        code_pool,
        scale_pool,
        torch.tensor([[4, 0, 2], [1, 3, 3]], dtype=torch.int32),
        torch.tensor([1, 0, 0], dtype=torch.int32),
        torch.tensor([40, 0, 70], dtype=torch.int32),
        80,
    )
    run = run_of("indexer.index_scores", "deep_gemm")
    torch.testing.assert_close(run(*args), scores_reference.run(*args), rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match=r"blocks of \(32, 64, 128\) entries.*float32"):
        run(q, args[1], torch.zeros(blocks, entries, 128), None, *args[4:])
    with pytest.raises(ValueError, match="scales behind codes"):
        run(q, args[1], code_pool, scale_pool.clone(), *args[4:])


def attend(q, cache, block_table, lengths, width, meta, *, softmax_scale, is_fp8_kvcache, indices, **rest):
    rows, one, heads, channels = q.shape
    assert q.dtype == torch.bfloat16 and one == 1 and heads in (64, 128) and channels == width == 512
    assert block_table is None and lengths is None and meta == "meta" and is_fp8_kvcache
    sink = rest.pop("attn_sink")
    assert sink.dtype == torch.float32 and sink.shape == (heads,)
    lists = [(cache, indices, 528)]
    if rest:
        lists.append((rest.pop("extra_k_cache"), rest.pop("extra_indices_in_kvcache"), 288))
    assert not rest
    for pool, index, record_bytes in lists:
        assert pool.dtype == torch.uint8 and pool.shape[2:] == (1, record_bytes)
        assert pool.stride(1) == record_bytes and pool.stride(3) == 1
        assert index.dtype == torch.int32 and index.shape[:2] == (rows, 1) and index.shape[2] % 64 == 0
        assert index.shape[2] > 0 and index.stride(2) == 1
    out = torch.zeros_like(q)
    for row in range(rows):
        keys = []
        for pool, index, record_bytes in lists:
            chosen = index[row, 0][index[row, 0] >= 0].long()
            records = pool[chosen // pool.shape[1], chosen % pool.shape[1], 0]
            split = 512 if record_bytes == 528 else 256
            decode = decode_fp8 if record_bytes == 528 else decode_fp4
            keys.append(decode(records[:, :split], records[:, split:]))
        key = torch.cat(keys)
        logits = q[row, 0].float() @ key.T * softmax_scale
        share = torch.cat([logits, sink[:, None]], 1).softmax(1)[:, :-1]
        out[row, 0] = (share @ key).bfloat16()
    return out, None


@pytest.mark.parametrize("heads", [64, 6])
@pytest.mark.parametrize("has_main", [True, False])
def test_sparse_attention(monkeypatch: pytest.MonkeyPatch, heads: int, has_main: bool) -> None:
    functions = {"flash_mla_with_kvcache": attend, "get_mla_metadata": lambda: ("meta", None)}
    installed(monkeypatch, "flash_mla", **functions)
    window = torch.cat(encode_fp8(torch.randn(2, 8, 512)), -1)
    main = torch.cat(encode_fp4(torch.randn(3, 4, 512)), -1)
    window_index = torch.tensor([[-1, 15, 3], [-1, -1, -1]], dtype=torch.int32)
    main_index = torch.tensor([[11, -1], [-1, -1]], dtype=torch.int32)
    args = (
        torch.randn(2, heads, 512).bfloat16(),
        window,
        window_index,
        main if has_main else None,
        main_index if has_main else None,
        torch.randn(heads),
        512**-0.5,
    )
    run = run_of("attention.sparse_attention", "flash_mla")
    torch.testing.assert_close(run(*args), attention_reference.run(*args), rtol=2.0**-7, atol=1e-6)
    with pytest.raises(ValueError, match=r"at most 128 heads over FP8 records; not .*float32"):
        run(args[0].float(), *args[1:])
    with pytest.raises(ValueError, match="over FP8 records"):
        run(args[0], torch.zeros(2, 8, 512), *args[2:])
    if has_main:
        with pytest.raises(ValueError, match=r"FP4 records; not .*float32"):
            run(*args[:3], torch.zeros(3, 4, 512), *args[4:])


def topk(scores: Tensor, k: int, *, indices_type, sorted_index, abort_when_nan_found):
    assert scores.stride(1) == 1 and scores.stride(0) * 4 % 1024 == 0 and scores.dtype == torch.float32
    assert indices_type == torch.int32 and sorted_index and not abort_when_nan_found
    count = min(k, scores.shape[1])
    _, columns = scores.topk(count)
    columns = columns.sort(1).values
    behind = torch.full((scores.shape[0], k - count), 2**31 - 1)
    values = torch.cat([scores.gather(1, columns), behind.float().fill_(-torch.inf)], 1)
    return values, torch.cat([columns, behind], 1).int()


@pytest.mark.parametrize(("width", "k"), [(256, 8), (70, 8), (300, 512)])
def test_select_entries(monkeypatch: pytest.MonkeyPatch, width: int, k: int) -> None:
    installed(monkeypatch, "deep_select", topk=topk, get_stride_requirement=lambda: (1024, 32))
    scores = torch.randperm(4 * width).float().view(4, width)  # no two are equal
    scores[1, 3:] = -torch.inf
    scores[2] = -torch.inf
    run = run_of("kv_index.select_entries", "deep_select")
    chosen = run(scores, k)
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen, select_reference.run(scores, k))
    if width % 2 == 0:
        blocks = torch.randperm(width)[: width // 2].sort().values.int().expand(4, -1)
        assert torch.equal(run(scores, k, blocks, 2), select_reference.run(scores, k, blocks, 2))
    with pytest.raises(ValueError, match="at most 4096 entries, not 5000"):
        run(scores, 5000)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no kernels of 'deepgemm' here, only of deep_gemm, flash_mla, deep"):
        use_external_kernels(["deepgemm"], GPU)
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # an import fails, whatever is installed
    before = dict(dispatch._registered)
    with pytest.raises(ValueError, match=r"package flash_mla cannot be imported.*github.com/deepseek-ai/Fl"):
        use_external_kernels(["flash_mla"], GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    with pytest.raises(ValueError, match=r"EXTERNAL_KERNELS=flash_mla needs an SM100 GPU, .* on H200"):
        use_external_kernels(["flash_mla"], GPU)
    with pytest.raises(ValueError, match="SM100 GPU, the engine runs on cpu"):
        use_external_kernels(["flash_mla"], torch.device("cpu"))
    use_external_kernels([], torch.device("cpu"))
    assert dispatch._registered == before


def test_the_setting_names_the_libraries() -> None:
    """A name of the setting is a library's, and the other way round."""
    chosen = Settings.from_env({"DEEPINFER_EXTERNAL_KERNELS": ",".join(LIBRARIES)})
    assert chosen.external_kernels == tuple(LIBRARIES)
    assert Settings().external_kernels == ()


def test_an_engine_refuses_libraries_where_they_cannot_serve() -> None:
    settings = Settings(accelerator="cpu", external_kernels=("deep_gemm",))
    with pytest.raises(ValueError, match="EXTERNAL_KERNELS=deep_gemm needs an SM100 GPU"):
        build_parts(EngineArgs(model="no/such/checkpoint"), settings)
