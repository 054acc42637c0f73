"""Prefill and decode of whole models on random weights, ours and transformers' on the same ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from experiments.peers.transformers_generate import load_transformers
from tkernels import Registry, Tuning, select
from tkernels.timing import Launch, Timing, time_call
from tmodel import (
    RANDOM_PRESETS,
    Batch,
    KVCache,
    Model,
    ModelConfig,
    allocate_kv_cache,
    load_config,
    load_model,
    preset_path,
)
from tmodel.random_weights import random_config
from tsched.execution.placement import find_block_size
from tsched.options import EngineOptions
from tsched.resolved_options import ResolvedOptions


@dataclass(frozen=True)
class Work:
    """One step of a model: `sequences` prompts of `tokens`, or one token each after contexts of `tokens`."""

    kind: str
    sequences: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind} B={self.sequences}, {self.tokens} tokens"


WORKS = (Work("decode", 1, 1024), Work("decode", 64, 1024), Work("prefill", 1, 4096), Work("prefill", 8, 512))


def fit_works(preset: str, works: Sequence[Work] = WORKS) -> list[Work]:
    """The works, as long as the preset's model was made for at most: gpt2 has 1,024 places."""
    longest = random_config(RANDOM_PRESETS[preset]).max_position_embeddings
    return [replace(work, tokens=min(work.tokens, longest)) for work in works]


def load_models(
    preset: str, device: torch.device, dtype: torch.dtype, ops: Registry, tuning: Tuning, works: Sequence[Work]
) -> tuple[Any, Model]:
    """transformers' model of a preset's random weights, and ours."""
    directory = preset_path(preset)
    config = load_config(directory)
    longest, most = max(work.tokens for work in works), max(work.sequences for work in works)
    tokens = max(work.sequences * work.tokens for work in works)
    options = EngineOptions(max_num_batched_tokens=tokens, max_num_seqs=most, max_model_len=longest)
    page = find_block_size(None, device)
    fitted = ResolvedOptions(options, longest, page, num_blocks=max(_blocks(work, page) for work in works))
    kernels = select({}, device=device, dtype=dtype, axes=fitted.kernel_axes(config), tuning=tuning, ops=ops)
    theirs = load_transformers(directory, None, device, dtype)
    return theirs, load_model(directory, config, kernels, device=device, dtype=dtype)


def _blocks(work: Work, page: int) -> int:
    return work.sequences * -(-work.tokens // page)


def our_step(work: Work, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Batch, KVCache]:
    """The packed batch of a work, over pages in a random order, in a cache of random contexts."""
    generator, page = torch.Generator().manual_seed(0), find_block_size(None, device)
    width = -(-work.tokens // page)
    tables = torch.randperm(_blocks(work, page), generator=generator).view(work.sequences, width)  # [B, N]
    every = torch.arange(work.tokens)
    slots = tables[:, every // page] * page + every % page  # [B, tokens]
    decoding = work.kind == "decode"
    count = 1 if decoding else work.tokens
    positions = every[-count:].repeat(work.sequences)
    cache = allocate_kv_cache(config, _blocks(work, page), page, device=device, dtype=dtype)
    for pair in cache:
        for tensor in pair:
            tensor.normal_()
    starts = [0] if decoding else [count * i for i in range(work.sequences + 1)]
    batch = Batch(
        token_ids=_tokens(work, config).flatten().to(device),
        positions=positions.to(device),
        slots=slots[:, -count:].flatten().contiguous().to(device),
        block_tables=tables.int().to(device),
        context_lens=torch.full((work.sequences,), work.tokens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        num_decodes=work.sequences if decoding else 0,
        max_context_len=work.tokens,
        logit_indices=torch.arange(1, work.sequences + 1, device=device) * count - 1,
    )
    return batch, cache


def _tokens(work: Work, config: ModelConfig) -> torch.Tensor:
    """[B, tokens of the step] int64."""
    shape = (work.sequences, 1 if work.kind == "decode" else work.tokens)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def their_step(work: Work, theirs: Any, config: ModelConfig, device: torch.device) -> Callable[[], torch.Tensor]:
    """The same step in transformers, its keys and values kept, the last token's logits alone."""
    from transformers.cache_utils import DynamicCache

    tokens = _tokens(work, config).to(device)
    decoding = work.kind == "decode"
    before = work.tokens - 1 if decoding else 0
    cache = DynamicCache(config=theirs.config)
    shape = (work.sequences, config.num_kv_heads, before, config.head_dim)
    dtype = next(theirs.parameters()).dtype
    for layer in range(config.num_layers if decoding else 0):
        cache.update(*(torch.randn(shape, device=device).to(dtype) for _ in range(2)), layer)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        used = cache if decoding else DynamicCache(config=theirs.config)
        logits: torch.Tensor = theirs(tokens, past_key_values=used, use_cache=True, logits_to_keep=1).logits
        if decoding:
            cache.crop(-1)  # so that the next call meets the same context
        return logits

    return step


@dataclass(frozen=True)
class Forward:
    """One way of taking a step. peer: who took it, None for this engine. Without a timing, the reason."""

    peer: str | None
    settings: Mapping[str, Any]
    timing: Timing | None
    reason: str | None = None


def compare(
    work: Work, theirs: Any, ours: Model, device: torch.device, dtype: torch.dtype, samples: int = 10
) -> Iterator[Forward]:
    """The times of one work's step: ours launched kernel by kernel and, on a GPU, from a CUDA graph, and their own."""
    batch, cache = our_step(work, ours.config, device, dtype)

    def timed(call: Callable[[], object], peer: str | None, launch: Launch, **settings: Any) -> Forward:
        try:
            return Forward(peer, settings, time_call(call, device, samples=samples, launch=launch, l2="warm"))
        except Exception as error:  # a capture may be refused for reasons of any library's
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Forward(peer, settings, None, reason)

    yield timed(lambda: ours(batch, cache), None, "eager", cuda_graphs=False)
    if device.type == "cuda":
        yield timed(lambda: ours(batch, cache), None, "graph", cuda_graphs=True)
    yield timed(their_step(work, theirs, ours.config, device), "transformers", "eager")
