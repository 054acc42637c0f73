"""Sequences, KV blocks, the scheduler, the sampler and the engine; `LLM` and `AsyncLLM` are the doors.

    from tsched import LLM, AsyncLLM, SamplingParams

The names are resolved on first use, so that `import tsched.scheduling.scheduler` loads neither torch nor the model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsched.async_llm import AsyncLLM, EngineError
    from tsched.execution.beam_search import BeamSearchParams
    from tsched.llm import LLM
    from tsched.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from tsched.requests.prompts import Conversation
    from tsched.requests.sampling_params import SamplingParams
    from tsched.requests.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Conversation",
    "EngineError",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "tsched.llm",
    "AsyncLLM": "tsched.async_llm",
    "BeamSearchParams": "tsched.execution.beam_search",
    "EngineError": "tsched.async_llm",
    "CompletionOutput": "tsched.requests.outputs",
    "Conversation": "tsched.requests.prompts",
    "Logprob": "tsched.requests.outputs",
    "RequestMetrics": "tsched.requests.outputs",
    "RequestOutput": "tsched.requests.outputs",
    "SamplingParams": "tsched.requests.sampling_params",
    "StructuredOutputsParams": "tsched.requests.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tsched' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
