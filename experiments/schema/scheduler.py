"""What an experiment's YAML may say of the engine that serves."""

from typing import Annotated

from pydantic import Field, StrictBool

from experiments.schema.names import Order, Preemption, PrefixCache
from experiments.schema.values import Count, Strict, Swept

Bytes = Annotated[int, Field(strict=True, ge=1, lt=2**63)]


class SchedulerOptions(Strict):
    """What tsched.LLM takes besides the model; a key that is absent has LLM's default, a list is an axis."""

    max_num_batched_tokens: Swept[Count] | None = None
    max_num_seqs: Swept[Count] | None = None
    max_model_len: Swept[Count] | None = None
    max_chunk_tokens: Swept[Count] | None = None
    decode_share: Swept[Annotated[float, Field(strict=True, ge=0, le=1)]] | None = None
    chunked_prefill: Swept[StrictBool] | None = None
    block_size: Swept[Count] | None = None
    kv_cache_bytes: Swept[Bytes] | None = None
    kv_cache_fraction: Swept[Annotated[float, Field(strict=True, gt=0, le=1)]] | None = None
    swap_bytes: Swept[Bytes] | None = None
    order: Swept[Order] | None = None
    preemption: Swept[Preemption] | None = None
    prefix_cache: Swept[PrefixCache] | None = None
    overlap: Swept[StrictBool] | None = None
    cuda_graphs: Swept[StrictBool] | None = None
