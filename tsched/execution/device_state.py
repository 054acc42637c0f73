"""The device's arrays that last from step to step: each batch place's block table and each row's newest token.

A step changes little of them: one block for a row that crossed a page, one table for a row that has just come. Only
changes are sent, so a step's cost does not grow with the context. The newest tokens stay on the device that samples
them, so the host prepares the next step before it has seen them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.runtime import Runtime
from tmodel.batch import Batch, PrefixGroups
from tsched.execution.step_kernels import TORCH_KERNELS, StepKernels
from tsched.scheduling.sequence import Ints, SequenceTable
from tsched.scheduling.shared_prefixes import SharedPrefixes

_NO_PREFILLS = np.zeros(1, dtype=np.int32)


class DeviceState:
    """Arrays on a device that mirror the running rows of `table`, changed in place.

    The table has R rows and a batch as many places; a sequence has W blocks at most.

    Args:
        table: The running sequences.
        runtime: Of the device where the arrays are.
        kernels: The op that makes batches of them.

    Attributes:
        runtime: As given.
        block_size: Tokens of a block.
        kernels: As given; others may take their place between two steps.
        block_tables: [R, W] int32, by place in the batch. Entries past a sequence's last block are undefined.
        last_tokens: [R] int64, by row of the table, the token that the row's next decode reads.
    """

    def __init__(self, table: SequenceTable, runtime: Runtime, kernels: StepKernels = TORCH_KERNELS) -> None:
        self._table = table
        self.kernels = kernels
        self.runtime = runtime
        device = runtime.device
        rows, width = table.blocks.shape
        self.block_tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._width = width
        self.block_size = table.block_size
        self._no_prefills = runtime.send(_NO_PREFILLS)
        self._places = torch.arange(rows, device=device)
        self._decode_counts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # Each place of `block_tables` holds this many blocks of this row, as of this epoch of the row.
        self._row_at = np.full(rows, -1, dtype=np.int64)
        self._epoch_at = np.full(rows, -1, dtype=np.int64)
        self._count_at = np.zeros(rows, dtype=np.int64)
        # The last rows placed, and the table's departures then: most steps place the same.
        self._placed: Ints = self._row_at[:0]
        self._departures = -1
        # Each entry of `last_tokens` is the token at this place of its sequence, as of this epoch of the row.
        self._token_place = np.full(rows, -1, dtype=np.int64)
        self._token_epoch = np.full(rows, -1, dtype=np.int64)
        self._groups: tuple[SharedPrefixes, PrefixGroups] | None = None  # the last ones, and as they were sent
        self._kept: tuple[Ints, Ints, int] | None = None  # rows, places and departures of the last step's tokens
        # Where numpy shares the arrays, its small operations take a third of torch's time.
        self._host_tables: NDArray[np.int32] | None = self.block_tables.numpy().reshape(-1) if runtime.is_host else None
        self._host_tokens: Ints | None = self.last_tokens.numpy() if runtime.is_host else None

    def forget(self, placed: Ints, rewritten: Ints) -> None:
        """Marks what must be sent again before it is used.

        Args:
            placed: [a] int64, rows with new content: their tokens.
            rewritten: [r] int64, rows where blocks in the middle changed: their tables.
        """
        if placed.size:
            self._kept = None
            self._token_epoch[placed] = -1  # also of a row whose sequence stays and whose last token was replaced
        if rewritten.size:
            self._epoch_at[np.isin(self._row_at, rewritten)] = -1
            self._departures = -1

    def update_tables(self, rows: Ints) -> None:
        """Brings the first B block tables up to date with the table's blocks of `rows` [B] int64, in this order."""
        table, num = self._table, rows.size
        counts = table.num_blocks[rows]
        if rows is self._placed and table.num_departures == self._departures:
            held = self._count_at[:num]  # the same rows in the same epochs
            if (counts == held).all():
                return
        else:
            same = (self._row_at[:num] == rows) & (self._epoch_at[:num] == table.epoch[rows])
            held = np.where(same, self._count_at[:num], 0)
        self._placed, self._departures = rows, table.num_departures
        missing = counts - held  # [B]
        behind = np.flatnonzero(missing)
        if behind.size == 0:
            return
        places, columns = behind, held[behind]
        if int(missing.max()) > 1:
            lens = missing[behind]
            places = np.repeat(behind, lens)  # [sum of lens]
            columns = np.arange(places.size) + np.repeat(columns - (np.cumsum(lens) - lens), lens)
        index, blocks = places * self._width + columns, table.blocks[rows[places], columns]
        if self._host_tables is not None:
            self._host_tables[index] = blocks
        else:
            sent = self.runtime.send(np.stack((index, blocks.astype(np.int64))))  # [2, sum of lens]
            self.block_tables.view(-1).index_copy_(0, sent[0], sent[1].int())
        self._row_at[:num], self._epoch_at[:num], self._count_at[:num] = rows, table.epoch[rows], counts

    def has_kept(self, rows: Ints, places: Ints) -> bool:
        """Whether the last step sampled exactly the tokens at `places` for `rows`.

        It compares arrays by identity: a plan that continues the last one by a token reuses its arrays.
        """
        kept = self._kept
        return kept is not None and kept[0] is rows and kept[1] is places and kept[2] == self._table.num_departures

    def update_tokens(self, rows: Ints, places: Ints) -> None:
        """Brings `last_tokens` of `rows` up to date, and sends only tokens that the device did not sample itself.

        Args:
            rows: [n] int64, of the table.
            places: [n] int64, the place of each token in its sequence.

        Raises:
            RuntimeError: A token is neither on the host nor on the device.
        """
        table = self._table
        known = (self._token_place[rows] == places) & (self._token_epoch[rows] == table.epoch[rows])
        if known.all():
            return
        rows, places = rows[~known], places[~known]
        if (places >= table.known[rows]).any():
            raise RuntimeError("a plan reads a token that is neither on the host nor on the device")
        self._write_tokens(rows, table.tokens[rows, places])
        self._token_place[rows], self._token_epoch[rows] = places, table.epoch[rows]

    def keep_tokens(self, rows: Ints, places: Ints, epochs: Ints, tokens: torch.Tensor) -> None:
        """Stores the tokens that a step sampled.

        A row whose token is below 0 got none and ends when the host sees it; until then its next step reads token 0.

        Args:
            rows: [n] int64, of the table.
            places: [n] int64, the place of each token in its sequence.
            epochs: [n] int64, of the rows when the step was planned.
            tokens: [n] int64, on the device.
        """
        if self._host_tokens is not None:
            self._host_tokens[rows] = np.maximum(tokens.numpy(), 0)
        else:
            self.last_tokens.index_copy_(0, self.runtime.send(rows), tokens.clamp_min(0))
        self._token_place[rows], self._token_epoch[rows] = places, epochs
        self._kept = (rows, places, self._table.num_departures)

    def read_host_tokens(self, rows: Ints) -> Ints:
        """[n] int64: the last tokens of `rows` [n].

        Raises:
            RuntimeError: The device is not the host.
        """
        if self._host_tokens is None:
            raise RuntimeError(f"the last tokens are on {self.runtime.device}")
        return self._host_tokens[rows]

    def make_decode_batch(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        max_context_len: int,
        state_slots: torch.Tensor | None = None,
        groups: PrefixGroups | None = None,
    ) -> Batch:
        """Makes a batch of decode rows. It reads no value on the host, so a CUDA graph can record it.

        Args:
            tokens: [B] int64, -1 - r for the newest token of row r.
            starts: [B] int64, the place of that token in its sequence; -1 is padding, with slot -1 and context 0.
            max_context_len: A bound of all contexts, in tokens.
            state_slots: [2, B] int64, the slots read and written, where layers keep states.
            groups: Of the rows that share prefixes; None where none do.
        """
        num = tokens.shape[0]
        return self._make_batch(
            tokens, starts, self._decode_counts[: num + 1], self._no_prefills, self._places[:num], num, max_context_len,
            state_slots, groups,
        )  # fmt: skip

    def make_mixed_batch(
        self,
        *,
        tokens: Ints,
        starts: Ints,
        ends: Ints,
        logits: Ints,
        num_decodes: int,
        state_slots: Ints | None = None,
        shared: SharedPrefixes | None = None,
    ) -> Batch:
        """Makes any batch on the device. Its inputs are sent in one copy, because a copy costs mostly its launch.

        Args:
            tokens: [T] int64, token ids, or -1 - r for the newest token of row r.
            starts: [B] int64, the place of each row's first token in its sequence.
            ends: [B] int64, the place after its last token.
            logits: [m] int64, the tokens of the batch whose logits are computed.
            num_decodes: Rows, the first ones, that decode.
            state_slots: [2, B] int64, the slots read and written, where layers keep states.
            shared: The groups of decode rows that share blocks.
        """
        cu_counts = np.zeros(starts.size + 1, dtype=np.int64)
        np.cumsum(ends - starts, out=cu_counts[1:])
        parts = [tokens, starts, logits, cu_counts]
        if state_slots is not None:
            parts.append(state_slots.reshape(-1))
        sent = self.runtime.send(np.concatenate(parts)).split([part.size for part in parts])
        counts = sent[3].int()
        # Each decode row has one token.
        prefills = counts[num_decodes:] - num_decodes if num_decodes < starts.size else self._no_prefills
        slots = None if state_slots is None else sent[4].view(2, -1)  # [2 B] -> [2, B]
        return self._make_batch(
            sent[0], sent[1], counts, prefills, sent[2], num_decodes, int(ends.max()), slots, self.send_groups(shared)
        )

    def send_groups(self, shared: SharedPrefixes | None) -> PrefixGroups | None:
        """What attention is told of the groups; they are sent once."""
        if shared is None:
            return None
        if self._groups is None or self._groups[0] is not shared:
            num = shared.num_blocks.size
            sent = self.runtime.send(pack_groups(shared, num, self.block_size))
            most = int(shared.num_blocks.max()) * self.block_size
            self._groups = shared, PrefixGroups(sent[0, : num + 1], sent[1, :num], most)
        return self._groups[1]

    def _make_batch(
        self, tokens: torch.Tensor, starts: torch.Tensor, cu_counts: torch.Tensor, cu_seqlens_q: torch.Tensor,
        logit_indices: torch.Tensor, num_decodes: int, max_context_len: int, state_slots: torch.Tensor | None,
        groups: PrefixGroups | None,
    ) -> Batch:  # fmt: skip
        num_pages = -(-max_context_len // self.block_size)
        tables = self.block_tables[: starts.shape[0], :num_pages]
        token_ids, positions, slots, context_lens = self.kernels.step_inputs(
            tokens, self.last_tokens, tables, starts, cu_counts, self.block_size
        )
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            context_lens=context_lens,
            cu_seqlens_q=cu_seqlens_q,
            num_decodes=num_decodes,
            max_context_len=max_context_len,
            logit_indices=logit_indices,
            state_slots=state_slots,
            prefix_groups=groups,
        )

    def _write_tokens(self, rows: Ints, tokens: Ints) -> None:
        if self._host_tokens is not None:
            self._host_tokens[rows] = tokens
        else:
            sent = self.runtime.send(np.stack((rows, tokens)))  # [2, n]
            self.last_tokens.index_copy_(0, sent[0], sent[1])


def pack_groups(shared: SharedPrefixes, num_groups: int, block_size: int) -> NDArray[np.int32]:
    """[2, n] int32: where `num_groups` groups begin and the last one ends, and how many tokens each shares.

    Groups past those that there are have no rows. Each of the two starts at 16 bytes: kernels are compiled once.
    """
    packed = np.full((2, num_groups + 4 - num_groups % 4), shared.starts[-1], dtype=np.int32)
    packed[0, : shared.starts.size] = shared.starts
    packed[1] = 0
    packed[1, : shared.num_blocks.size] = shared.num_blocks * block_size
    return packed
