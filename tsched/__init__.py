"""Sequences, KV blocks, the scheduler, the sampler and the engine; `LLM` and `AsyncLLM` are the doors.

    from tsched import LLM, AsyncLLM, SamplingParams

The names are resolved on first use, so that `import tsched.scheduler` loads neither torch nor the model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsched.async_llm import AsyncLLM, EngineError
    from tsched.beam_search import BeamSearchParams
    from tsched.llm import LLM
    from tsched.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from tsched.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineError",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]

_HOMES = {
    "LLM": "tsched.llm",
    "AsyncLLM": "tsched.async_llm",
    "BeamSearchParams": "tsched.beam_search",
    "EngineError": "tsched.async_llm",
    "CompletionOutput": "tsched.outputs",
    "Logprob": "tsched.outputs",
    "RequestMetrics": "tsched.outputs",
    "RequestOutput": "tsched.outputs",
    "SamplingParams": "tsched.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tsched' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
