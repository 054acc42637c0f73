"""Turns a plan's rows into the packed tensors that the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tmodel.batch import Batch
from tsched.execution.device_state import DeviceState
from tsched.scheduling.sequence import Ints, SequenceTable
from tsched.scheduling.shared_prefixes import FindGroups, SharedPrefixes, take_out_faulty
from tsched.scheduling.step_plan import StepPlan

_NO_PREFILLS = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ArrangedPlan:
    """A plan's n entries in the order of the batch, where a row that goes on decoding keeps its place.

    Attributes:
        rows: [n] int64, of the table, as in the plan.
        starts: [n] int64, the place of each row's first token in the step.
        counts: [n] int64, its tokens in the step.
        ends: [n] int64, starts + counts.
        num_decodes: How many entries, the first ones, decode.
        sampled: [m] int64, ascending, the entries whose last token's logits are sampled.
        sampled_rows: [m] int64, their rows.
        sampled_epochs: [m] int64, their epochs.
        lengths: [m] int64, the tokens, prompt and output, that their logits have seen.
        order: [m] int64, where each is among the plan's sampled; None where the order is the same.
        state_slots: [2, n] int64, the slots read and written; None where no layer keeps states.
        shared: The groups of the decoding entries that share blocks; None where none do.
        faults: Row -> why it may not be in the group that it was found in, for those that the step found so.
    """

    rows: Ints
    starts: Ints
    counts: Ints
    ends: Ints
    num_decodes: int
    sampled: Ints
    sampled_rows: Ints
    sampled_epochs: Ints
    lengths: Ints
    order: Ints | None
    state_slots: Ints | None = None
    shared: SharedPrefixes | None = None
    faults: Mapping[int, str] = field(default_factory=dict)

    @property
    def sampled_tokens(self) -> Ints:
        """[m] int64, the places of the sampled tokens among the step's."""
        return np.cumsum(self.counts)[self.sampled] - 1

    @property
    def all_decode(self) -> bool:
        """Whether every entry decodes one token and wants the next."""
        return self.num_decodes == self.rows.size == self.sampled.size


class BatchBuilder:
    """Builds the batches of steps on the device of a persistent `state`.

    Args:
        table: The running sequences.
        state: Their arrays on the device.
        find_groups: Finds which decode rows begin with the same blocks; None groups none.
    """

    def __init__(self, table: SequenceTable, state: DeviceState, find_groups: FindGroups | None = None) -> None:
        self._table = table
        self._find_groups = find_groups
        self._shared: SharedPrefixes | None = None  # of the last step's decode rows
        self._faults: dict[int, str] = {}  # of those that were just grouped, by row
        self._may_share_others = False  # since they were grouped
        self._state = state
        self._tokens = table.tokens.reshape(-1)  # a flat view: one index array is cheaper than two
        self._tokens_stride = table.tokens.shape[1]
        self._decoding: Ints = np.empty(0, dtype=np.int64)  # the last step's decode rows, by place in the batch
        self._planned: Ints = self._decoding  # the last plan's rows; below, the result of `_order_rows` for them
        self._ordered: tuple[Ints, Ints | None] = (self._decoding, None)
        self._entry_of = np.zeros(table.num_rows, dtype=np.int64)

    def arrange(self, plan: StepPlan) -> ArrangedPlan | None:
        """Orders a plan's entries for the batch and updates the state. Every plan must pass here, in order.

        Returns:
            The arranged plan; None where it is empty.
        """
        self._state.forget(plan.placed, plan.rewritten)
        if plan.placed.size or plan.rewritten.size:
            self._may_share_others = self._find_groups is not None
        if plan.is_empty:
            return None
        num_decodes = plan.num_decodes
        self._faults = {}
        rows, entries = self._order_rows(plan)
        state_slots = None if plan.states is None else plan.states.slots.astype(np.int64)
        if entries is None:
            arranged = ArrangedPlan(
                rows, plan.starts, plan.counts, plan.ends, num_decodes, plan.sampled, plan.sampled_rows,
                plan.sampled_epochs, plan.lengths, None, state_slots, self._shared, self._faults,
            )  # fmt: skip
        else:
            place_of = np.full(rows.size, -1, dtype=np.int64)
            place_of[plan.sampled] = np.arange(plan.sampled.size)
            order = place_of[entries]  # [n], -1 where nothing is sampled
            sampled = np.flatnonzero(order >= 0)
            order = order[sampled]
            arranged = ArrangedPlan(
                rows, plan.starts[entries], plan.counts[entries], plan.ends[entries], num_decodes, sampled,
                plan.sampled_rows[order], plan.sampled_epochs[order], plan.lengths[order], order,
                None if state_slots is None else state_slots[:, entries], self._shared, self._faults,
            )  # fmt: skip
        self._state.update_tables(rows)
        just_kept = arranged.all_decode and self._state.has_kept(arranged.sampled_rows, arranged.starts)
        if num_decodes and not just_kept:
            self._state.update_tokens(rows[:num_decodes], arranged.starts[:num_decodes])
        return arranged

    def build(self, step: ArrangedPlan, others: Ints | None = None) -> Batch:
        """Builds the batch of `step`, the last arranged plan: its decode rows, then its prefill chunks, no padding.

        Args:
            step: The plan.
            others: [l] int64, tokens of the step whose logits are wanted beside the sampled ones; None is none.
        """
        rows, starts, ends, num_decodes = step.rows, step.starts, step.ends, step.num_decodes
        if num_decodes == rows.size:
            owners, positions, logits = np.arange(rows.size), starts, step.sampled
            cu_seqlens, prefill_tokens = _NO_PREFILLS, rows[:0]
        else:
            last = np.cumsum(step.counts)
            owners = np.repeat(np.arange(rows.size), step.counts)  # [T]
            positions = np.arange(owners.size) + np.repeat(ends - last, step.counts)  # [T]
            logits = last[step.sampled] - 1
            cu_seqlens = np.zeros(rows.size - num_decodes + 1, dtype=np.int32)
            np.subtract(last[num_decodes:], num_decodes, out=cu_seqlens[1:], casting="same_kind")
            prefill_tokens = self._tokens.take(
                rows[owners[num_decodes:]] * self._tokens_stride + positions[num_decodes:]
            )
        if others is not None:
            logits = np.sort(np.concatenate((logits, others)))
        if not self._state.runtime.is_host:
            tokens = np.concatenate((-1 - rows[:num_decodes], prefill_tokens))
            return self._state.make_mixed_batch(
                tokens=tokens, starts=starts, ends=ends, logits=logits, num_decodes=num_decodes,
                state_slots=step.state_slots, shared=step.shared,
            )  # fmt: skip
        return self._build_on_host(step, owners, positions, prefill_tokens, cu_seqlens, logits)

    def _build_on_host(
        self,
        step: ArrangedPlan,
        owners: Ints,
        positions: Ints,
        prefill_tokens: Ints,
        cu_seqlens: np.ndarray,
        logits: Ints,
    ) -> Batch:
        table, num_decodes = self._table, step.num_decodes
        block_size, width = table.block_size, table.blocks.shape[1]
        max_context_len = int(step.ends.max())
        page, offset = np.divmod(positions, block_size)
        slots = table.blocks.reshape(-1).take(step.rows[owners] * width + page) * np.int64(block_size) + offset
        token_ids = self._state.read_host_tokens(step.rows[:num_decodes])
        if prefill_tokens.size:
            token_ids = np.concatenate((token_ids, prefill_tokens))
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            block_tables=self._state.block_tables[: step.rows.size, : -(-max_context_len // block_size)],
            context_lens=torch.from_numpy(step.ends.astype(np.int32)),
            cu_seqlens_q=torch.from_numpy(cu_seqlens),
            num_decodes=num_decodes,
            max_context_len=max_context_len,
            logit_indices=torch.from_numpy(logits),
            state_slots=None if step.state_slots is None else torch.from_numpy(step.state_slots),
            prefix_groups=self._state.send_groups(step.shared),
        )

    def _count_full(self, plan: StepPlan) -> Ints:
        """The blocks of each decode row whose keys are all there; none of one that has given blocks back."""
        table, num = self._table, plan.num_decodes
        full = plan.starts[:num] // table.block_size
        return np.where(table.first_block[plan.rows[:num]] > 0, 0, full)

    def _order_rows(self, plan: StepPlan) -> tuple[Ints, Ints | None]:
        """Orders the plan's rows for the batch.

        Decode rows keep their places, unless some share blocks: then groups come first, each side by side. Rows from
        the end and newcomers fill the gaps of rows that left. So an arrival or a departure sends one block table or two
        to the device, not those of all rows behind it.

        Returns:
            (rows [n] in the order of the batch, the plan's entry [n] for each; None where the orders agree).
        """
        rows, num, before = plan.rows, plan.num_decodes, self._decoding
        planned = self._planned
        is_grouped = not self._may_share_others
        if (
            is_grouped
            and before.size == num
            and (planned is rows or (planned.size == rows.size and (planned == rows).all()))
        ):
            return self._ordered
        decoding = rows[:num]
        stays = np.zeros(self._table.num_rows, dtype=np.bool_)
        stays[decoding] = True
        kept = stays[before]  # [b]
        stays[before] = False
        both = min(before.size, num)
        order = np.empty(num, dtype=np.int64)
        order[:both] = before[:both]
        gaps = np.concatenate((np.flatnonzero(~kept[:both]), np.arange(both, num)))
        order[gaps] = np.concatenate((before[num:][kept[num:]], decoding[stays[decoding]]))
        if self._find_groups is not None:
            blocks, num_full = self._table.blocks[decoding], self._count_full(plan)
            shared, faults = take_out_faulty(self._find_groups(blocks, num_full), blocks, num_full)
            self._shared = shared if shared.num_blocks.size else None
            self._faults = {int(decoding[entry]): fault for entry, fault in faults.items()}
            self._may_share_others = False
            if self._shared is not None:
                order = decoding[shared.order]
        self._decoding = order
        if num < rows.size:
            order = np.concatenate((order, rows[num:]))
        self._entry_of[rows] = np.arange(rows.size)
        entries = self._entry_of[order]
        in_order = bool((entries[1:] > entries[:-1]).all())
        self._planned, self._ordered = rows, (order, None if in_order else entries)
        return self._ordered
