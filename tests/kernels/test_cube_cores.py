"""The programs for Ascend's cube and vector cores, emulated: tests of the CUDA kernels, run on what stands
beside them in `ascend.py`."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention import test_sparse_attention as attention
from tests.kernels.gemm import test_products as products
from tests.kernels.indexer import test_index_scores as scores
from tests.kernels.sampling import test_markov_step as markov
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.kernels import ASCEND_TARGET

RUN = KernelRunner(ASCEND_TARGET)


def test_sparse_attention() -> None:
    attention.test_against_float64(RUN, 2, 65, 1)
    attention.test_rows_depend_on_their_list_of_keys_alone(RUN)
    attention.test_main_records_of_every_code_and_scale(RUN)
    attention.test_nan_scales_are_nan(RUN)


def test_index_scores() -> None:
    scores.test_index_scores(RUN, [0, 0, 0, 0, 1, 1, 2, 2, 2], [125, 126, 127, 128, 3, 4, 190, 191, 192])
    scores.test_index_scores(RUN, [2, 1, 1, 0, 0], [0, 130, 131, 129, 17])
    scores.test_candidate_scores(RUN, in_fp8=False)


def test_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    products.test_linear(RUN, monkeypatch, 70, 200, 72, 1, torch.bfloat16)


def test_linear_with_float32_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    products.test_linear(RUN, monkeypatch, 5, 24, 1024, 3, torch.float32)


def test_linear_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    products.test_linear_fp8(RUN, monkeypatch, 70, 128, 256, 2)


def test_grouped_linear() -> None:
    for counts in ([0, 5, 65, 0, 1], [0, 0, 0, 0, 170]):
        products.test_grouped_linear(RUN, counts, 320)


def test_grouped_swiglu() -> None:
    products.test_grouped_swiglu(RUN, [0, 5, 65, 0, 1], True)


def test_markov_step() -> None:
    markov.test_markov_step(RUN)
