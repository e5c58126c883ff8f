"""Random weights: valid and of order one, one rank's share of a group, prefills that are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import LLM, SamplingParams, Settings
from deepinfer.checkpoint.dequantize import dequantize_fp4, dequantize_fp8
from deepinfer.checkpoint.loader import load_tokenizer, open_checkpoint, open_dummy
from deepinfer.models.deepseek_v41 import release
from deepinfer.models.deepseek_v41.dummy import DummyReader, DummyWeights, EvenExperts
from deepinfer.models.deepseek_v41.rank_share import CALL_MS, RankShare, skipped_work
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from deepinfer.runtime.cache_layout import CacheLayout
from deepinfer.runtime.caches import Caches
from deepinfer.runtime.random_caches import fill_with_random_records
from tests.checkpoint.configs import RELEASE
from tests.support.paths import V41_TINY
from tilelang_ops.common.numerics import decode_fp4, decode_fp8


def tiny_dummy(**args: Any) -> LLM:
    args = {"max_num_seqs": 4, "max_model_len": 1024, "load_format": "dummy"} | args
    return LLM(str(V41_TINY), settings=Settings(num_draft_tokens=2), **args)


def test_the_built_in_configuration_is_the_release() -> None:
    assert release.CONFIG == RELEASE
    checkpoint = open_dummy("DeepSeek-V4.1-Flash", None, 64, 64)
    config, share = checkpoint.config, checkpoint.share
    assert (config.n_routed_experts, config.num_hidden_layers, config.hidden_size) == (384, 40, 5120)
    assert share.resident_of("layers.0.ffn.experts", 384) == 7
    assert share.resident_of("mtp.0.ffn.experts", 128) == 2
    assert all(
        rows == pytest.approx(whole / 64, rel=4e-3)
        for rows, whole in zip(config.engram_num_embeddings, (384006168, 384016682))
    )
    tokenizer = load_tokenizer(checkpoint)
    assert len(tokenizer) == 129280 and tokenizer.undecodable_ids == ()
    assert tokenizer.compressed_vocab().size == 99092
    assert tokenizer.decode(tokenizer.encode("any text"), skip_special_tokens=True) == "any text"


def test_a_group_has_to_divide_the_experts() -> None:
    assert open_dummy(V41_TINY, None, 4).config.n_routed_experts == 16
    with pytest.raises(ValueError, match=r"16 experts and 0 copies do not divide evenly .* 2 more copies"):
        open_dummy(V41_TINY, None, 3)
    with pytest.raises(ValueError, match="need load_format='dummy'"):
        LLM(str(V41_TINY), emulated_ep=2)
    with pytest.raises(ValueError, match="load_format='dumy': choose"):
        LLM(str(V41_TINY), load_format="dumy")


def test_products_with_random_weights_keep_the_size_of_their_inputs() -> None:
    config = open_checkpoint(V41_TINY).config
    reader = DummyReader(expected_tensors(config), torch.device("cpu"), seed=3)
    for prefix in ("layers.0.attn.wq_b", "layers.3.ffn.experts.5.w2", "layers.2.attn.compressor.wkv"):
        data = reader.read(f"{prefix}.weight")
        if f"{prefix}.scale" not in reader:
            weight = data.float()
        else:
            shape = data.shape if data.dtype != torch.int8 else (data.shape[0], 2 * data.shape[1])
            weight = torch.empty(shape)
            scale = reader.read(f"{prefix}.scale")
            (dequantize_fp4 if data.dtype == torch.int8 else dequantize_fp8)(data, scale, weight)
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(1))
        # A scale is a power of two, so the size is kept within a factor of sqrt 2, and a little for chance.
        assert 0.65 < float((x @ weight.T).std()) < 1.6, prefix
    assert torch.equal(reader.read("layers.0.attn.wq_b.weight"), reader.read("layers.0.attn.wq_b.weight"))


def test_resident_experts_get_an_even_load() -> None:
    share = RankShare(4, 4)
    config = share.config(open_checkpoint(V41_TINY).config)
    experts = DummyWeights(config, share, 0).experts("layers.0.ffn.experts", 16)
    assert isinstance(experts, EvenExperts)
    assert experts.experts.w2.shape[0] == 5
    for rows in (1, 7, 33):
        slots = np.bincount(experts.choice[:rows].flatten().numpy(), minlength=5)
        assert slots.sum() == 4 * rows and slots.max() - slots.min() <= 1
        assert all(len(set(row.tolist())) == 4 for row in experts.choice[:rows])


def test_a_rank_of_a_group_generates() -> None:
    with tiny_dummy(emulated_ep=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        outputs = llm.generate([[0, 5, 6], list(range(20, 170))], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]
        assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def test_a_pretended_prefill_computes_nothing() -> None:
    with tiny_dummy(enable_prefix_caching=False) as llm:
        engine = llm.llm_engine
        counters = engine.model_runner._model.counters
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        engine.add_request("a", list(range(16, 716)), params)
        with engine.emulation.pretended_prefill():
            while engine.stats.num_prefill_steps < 1:
                engine.step()
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert len(outputs[0].outputs[0].token_ids) == 5
        assert engine.stats.num_prefill_tokens == 700
        decoded = counters.query_rows[0]
        assert 4 <= decoded < 20
        llm.generate([list(range(16, 716))], params, use_tqdm=False)  # outside it is computed again
        assert counters.query_rows[0] > decoded + 700


def test_a_begun_request_decodes_at_once() -> None:
    with tiny_dummy(enable_prefix_caching=False, num_blocks=9) as llm:
        engine = llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.emulation.add_begun_request("a", np.arange(16, 716, dtype=np.int32), params)
        with pytest.raises(ValueError, match="no room for request 'b'"):
            engine.emulation.add_begun_request("b", np.arange(16, 716, dtype=np.int32), params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        engine.settle()
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4]
        assert outputs[0].outputs[0].token_ids[0] == 715  # given, not made
        assert engine.stats.num_prefill_steps == 0 and engine.stats.num_output_tokens == 3
        assert engine.core.num_free_blocks == 8
    assert LLM(str(V41_TINY), settings=Settings(num_draft_tokens=0)).llm_engine.emulation is None


@pytest.mark.parametrize("is_release", [True, False])
def test_random_records_are_valid(is_release: bool) -> None:
    checkpoint = open_checkpoint(V41_TINY)
    spec = checkpoint.family.spec(checkpoint.config)
    layout = CacheLayout.build(spec, release=is_release, block_size=128, max_backtracking=6)
    caches = Caches(layout, 3, 4)
    fill_with_random_records(caches, seed=1)
    for ring in layout.windows:
        records = caches.window(ring.layer_id)
        if is_release:
            records = decode_fp8(records[..., :512].contiguous(), records[..., 512:].contiguous())
        assert 0.3 < float(records.std()) < 2, ring
    for section in layout.paged:
        view = caches.paged(section.layer_id)
        if is_release:
            main = decode_fp4(view.main[..., :256].contiguous(), view.main[..., 256:].contiguous())
            assert 0.3 < float(main.std()) < 2
            assert int(view.scales.max()) < 127
        else:
            assert torch.isfinite(view.main).all() and torch.isfinite(view.codes).all()
    for each in layout.compression:
        assert float(caches.compression(each.layer_id).abs().max()) < 10


def test_estimates_of_skipped_work() -> None:
    config = open_checkpoint(V41_TINY).config
    assert skipped_work(config, RankShare(), 8, 0) == []
    work = skipped_work(config, RankShare(4), 8, 10, experts_ms=2.0)
    slots = 8 * 8 * 4 + 3 * 10 * 2  # layers x rows x slots, and the drafter's
    combine = next(each for each in work if "combine" in each.what)
    assert combine.nvlink_ms == pytest.approx(11 * CALL_MS + 1e3 * 0.75 * 2 * slots * 256 / 450e9)
    assert combine.network_ms > combine.nvlink_ms
    imbalance = next(each for each in work if "most expert work" in each.what)
    assert imbalance.nvlink_ms == pytest.approx(0.18)
