"""What does here what vLLM's arguments of other names do: a call with one of them is refused with that word."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from tsched.torch_free import suggest_name

ClassT = TypeVar("ClassT", bound=type)

ENGINE_NAMES: Mapping[str, str] = {
    "async_scheduling": "is overlap here",
    "attention_backend": "is kernels={'paged_decode': ..., 'paged_prefill': ...} here",
    "compilation_config": "is cuda_graphs here",
    "cpu_offload_gb": "has no counterpart: weights stay on the device",
    "data_parallel_size": "has no counterpart: an engine serves one device",
    "disable_log_stats": "has no counterpart: `stats()` counts, and nothing is logged",
    "download_dir": "is the hub's own cache here, HF_HOME",
    "enable_chunked_prefill": "is chunked_prefill here",
    "enable_lora": "has no counterpart: no adapters are read",
    "enable_prefix_caching": "is prefix_cache here, 'hash' or 'radix' for True and 'none' for False",
    "enforce_eager": "is cuda_graphs here, False for True",
    "generation_config": "has no counterpart: SamplingParams' defaults hold",
    "gpu_memory_utilization": "is kv_cache_fraction here",
    "hf_overrides": "has no counterpart: the checkpoint's config.json holds",
    "kv_cache_dtype": "has no counterpart: the cache has the model's dtype",
    "kv_cache_memory_bytes": "is kv_cache_bytes here",
    "load_format": "has no counterpart: weights are safetensors",
    "long_prefill_token_threshold": "is max_chunk_tokens here",
    "max_logprobs": "has no counterpart: SamplingParams bounds logprobs",
    "max_num_partial_prefills": "is decode_share and max_chunk_tokens here",
    "max_seq_len_to_capture": "is cuda_graphs here",
    "num_gpu_blocks_override": "is kv_cache_bytes here",
    "pipeline_parallel_size": "has no counterpart: an engine serves one device",
    "preemption_mode": "is preemption here",
    "quantization": "has no counterpart: the checkpoint says how it is quantized",
    "revision": "is part of the model's name here, 'owner/name@REVISION'",
    "scheduling_policy": "is order here",
    "skip_tokenizer_init": "has no counterpart: a directory without a tokenizer is served by token ids",
    "speculative_config": "has no counterpart: nothing is speculated",
    "swap_space": "is swap_bytes here, in bytes, with preemption='swap'",
    "tensor_parallel_size": "has no counterpart: an engine serves one device",
    "tokenizer": "has no counterpart: the tokenizer in the model's directory serves",
    "tokenizer_mode": "has no counterpart: the tokenizer in the model's directory serves",
    "tokenizer_revision": "is part of the model's name here, 'owner/name@REVISION'",
    "trust_remote_code": "has no counterpart: no code of a checkpoint is run; architectures_from takes your own",
}
"""vLLM's argument of LLM and AsyncEngineArgs -> what it is here."""

SAMPLING_NAMES: Mapping[str, str] = {
    "best_of": "has no counterpart: n completions are drawn and all are given",
    "detokenize": "has no counterpart: text is made wherever there is a tokenizer",
    "flat_logprobs": "has no counterpart: logprobs are one dict a token",
    "length_penalty": "is BeamSearchParams.length_penalty here",
    "output_kind": "is AsyncLLM.generate here for cumulative outputs, AsyncLLM.add_request for deltas",
    "spaces_between_special_tokens": "has no counterpart: the tokenizer's own spaces stand",
    "use_beam_search": "is LLM.beam_search here",
}
"""vLLM's field of SamplingParams -> what it is here."""


def refuse_other_names(record: ClassT) -> ClassT:
    """Makes SamplingParams, a dataclass, refuse a keyword that it lacks by what it is here, or the nearest there is."""
    make: Callable[..., None] = vars(record)["__init__"]
    known = [one.name for one in fields(record)]

    @functools.wraps(make)
    def __init__(self: Any, *values: Any, **given: Any) -> None:
        for name in given.keys() - known:
            what = f"it {SAMPLING_NAMES[name]}" if name in SAMPLING_NAMES else _list_known(name, known)
            raise TypeError(f"{record.__name__} has no field {name!r}: {what}")
        make(self, *values, **given)

    record.__init__ = __init__  # type: ignore[misc]
    return record


def _list_known(name: str, known: list[str]) -> str:
    return f"there is {', '.join(known)}{suggest_name(name, known)}"
