"""step_inputs: one step's packed inputs, gathered on the device from what is kept there for every row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, like_laid_out
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor
from tkernels.inputs import LAYOUTS, Draws, poison

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_counts: torch.Tensor,
    sampled: torch.Tensor,
    num_tokens: int,
    width: int,
    page_size: int,
) -> Step:
    """The tensors that a model reads, of a step in which row rows[b] advances by cu_counts[b+1] - cu_counts[b] tokens.

    A step is named by a few integers a sequence, and nothing that it computes is read on the host: so the tokens of the
    step before may still be on their way, and one CUDA graph can hold this launch and the model's. To replay it with
    fewer sequences or tokens, pad: rows of -1, and T greater than cu_counts[B].

    Args:
        tokens: [R, L] int32, each row's token ids by position. Read at a step's positions only.
        blocks: [R, W] int32, each row's pages in order; entries past ceil(context / page_size) are never read.
        rows: [B] int32, the rows that advance, or -1 for padding, whose tokens get id 0, position 0 and slot -1.
        starts: [B] int32, the position of each row's first token of this step; nothing of a padding row's is read.
        cu_counts: [B+1] int32, where each sequence's tokens begin in the step, from 0; ascending, the last at most T.
        sampled: [M] int32, the sequences (0 to B-1) whose last token's logits are wanted, or -1 for padding.
        num_tokens: T, tokens in the step with padding. Those past cu_counts[B] get id 0, position 0 and slot -1.
        width: N, columns of the gathered tables, at most W; at least ceil(context / page_size) of every row.
        page_size: tokens a page.

    Returns:
        token_ids [T] int64.
        positions [T] int64, starts[b], starts[b] + 1, ...
        slots [T] int64, page * page_size + offset of each position, -1 for padding.
        block_tables [B, N] int32, each sequence's pages, 0 past its last.
        context_lens [B] int32, starts[b] plus its tokens, 0 for padding.
        logit_indices [M] int64, where the sampled sequences' last tokens are, 0 for padding.

    Raises ContractError for shapes and dtypes; values are not checked: that would wait for the device.
    """
    counts = cu_counts.diff()  # [B]
    live = rows >= 0
    context_lens = torch.where(live, starts + counts, 0)
    inside = torch.arange(width) < -(-context_lens // page_size)[:, None]  # [B, N]
    block_tables = torch.where(inside, blocks[rows.clamp(min=0), :width], 0)
    token_ids, positions = (torch.zeros(num_tokens, dtype=torch.int64) for _ in range(2))
    slots = torch.full((num_tokens,), -1)
    where = torch.arange(int(cu_counts[-1]))  # tokens of sequences, padding ones among them
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    where, owner = where[live[owner]], owner[live[owner]]
    positions[where] = (starts[owner] + where - cu_counts[owner]).long()
    row, position = rows[owner], positions[where]
    token_ids[where] = tokens[row, position].long()
    slots[where] = blocks[row, position // page_size].long() * page_size + position % page_size
    logit_indices = torch.where(sampled >= 0, cu_counts[sampled + 1] - 1, 0).long()
    return token_ids, positions, slots, block_tables, context_lens.int(), logit_indices


def baseline(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_counts: torch.Tensor,
    sampled: torch.Tensor,
    num_tokens: int,
    width: int,
    page_size: int,
) -> Step:
    """Without a sync: a token past the last sequence belongs to one more, which is padding."""
    device, begins, ends = rows.device, cu_counts[:-1], cu_counts[1:]
    live = rows >= 0
    lens = torch.where(live, starts + ends - begins, 0)  # [B]
    kept_rows = rows.clamp(min=0)
    inside = torch.arange(width, device=device) < ((lens + page_size - 1) // page_size)[:, None]  # [B, N]
    block_tables = torch.where(inside, blocks[:, :width].index_select(0, kept_rows), 0)

    index = torch.arange(num_tokens, device=device)
    owner = torch.searchsorted(ends, index, right=True)  # [T], B for a token past the last sequence
    padding = torch.full((1,), -1, dtype=torch.int32, device=device)
    token_rows = torch.cat((rows, padding))[owner]  # [T]
    # What is added to a token's index to give its position; a sequence more for the tokens past the last.
    shifts = torch.cat((starts - begins, padding))[owner]
    is_token = token_rows >= 0
    positions = torch.where(is_token, index + shifts, 0)
    token_rows = token_rows.clamp(min=0)
    token_ids = torch.where(is_token, tokens[token_rows, positions], 0).long()
    slots = blocks[token_rows, positions // page_size].long() * page_size + positions % page_size
    slots = torch.where(is_token, slots, -1)
    logit_indices = torch.where(sampled >= 0, cu_counts[sampled + 1] - 1, 0).long()
    return token_ids, positions, slots, block_tables, lens.int(), logit_indices


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    row_count, sequences, num_tokens = int(axes["R"]), int(axes["B"]), int(axes["num_tokens"])
    page_size, width = int(axes["page_size"]), int(axes["width"])
    room = min(int(axes["L"]), width * page_size)  # the longest context
    kept = 0 if axes["padding"] == "all" else min(sequences, row_count)
    if axes["padding"] == "some":
        kept -= int(draws.integers(0, kept, ()))
        num_tokens -= int(draws.integers(0, num_tokens, ()))
    live = draws.permutation(sequences)[:kept]
    rows = torch.full((sequences,), -1, dtype=torch.int32)
    rows[live] = draws.permutation(row_count)[:kept].int()
    counts = _counts(draws, sequences, num_tokens, 1 if axes["step"] == "decodes" else room)
    starts = draws.integers(0, 2**31 - 1, (sequences,)) % (room - counts + 1)
    starts = torch.where(draws.integers(0, 2, (sequences,)) == 0, room - counts, starts).int()  # some tables full
    starts[rows < 0] = poison(torch.int32)
    cu_counts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    tokens = torch.full((row_count, int(axes["L"])), poison(torch.int32), dtype=torch.int32)
    blocks = torch.full((row_count, int(axes["W"])), poison(torch.int32), dtype=torch.int32)
    for b in live.tolist():
        row, start, end = int(rows[b]), int(starts[b]), int(starts[b] + counts[b])
        tokens[row, start:end] = draws.integers(0, 2**18, (end - start,)).int()
        pages = -(-end // page_size)
        blocks[row, :pages] = draws.integers(0, 2**31 - 2, (pages,)).int()  # slots are int64
    sampled = torch.full((int(axes["M"]),), -1, dtype=torch.int32)
    chosen = torch.where(counts > 0)[0][: len(sampled)]
    sampled[draws.permutation(len(sampled))[: len(chosen)]] = chosen.int()
    one_dim = {"rows": rows, "starts": starts, "cu_counts": cu_counts, "sampled": sampled}
    return {
        "tokens": draws.laid_out(tokens.to(device), axes["layout"]),
        "blocks": draws.laid_out(blocks.to(device), axes["layout"]),
        **{name: draws.laid_out(tensor.to(device), "contiguous") for name, tensor in one_dim.items()},
        **{name: int(axes[name]) for name in ("num_tokens", "width", "page_size")},
    }


def _counts(draws: Draws, sequences: int, num_tokens: int, most: int) -> torch.Tensor:
    """[B] int64, each at most `most`, `num_tokens` in all or as near as that allows; some are 0 where there is room."""
    counts = torch.zeros(sequences, dtype=torch.int64)
    left = num_tokens
    for b in range(sequences):
        after = (sequences - b - 1) * most  # what the rest can take
        low, high = max(0, left - after), min(most, left)
        counts[b] = low if low >= high else draws.integers(low, high, ())
        counts[b] = counts[b].clamp(max=most)
        left -= int(counts[b])
    return counts


def bytes_moved(case: Case) -> int:
    inputs = case.inputs
    counts = inputs["cu_counts"].diff()
    live = inputs["rows"] >= 0
    read_tokens = int(counts[live].sum())
    contexts = (inputs["starts"] + counts)[live]
    pages = int((-(-contexts // inputs["page_size"])).sum())
    step = 4 * sum(inputs[name].numel() for name in ("rows", "cu_counts", "sampled")) + 4 * int(live.sum())
    sequences = len(live)
    written = 8 * 3 * inputs["num_tokens"] + 4 * sequences * (inputs["width"] + 1) + 8 * inputs["sampled"].numel()
    return 4 * (read_tokens + pages) + step + written


def flops(case: Case) -> int:
    return 0


def _take(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    taken = dict(inputs)
    chosen = torch.tensor(picks, dtype=torch.long, device=inputs["rows"].device)
    for name in ("rows", "starts"):
        taken[name] = like_laid_out(inputs[name][chosen], inputs[name])
    counts = inputs["cu_counts"].diff()[chosen]
    cu_counts = torch.cat((torch.zeros_like(inputs["cu_counts"][:1]), counts.cumsum(0))).int()
    taken["cu_counts"] = like_laid_out(cu_counts, inputs["cu_counts"])
    wanted = set(inputs["sampled"].tolist())
    sampled = [b for b, pick in enumerate(picks) if pick in wanted]
    taken["sampled"] = like_laid_out(torch.tensor(sampled).to(inputs["sampled"]), inputs["sampled"])
    taken["num_tokens"] = int(cu_counts[-1])
    return taken


def _part(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    begin, end = inputs["cu_counts"][member : member + 2].tolist()
    pages = -(-int(results["context_lens"][member]) // inputs["page_size"])
    parts = {name: results[name][begin:end] for name in ("token_ids", "positions", "slots")}
    parts["block_tables"] = results["block_tables"][member, :pages]  # past them: as wide as the caller likes
    parts["context_lens"] = results["context_lens"][member]
    parts["logit_indices"] = results["logit_indices"][inputs["sampled"] == member] - begin
    return parts


def _loosen(inputs: Inputs) -> dict[str, Any]:
    return {**inputs, "width": inputs["blocks"].shape[1], "num_tokens": inputs["num_tokens"] + 3}


CONTRACT = Contract(
    name="step_inputs",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("R", 1, 2**31 - 1, (1, 2, 3, 5), "rows that are kept on the device"),
        Int("L", 1, 2**31 - 1, (1, 7, 16, 33), "positions a row"),
        Int("W", 1, 2**31 - 1, (1, 2, 5, 9), "pages a row"),
        Int("B", 0, 2**31 - 2, (0, 1, 2, 3), "sequences in the step", batch=True),
        Int("M", 0, 2**31 - 1, (0, 1, 3), "sequences whose logits are wanted", batch=True),
        Int("num_tokens", 0, 2**31 - 1, (0, 1, 3, 9, 20), "tokens in the step", batch=True),
        Int("width", 1, 2**31 - 1, (1, 2, 5, 9), "pages a gathered table", batch=True),
        Int("page_size", 1, 65536, (1, 2, 3, 16), "tokens a page"),
        Choice("layout", LAYOUTS, "of tokens and blocks"),
        Choice("step", ("mixed", "decodes"), "tokens a sequence"),
        Choice("padding", ("none", "some", "all"), "of rows and tokens"),
    ),
    constraints=(Constraint("width <= W"),),
    arguments={
        "tokens": Tensor("R L", "int32"),
        "blocks": Tensor("R W", "int32"),
        "rows": Tensor("B", "int32"),
        "starts": Tensor("B", "int32"),
        "cu_counts": Tensor("B+1", "int32"),
        "sampled": Tensor("M", "int32"),
        "num_tokens": Scalar(int, low=0, axis=True),
        "width": Scalar(int, low=1, axis=True),
        "page_size": Scalar(int, low=1, axis=True),
    },
    outputs={
        "token_ids": Output("num_tokens", "int64"),
        "positions": Output("num_tokens", "int64"),
        "slots": Output("num_tokens", "int64"),
        "block_tables": Output("B width", "int32"),
        "context_lens": Output("B", "int32"),
        "logit_indices": Output("M", "int64"),
    },
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="sequence_parts",
    benchmarks={
        name: {
            "R": 256,
            "L": 32768,
            "W": 2048,
            "B": sequences,
            "M": sequences,
            "num_tokens": num_tokens,
            "width": 2048,
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
    batching=Batching(lambda inputs: int(inputs["rows"].shape[0]), _take, _part, _loosen),
)
