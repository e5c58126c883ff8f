"""DeepInfer: an inference engine for DeepSeek-V4.1. Importing this package loads nothing heavy.

The public names below are loaded on first use, so that `import deepinfer` takes milliseconds and a program
which only builds `SamplingParams` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> the module that defines it
_HOMES = {
    "LLM": "deepinfer.entrypoints.llm",
    "LLMEngine": "deepinfer.engine.llm_engine",
    "EngineArgs": "deepinfer.engine.arg_utils",
    "EngineType": "deepinfer.engine.engine_type",
    "SamplingParams": "deepinfer.sampling_params",
    "RequestOutput": "deepinfer.outputs",
    "CompletionOutput": "deepinfer.outputs",
    "Settings": "deepinfer.settings",
    "StructuredOutputsParams": "deepinfer.structured_output.request",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineType",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "Settings",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from deepinfer.engine.arg_utils import EngineArgs
    from deepinfer.engine.engine_type import EngineType
    from deepinfer.engine.llm_engine import LLMEngine
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.outputs import CompletionOutput, RequestOutput
    from deepinfer.sampling_params import SamplingParams
    from deepinfer.settings import Settings
    from deepinfer.structured_output.request import StructuredOutputsParams


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
