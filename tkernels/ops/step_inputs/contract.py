"""step_inputs: one step's packed inputs, made on the device from a few integers a sequence and what is kept there."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, lay_out_like
from tkernels.contract import Axes, Case, Choice, Contract, Int, Output, Scalar, Tensor
from tkernels.inputs import LAYOUTS, Draws, poison

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    cu_counts: torch.Tensor,
    page_size: int,
) -> Step:
    """What a model reads in a step in which sequence b advances by cu_counts[b+1] - cu_counts[b] tokens.

    A token that the step before samples is named by its row, so this step can be prepared before anyone has seen it;
    and nothing is read on the host, so one CUDA graph can hold this launch and the model's. A graph is replayed with
    fewer sequences by padding: a start of -1, or T greater than cu_counts[B].

    Args:
        tokens: [T] int64, token ids, or -1 - r for last_tokens[r].
        last_tokens: [R] int64, the newest token of each row.
        block_tables: [B, N] int32, each sequence's pages in order, a free stride; entries past those of a sequence's
            tokens are never read.
        starts: [B] int64, the position of each sequence's first token of this step, or -1 for a sequence that is
            padding: its tokens get id 0, position 0 and slot -1, whatever they are.
        cu_counts: [B+1] int32, where each sequence's tokens begin in the step, from 0; ascending, the last at most T.
            Tokens past it are padding too.
        page_size: Tokens a page.

    Returns:
        token_ids [T] int64.
        positions [T] int64: starts[b], starts[b] + 1, ...
        slots [T] int64: page * page_size + offset of each position.
        context_lens [B] int32: starts[b] plus its tokens, 0 for padding.

    Raises ContractError for shapes and dtypes; values are not checked: that would wait for the device.

    Source: the block tables of Kwon et al., PagedAttention, 2023.
    """
    counts, live = cu_counts.diff(), starts >= 0  # [B]
    token_ids, positions = torch.zeros(2, tokens.shape[0], dtype=torch.int64)
    slots = torch.full_like(tokens, -1)
    owner = torch.repeat_interleave(torch.arange(len(starts)), counts)  # [cu_counts[B]]
    which = torch.where(live[owner])[0]
    owner = owner[which]
    positions[which] = starts[owner] + which - cu_counts[owner]
    ids, kept = tokens[which], tokens[which] < 0
    ids[kept] = last_tokens[-1 - ids[kept]]
    token_ids[which] = ids
    pages = block_tables[owner, positions[which] // page_size].long()
    slots[which] = pages * page_size + positions[which] % page_size
    return token_ids, positions, slots, torch.where(live, starts + counts, 0).int()


def baseline(
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    cu_counts: torch.Tensor,
    page_size: int,
) -> Step:
    """Without a sync. A token past the last sequence belongs to one more, which is padding."""
    begins, ends = cu_counts[:-1], cu_counts[1:]
    context_lens = torch.where(starts >= 0, starts + ends - begins, 0).int()
    if starts.shape[0] == 0:
        zeros = torch.zeros_like(tokens)
        return zeros, zeros.clone(), zeros - 1, context_lens
    index = torch.arange(tokens.shape[0], device=tokens.device)
    owner = torch.searchsorted(ends, index, right=True)  # [T], B for a token past the last sequence
    inside = owner < starts.shape[0]
    owner = owner.clamp(max=starts.shape[0] - 1)
    first = starts[owner]
    is_token = inside & (first >= 0)
    positions = torch.where(is_token, first + index - begins[owner], 0)
    ids = torch.where(tokens < 0, last_tokens[torch.where(is_token, -1 - tokens, 0).clamp(min=0)], tokens)
    slots = block_tables[owner, positions // page_size].long() * page_size + positions % page_size
    return torch.where(is_token, ids, 0), positions, torch.where(is_token, slots, -1), context_lens


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    rows, sequences, num_tokens = int(axes["R"]), int(axes["B"]), int(axes["T"])
    page_size, width = int(axes["page_size"]), int(axes["N"])
    longest = width * page_size
    live = torch.full((sequences,), axes["padding"] != "all")
    used = num_tokens
    if axes["padding"] == "some":
        live = draws.integers(0, 1, (sequences,)) == 1
        used -= int(draws.integers(0, num_tokens, ()))
    counts = _counts(draws, sequences, used, 1 if axes["step"] == "decodes" else longest)
    starts = draws.integers(0, 2**31 - 1, (sequences,)) % (longest - counts + 1)
    starts = torch.where(draws.integers(0, 2, (sequences,)) == 0, longest - counts, starts)  # some tables are full
    starts[~live] = -1
    cu_counts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    tokens = draws.integers(0, 2**18, (num_tokens,))
    kept = draws.integers(0, 1, (num_tokens,)) == 1
    if axes["step"] == "decodes":
        kept[:] = True
    tokens[kept] = -1 - draws.integers(0, rows - 1, (int(kept.sum()),))
    block_tables = torch.full((sequences, width), poison(torch.int32), dtype=torch.int32)
    for b in torch.where(live & (counts > 0))[0].tolist():
        first, end = int(starts[b]) // page_size, -(-int(starts[b] + counts[b]) // page_size)
        block_tables[b, first:end] = draws.integers(0, 2**31 - 2, (end - first,)).int()  # slots are int64
    plain = {
        "tokens": tokens,
        "last_tokens": draws.integers(0, 2**18, (rows,)),
        "starts": starts,
        "cu_counts": cu_counts,
    }
    return {
        "block_tables": draws.laid_out(block_tables.to(device), axes["layout"]),
        **{name: draws.laid_out(tensor.to(device)) for name, tensor in plain.items()},
        "page_size": page_size,
    }


def _counts(draws: Draws, sequences: int, num_tokens: int, most: int) -> torch.Tensor:
    """[B] int64, each at most `most`, in all `num_tokens` or as near to it as that allows."""
    counts = torch.zeros(sequences, dtype=torch.int64)
    left = num_tokens
    for b in range(sequences):
        least = min(most, max(0, left - (sequences - b - 1) * most))  # what those after it cannot take
        counts[b] = draws.integers(least, min(most, left), ())
        left -= int(counts[b])
    return counts


def bytes_moved(case: Case) -> int:
    tokens, starts, cu_counts = (case.inputs[name] for name in ("tokens", "starts", "cu_counts"))
    counts, live = cu_counts.diff(), starts >= 0
    first, last = starts[live], starts[live] + counts[live] - 1
    pages = int((last // case.inputs["page_size"] - first // case.inputs["page_size"] + 1)[counts[live] > 0].sum())
    kept = int(tokens[tokens < 0].unique().numel())
    read = 8 * (tokens.numel() + kept + starts.numel()) + 4 * (cu_counts.numel() + pages)
    return int(read + 8 * 3 * tokens.numel() + 4 * starts.numel())


def flops(case: Case) -> int:
    return 0


def _take(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    taken = dict(inputs)
    cu_counts, tokens = inputs["cu_counts"], inputs["tokens"]
    chosen = torch.tensor(picks, dtype=torch.long, device=tokens.device)
    for name in ("block_tables", "starts"):
        taken[name] = lay_out_like(inputs[name][chosen], inputs[name])
    begun = torch.cat((torch.zeros_like(cu_counts[:1]), cu_counts.diff()[chosen].cumsum(0)))
    taken["cu_counts"] = lay_out_like(begun.int(), cu_counts)
    parts = [tokens[int(cu_counts[b]) : int(cu_counts[b + 1])] for b in picks]
    taken["tokens"] = lay_out_like(torch.cat([tokens[:0], *parts]), tokens)
    return taken


def _part(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    begin, end = inputs["cu_counts"][member : member + 2].tolist()
    parts = {name: results[name][begin:end] for name in ("token_ids", "positions", "slots")}
    return {**parts, "context_lens": results["context_lens"][member]}


def _loosen(inputs: Inputs) -> dict[str, Any]:
    """Behind wider tables, and with tokens more that are nobody's."""
    tables, tokens = inputs["block_tables"], inputs["tokens"]
    wider = torch.cat((tables, torch.full_like(tables, poison(tables.dtype))), dim=1)
    longer = torch.cat((tokens, torch.full_like(tokens[:1], -1).expand(3))) if tokens.numel() else tokens
    return {**inputs, "block_tables": wider, "tokens": longer}


CONTRACT = Contract(
    name="step_inputs",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("R", 1, 2**31 - 1, (1, 2, 5), "rows with a newest token"),
        Int("B", 0, 2**31 - 2, (0, 1, 2, 3), "sequences", batch=True, wide=(3,)),
        Int("T", 0, 2**31 - 1, (0, 1, 3, 9, 20), "tokens", batch=True, wide=(300,)),
        Int("N", 1, 2**31 - 1, (1, 2, 5, 9), "table width", batch=True, wide=(2560,)),
        Int("page_size", 1, 65536, (1, 2, 3, 16), "tokens a page"),
        Choice("layout", LAYOUTS, "of the tables"),
        Choice("step", ("mixed", "decodes"), "tokens a sequence"),
        Choice("padding", ("none", "some", "all"), "of sequences and tokens", wide=("none", "some"), hiding=("all",)),
    ),
    arguments={
        "tokens": Tensor("T", "int64"),
        "last_tokens": Tensor("R", "int64"),
        "block_tables": Tensor("B N", "int32"),
        "starts": Tensor("B", "int64"),
        "cu_counts": Tensor("B+1", "int32"),
        "page_size": Scalar(int, low=1, axis=True),
    },
    outputs={
        "token_ids": Output("T", "int64"),
        "positions": Output("T", "int64"),
        "slots": Output("T", "int64"),
        "context_lens": Output("B", "int32"),
    },
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="sequence_parts",
    benchmarks={
        name: {
            "R": 256,
            "B": sequences,
            "T": num_tokens,
            "N": 2048,
            "page_size": 16,
            "layout": "contiguous",
            "step": step,
            "padding": "none",
        }
        for name, sequences, num_tokens, step in (
            ("prefill_64", 64, 2048, "mixed"),
            ("decode_1", 1, 1, "decodes"),
            ("decode_256", 256, 256, "decodes"),
        )
    },
    batching=Batching(lambda inputs: int(inputs["starts"].shape[0]), _take, _part, _loosen),
)
