"""One step's work, packed: what the scheduler's side hands to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LayerCache = tuple[torch.Tensor, ...]

KVCache = Sequence[LayerCache]
"""Per layer what its kind keeps: of pages (k_cache, v_cache), each [P, S, Hkv, D]."""


AttendBetween = Callable[[torch.Tensor, int, Callable[["Batch", torch.Tensor], torch.Tensor]], torch.Tensor]
"""(q [T, Hq, D], Dv, what attends) -> [T, Hq, Dv]. What attends, (batch, q) -> [T, Hq, Dv], is called between two
pieces of a step, at each replay with its own batch."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Which decode rows begin with the same blocks: groups of neighbours, as the op cascade_decode takes them.

    group_starts     [G+1] int32, ascending: the decode rows group_starts[g] .. group_starts[g+1]-1 are group g; a last
                     entry that repeats itself is of groups without rows
    prefix_lens      [G] int32, the tokens that a group's rows share, whole blocks; undefined of a group without rows
    max_prefix_len   upper bound of prefix_lens
    """

    group_starts: torch.Tensor
    prefix_lens: torch.Tensor
    max_prefix_len: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, laid end to end: decode rows (one token each), then prefill chunks, then padding.

    T tokens, B sequences, N the block table's width. Everything lies on the model's device; the integers are the
    host's. The lengths are read by the kernels on the device, so the host bounds are all that a launch depends on.

    token_ids        [T] int64
    positions        [T] int64, each token's place in its own sequence, from 0
    slots            [T] int64, where each token's key and value go (block * block_size + offset); -1 writes nothing
    block_tables     [B, N] int32, each sequence's blocks; entries past its last block are undefined
    context_lens     [B] int32, tokens in each sequence's cache, this step's included; 0 for a padding row
    cu_seqlens_q     [Bp+1] int32, where each prefill chunk begins among the tokens after the decode rows, from 0;
                     Bp = B - num_decodes
    num_decodes      how many of the first tokens, and of the first sequences, are decode rows
    max_context_len  upper bound of context_lens
    logit_indices    [n] int64, ascending, the tokens whose logits are wanted
    state_slots      [2, B] int64, where layers keep states: the slots of the state that each sequence goes on from, -1
                     where it begins and there is none, and of the one that it leaves. They may be the same; else the
                     first stays as it is. A padding row leaves its state in the caches' last slot, which nobody reads
    prefix_groups    decode rows that read what they share together; None where no row shares anything
    attend_between   where the step is recorded in pieces, as AttendBetween says; None is at once
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    num_decodes: int
    max_context_len: int
    logit_indices: torch.Tensor
    state_slots: torch.Tensor | None = None
    prefix_groups: PrefixGroups | None = None
    attend_between: AttendBetween | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where the shapes do not fit together.

        The values are for the builder to get right: reading them here would wait for the device.
        """
        num_tokens, num_seqs = self.token_ids.shape[0], self.block_tables.shape[0]
        for name, length in (("positions", num_tokens), ("slots", num_tokens), ("context_lens", num_seqs)):
            shape = tuple(getattr(self, name).shape)
            if shape != (length,):
                raise ValueError(f"Batch.{name} has shape {shape}, expected ({length},)")
        if self.state_slots is not None and tuple(self.state_slots.shape) != (2, num_seqs):
            raise ValueError(f"Batch.state_slots has shape {tuple(self.state_slots.shape)}, expected (2, {num_seqs})")
        if not 0 <= self.num_decodes <= min(num_tokens, num_seqs):
            raise ValueError(
                f"Batch.num_decodes is {self.num_decodes} with {num_tokens} tokens and {num_seqs} sequences"
            )
        if self.cu_seqlens_q.shape[0] != self.num_prefills + 1:
            raise ValueError(
                f"Batch.cu_seqlens_q has {self.cu_seqlens_q.shape[0]} entries, expected {self.num_prefills + 1}: "
                f"one more than the {num_seqs} - {self.num_decodes} sequences that are not decode rows"
            )

    @property
    def num_prefills(self) -> int:
        return int(self.block_tables.shape[0]) - self.num_decodes
