"""Driving a model by hand: sequences of known tokens, fed in whatever steps a test asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import tkernels
from tkernels.ranges import NVTX, Ranges
from tmodel import Batch, Limits, Model, ModelConfig, allocate_kv_cache, kernel_axes, load_config, load_model

BLOCK_SIZE = 16  # the least that every variant of paged_prefill takes
Step = Sequence[tuple[int, int]]
"""(sequence, how many of its tokens) in the order of the batch: decode rows are those of one token past the first."""


def load(
    directory: Path,
    dtype: torch.dtype,
    choices: tkernels.selection.Choices | None = None,
    max_model_len: int = 256,
    ranges: Ranges = NVTX,
) -> Model:
    """The model in `directory` on the CPU, with the default kernels or `choices`."""
    config = load_config(directory)
    limits = Limits(
        max_num_tokens=2048, max_num_seqs=64, max_model_len=max_model_len, block_size=BLOCK_SIZE, num_blocks=256
    )
    axes = kernel_axes(config, limits)
    kernels = tkernels.select(choices or {}, device="cpu", dtype=dtype, axes=axes, ranges=ranges)
    return load_model(directory, config, kernels, device="cpu", dtype=dtype)


@dataclass
class Driver:
    """Feeds `sequences` to `model`; `logits[i]` [len, vocab] fills up as sequence i advances.

    The blocks are handed out in a shuffled order, and what nobody may read is poisoned: unused table entries, other
    blocks, padding's tokens.
    """

    model: Model
    sequences: Sequence[torch.Tensor]
    dtype: torch.dtype
    padding: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """(sequence, position) of each row of the batch that runs."""

    def __post_init__(self) -> None:
        config: ModelConfig = self.model.config
        widths = [-(-len(tokens) // BLOCK_SIZE) for tokens in self.sequences]
        blocks = torch.randperm(sum(widths) + 3, generator=torch.Generator().manual_seed(1)).int()[: sum(widths)]
        self.tables = torch.full((len(widths), max(widths)), 2**31 - 1, dtype=torch.int32)
        for row, part in zip(self.tables, blocks.split(widths), strict=True):
            row[: len(part)] = part
        self.cache = allocate_kv_cache(config, sum(widths) + 3, BLOCK_SIZE, device="cpu", dtype=self.dtype)
        for tensor in (tensor for pair in self.cache for tensor in pair):
            tensor.fill_(torch.nan)
        self.logits = [torch.full((len(tokens), config.vocab_size), torch.nan) for tokens in self.sequences]
        self.logits = [rows.double() if self.dtype == torch.float64 else rows for rows in self.logits]
        self.done = [0] * len(self.sequences)

    def run(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """All steps, then every sequence's logits."""
        for step in steps:
            self.step(step)
        return self.logits

    def step(self, step: Step) -> None:
        decodes = [(i, count) for i, count in step if count == 1 and self.done[i]]
        ordered = decodes + [part for part in step if part not in decodes]
        rows = [(i, position) for i, count in ordered for position in range(self.done[i], self.done[i] + count)]
        self.rows = rows
        for i, count in ordered:
            self.done[i] += count
        chosen = torch.tensor([i for i, _ in ordered])
        lengths = torch.tensor([count for _, count in ordered[len(decodes) :]])
        context_lens = torch.tensor([self.done[i] for i, _ in ordered], dtype=torch.int32)
        slots = [int(self.tables[i, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for i, p in rows]
        pad = [0] * self.padding
        batch = Batch(
            token_ids=torch.tensor([int(self.sequences[i][p]) for i, p in rows] + pad),
            positions=torch.tensor([p for _, p in rows] + pad),
            slots=torch.tensor(slots + [-1] * self.padding),
            block_tables=self.tables[chosen],
            context_lens=context_lens,
            cu_seqlens_q=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
            num_decodes=len(decodes),
            max_context_len=int(context_lens.max()),
            logit_indices=torch.arange(len(rows)),
        )
        logits = self.model(batch, self.cache)
        for (i, position), row in zip(rows, logits, strict=True):
            self.logits[i][position] = row


def in_one_go(lengths: Sequence[int]) -> list[Step]:
    return [[(i, length) for i, length in enumerate(lengths)]]


def in_chunks(lengths: Sequence[int], chunk: int) -> list[Step]:
    """Prefill chunks on top of the cache. Sequence i joins at step i, so that the batches differ in what they mix."""
    steps: list[list[tuple[int, int]]] = []
    for i, length in enumerate(lengths):
        for number, start in enumerate(range(0, length, chunk)):
            while len(steps) <= i + number:
                steps.append([])
            steps[i + number].append((i, min(chunk, length - start)))
    return [step for step in steps if step]


def token_by_token(lengths: Sequence[int], prompt: int) -> list[Step]:
    """A short prompt, then decode rows only; sequence i joins at step i, so that prefills and decodes share batches."""
    steps: list[list[tuple[int, int]]] = [[] for _ in range(max(lengths) + len(lengths))]
    for i, length in enumerate(lengths):
        first = min(prompt, length)
        steps[i].append((i, first))
        for number in range(length - first):
            steps[i + 1 + number].append((i, 1))
    return [step for step in steps if step]
