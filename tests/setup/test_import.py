"""What importing the package costs and offers."""

from __future__ import annotations

import json

import pytest

import deepinfer
from tests.support.process import run_python

MEASURE = """
import json, sys, time
start = time.perf_counter()
import deepinfer
seconds = time.perf_counter() - start
{then}
print(json.dumps({{"seconds": seconds, "modules": sorted(sys.modules)}}))
"""


def test_import_is_quick_and_loads_nothing_heavy():
    runs = [json.loads(run_python(MEASURE.format(then=""))) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 0.3
    assert not {"torch", "numpy", "tokenizers", "safetensors", "transformers"} & set(runs[0]["modules"])


@pytest.mark.parametrize(
    "name",
    [
        "SamplingParams",
        "StructuredOutputsParams",
        "RequestOutput",
        "CompletionOutput",
        "EngineType",
        "Settings",
    ],
)
def test_plain_records_come_without_torch(name: str):
    result = json.loads(run_python(MEASURE.format(then=f"deepinfer.{name}")))
    assert "torch" not in result["modules"]


def test_public_names():
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
        assert name in dir(deepinfer)
    from deepinfer.sampling_params import SamplingParams

    assert deepinfer.SamplingParams is SamplingParams


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        deepinfer.LLMs  # noqa: B018
    with pytest.raises(ImportError):
        from deepinfer import nothing  # noqa: F401
