"""What the device keeps between steps: each batch place's block table and each row's newest token.

A step changes little of it: a block for a row that crossed a page, a table for a row that has just come. Only that is
sent, so a step's cost does not grow with the context. The newest tokens are written where they are sampled, so the next
step can be prepared before the host has seen them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.step_inputs.contract import baseline
from tmodel.batch import Batch
from tsched.scheduling.sequence import Ints, SequenceTable

_NO_PREFILLS = np.zeros(1, dtype=np.int32)

StepInputs = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""The op, as a KernelSet has it."""


class DeviceState:
    """Arrays on `device` that mirror what running rows of `table` need, changed in place.

    R rows of the table and as many places in a batch, W blocks a sequence at most.

    block_tables  [R, W] int32, by place in the batch; entries past a sequence's last block are undefined
    last_tokens   [R] int64, by row of the table: the token that a decode of the row reads
    """

    def __init__(self, table: SequenceTable, device: torch.device, step_inputs: StepInputs = baseline) -> None:
        """step_inputs: the op that makes batches of these arrays."""
        self._table = table
        self._step_inputs = step_inputs
        self.device = device
        rows, width = table.blocks.shape
        self.block_tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._width = width
        self._block_size = table.block_size
        self._no_prefills = to_device(_NO_PREFILLS, device)
        self._places = torch.arange(rows, device=device)
        self._decode_counts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # What each place of `block_tables` holds: that many blocks of a row, in that row's epoch.
        self._row_at = np.full(rows, -1, dtype=np.int64)
        self._epoch_at = np.full(rows, -1, dtype=np.int64)
        self._count_at = np.zeros(rows, dtype=np.int64)
        # The last rows placed, and the table's departures then: most steps place the same.
        self._placed: Ints = self._row_at[:0]
        self._departures = -1
        # And which token of its sequence each entry of `last_tokens` is.
        self._token_place = np.full(rows, -1, dtype=np.int64)
        self._token_epoch = np.full(rows, -1, dtype=np.int64)
        self._kept: tuple[Ints, Ints, int] | None = None  # rows, places and departures of the last step's tokens
        # On a CPU the arrays are numpy's too, whose small operations take a third of torch's time.
        on_cpu = device.type == "cpu"
        self._host_tables: NDArray[np.int32] | None = self.block_tables.numpy().reshape(-1) if on_cpu else None
        self._host_tokens: Ints | None = self.last_tokens.numpy() if on_cpu else None

    def forget(self, placed: Ints, rewritten: Ints) -> None:
        """Send anew, when they are used, the tokens of the rows `placed` [a], of which nothing is as it was, and the
        tables of those `rewritten` [r], where blocks in the middle are others now.
        """
        if placed.size:
            self._kept = None
            self._token_epoch[placed] = -1  # also of a row whose sequence stays and whose last token was replaced
        if rewritten.size:
            self._epoch_at[np.isin(self._row_at, rewritten)] = -1
            self._departures = -1

    def update_tables(self, rows: Ints) -> None:
        """Make the first places those of `rows` [B], in this order, with all blocks that the table has of them."""
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
            sent = to_device(np.stack((index, blocks.astype(np.int64))), self.device)  # [2, sum of lens]
            self.block_tables.view(-1).index_copy_(0, sent[0], sent[1].int())
        self._row_at[:num], self._epoch_at[:num], self._count_at[:num] = rows, table.epoch[rows], counts

    def has_kept(self, rows: Ints, places: Ints) -> bool:
        """Whether the tokens at `places` are those that the last step sampled for `rows`, both the same arrays: a plan
        that repeats the last one a token on is made of its arrays.
        """
        kept = self._kept
        return kept is not None and kept[0] is rows and kept[1] is places and kept[2] == self._table.num_departures

    def update_tokens(self, rows: Ints, places: Ints) -> None:
        """Have in `last_tokens` the tokens at `places` [n] of the sequences in `rows` [n]: those that were not sampled
        here last are sent.
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
        """The step has sampled `tokens` [n] int64 for `rows` [n] of these epochs, at `places` [n] of their sequences.

        A row without a token (below 0) ends when the host sees it; until then its next step reads token 0.
        """
        if self._host_tokens is not None:
            self._host_tokens[rows] = np.maximum(tokens.numpy(), 0)
        else:
            self.last_tokens.index_copy_(0, to_device(rows, self.device), tokens.clamp_min(0))
        self._token_place[rows], self._token_epoch[rows] = places, epochs
        self._kept = (rows, places, self._table.num_departures)

    def read_host_tokens(self, rows: Ints) -> Ints:
        """[n] int64, the last tokens of `rows` [n]; on a CPU alone."""
        if self._host_tokens is None:
            raise RuntimeError(f"the last tokens are on {self.device}")
        return self._host_tokens[rows]

    def make_decode_batch(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        max_context_len: int,
        state_slots: torch.Tensor | None = None,
    ) -> Batch:
        """The batch in which place i decodes at place `starts[i]` of its sequence the newest token of row r, where
        `tokens[i]` is -1 - r; both [B] int64. A start of -1 is padding: slot -1, context 0.

        Reads no value on the host, so a CUDA graph can hold it.
        """
        num = tokens.shape[0]
        return self._make_batch(
            tokens, starts, self._decode_counts[: num + 1], self._no_prefills, self._places[:num], num, max_context_len,
            state_slots,
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
    ) -> Batch:
        """Any batch, made on the device of what is sent in one copy, because a copy's cost is its launch.

        tokens: [T], as in `decode_batch`, or token ids; starts, ends: [B]; logits: [m]; state_slots: [2, B]; all int64.
        """
        cu_counts = np.zeros(starts.size + 1, dtype=np.int64)
        np.cumsum(ends - starts, out=cu_counts[1:])
        parts = [tokens, starts, logits, cu_counts]
        if state_slots is not None:
            parts.append(state_slots.reshape(-1))
        sent = to_device(np.concatenate(parts), self.device).split([part.size for part in parts])
        counts = sent[3].int()
        # The decode rows have a token each.
        prefills = counts[num_decodes:] - num_decodes if num_decodes < starts.size else self._no_prefills
        slots = None if state_slots is None else sent[4].view(2, -1)  # [2 B] -> [2, B]
        return self._make_batch(sent[0], sent[1], counts, prefills, sent[2], num_decodes, int(ends.max()), slots)

    def _make_batch(
        self, tokens: torch.Tensor, starts: torch.Tensor, cu_counts: torch.Tensor, cu_seqlens_q: torch.Tensor,
        logit_indices: torch.Tensor, num_decodes: int, max_context_len: int, state_slots: torch.Tensor | None,
    ) -> Batch:  # fmt: skip
        num_pages = -(-max_context_len // self._block_size)
        tables = self.block_tables[: starts.shape[0], :num_pages]
        token_ids, positions, slots, context_lens = self._step_inputs(
            tokens, self.last_tokens, tables, starts, cu_counts, self._block_size
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
        )

    def _write_tokens(self, rows: Ints, tokens: Ints) -> None:
        if self._host_tokens is not None:
            self._host_tokens[rows] = tokens
        else:
            sent = to_device(np.stack((rows, tokens)), self.device)  # [2, n]
            self.last_tokens.index_copy_(0, sent[0], sent[1])


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`. To a GPU it goes through pinned memory, which the copy alone does not wait for;
    on a CPU it is `array` itself.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
