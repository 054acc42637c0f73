"""What an experiment's YAML may say of the engine that serves."""

from experiments.schema.values import Bytes, Counts, Flags, Fractions, Policies, Shares, Strict


class SchedulerOptions(Strict):
    """What tsched.LLM takes besides the model; a key that is absent has LLM's default, a list is an axis."""

    max_num_batched_tokens: Counts | None = None
    max_num_seqs: Counts | None = None
    max_model_len: Counts | None = None
    max_chunk_tokens: Counts | None = None
    decode_share: Fractions | None = None
    chunked_prefill: Flags | None = None
    block_size: Counts | None = None
    kv_cache_bytes: Bytes | None = None
    kv_cache_fraction: Shares | None = None
    swap_bytes: Bytes | None = None
    order: Policies | None = None
    preemption: Policies | None = None
    prefix_cache: Policies | None = None
    overlap: Flags | None = None
    cuda_graphs: Flags | None = None
