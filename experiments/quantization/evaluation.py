"""How well a model predicts a text, and how far it is from another one.

The text is cut into windows that are each read alone, from position 0: a window of S tokens predicts the token after
each. Every token but the text's first is predicted once; those at a window's beginning have little to go by, so that
perplexities of different window lengths do not compare. Models run on their kernels, as when serving.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import tkernels
from tmodel import (
    Architectures,
    Batch,
    KVCache,
    Model,
    ModelConfig,
    allocate_kv_cache,
    load_config,
    load_model,
)
from tsched.execution.placement import find_block_size
from tsched.options import EngineOptions
from tsched.resolved_options import ResolvedOptions

_TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class Evaluation:
    """Over `num_tokens` predicted tokens, in windows of `window`.

    nats: the mean negative log-likelihood. reference_nats: the reference's. kl: the mean Kullback-Leibler divergence of
    the model's distribution from the reference's, in nats. top1_agreement: the share of tokens for which both have the
    same most likely token. The last three are None without a reference.
    """

    nats: float
    num_tokens: int
    window: int
    reference_nats: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)

    @property
    def reference_perplexity(self) -> float | None:
        return None if self.reference_nats is None else math.exp(self.reference_nats)


class WindowReader:
    """A model, made ready to read windows of `window` tokens, `at_once` of them a step."""

    def __init__(
        self,
        directory: Path,
        window: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ops: tkernels.Registry,
        architectures: Architectures | None = None,
    ) -> None:
        self.config: ModelConfig = load_config(directory, architectures)
        self.device = device
        self.at_once = max(1, _TOKENS_AT_ONCE // window)
        options = EngineOptions(
            max_num_seqs=self.at_once, max_num_batched_tokens=self.at_once * window, max_model_len=window
        )
        size = self._block_size = find_block_size(None, device)
        self._pages = -(-window // size)
        fitted = ResolvedOptions(options, window, size, num_blocks=self.at_once * self._pages)
        axes = fitted.kernel_axes(self.config)
        kernels = tkernels.select({}, device=device, dtype=dtype, axes=axes, ops=ops)
        self.model: Model = load_model(directory, self.config, kernels, device=device, dtype=dtype)
        self._cache: KVCache = allocate_kv_cache(self.config, fitted.num_blocks, size, device=device, dtype=dtype)

    def log_probabilities(self, windows: torch.Tensor) -> torch.Tensor:
        """windows [n, S] int64, n at most `at_once` -> [n * S, vocab], of the token after each."""
        count, length = windows.shape
        tables = torch.arange(count * self._pages, dtype=torch.int32).view(count, self._pages)
        positions = torch.arange(length).repeat(count)  # [n * S]
        first_slots = torch.arange(count).repeat_interleave(length) * self._pages * self._block_size
        batch = Batch(
            token_ids=windows.flatten().to(self.device),
            positions=positions.to(self.device),
            slots=(first_slots + positions).to(self.device),
            block_tables=tables.to(self.device),
            context_lens=torch.full((count,), length, dtype=torch.int32, device=self.device),
            cu_seqlens_q=torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=self.device),
            num_decodes=0,
            max_context_len=length,
            logit_indices=torch.arange(count * length, device=self.device),
        )
        return F.log_softmax(self.model(batch, self._cache), dim=-1)


def cut_windows(tokens: torch.Tensor, window: int) -> torch.Tensor:
    """tokens [T] -> [n, window + 1], all whole windows, each with the token after it."""
    return tokens.unfold(0, window + 1, window)


def evaluate(
    reader: WindowReader,
    windows: torch.Tensor,
    reference: WindowReader | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Of windows [n, S + 1], n at least 1, both readers made for S; `advance` hears of each few windows read."""
    nats = reference_nats = divergence = 0.0
    agreed = 0
    for part in windows.split(reader.at_once):
        targets = part[:, 1:].flatten().to(reader.device)  # [part * S]
        mine = reader.log_probabilities(part[:, :-1])  # [part * S, vocab]
        nats += float(F.nll_loss(mine, targets, reduction="none").double().sum())
        if reference is not None:
            theirs = reference.log_probabilities(part[:, :-1]).to(mine.device)
            reference_nats += float(F.nll_loss(theirs, targets, reduction="none").double().sum())
            divergence += float(F.kl_div(mine, theirs, reduction="none", log_target=True).sum(1).double().sum())
            agreed += int((mine.argmax(1) == theirs.argmax(1)).sum())
        advance(len(part))
    window = windows.shape[1] - 1
    count = windows.shape[0] * window
    if reference is None:
        return Evaluation(nats / count, count, window)
    return Evaluation(nats / count, count, window, reference_nats / count, divergence / count, agreed / count)
