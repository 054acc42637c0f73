"""One program draws a row's token; top-k and top-p cut a short list of its largest scores, not the row.

The first read of a row finds the largest score of every PART tokens. The cut that keeps some hundreds of these keeps as
many tokens, or few more, whatever they are; the second read adds up all weights and lists the ids of those tokens.
Guesses then read the list alone. Only where it lacks what top-k or top-p keep do they read the row, as bisection's.
Wins where rows are long, and filters keep less than a list: a row is read twice, or three times.

Source: the list is found as in Li et al., Top-k by the maxima of groups (RadiK, 2025) and earlier work on selection.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.sample._device import least_weight, scale_of
from tkernels.ops.sample._rows import (
    NOWHERE,
    WORD,
    add_up,
    can_draw,
    draw_token,
    find_highest,
    load_penalties,
    mark_token,
    weigh_block,
)

CONFIGS = tuple(
    Config(BLOCK_V=block, LIST=size, PART=32, num_warps=warps)
    for block, warps in ((1024, 4), (2048, 8), (4096, 8), (4096, 16))
    for size in (2048, 4096)
)

_GUESSES = tl.constexpr(64)
"""Each halves what is left of 2**63 keys."""


@triton.jit
def find_reach(parts_ptr, num_parts, top, goal, BLOCK: tl.constexpr):
    """A key within which `goal` parts have a token, and a quarter more at most where no more of them tie."""
    near, far = tl.full((), -1, tl.int64), tl.full((), NOWHERE, tl.int64)
    reached = num_parts
    for _ in range(_GUESSES):
        if (reached > goal + goal // 4) & (far - near > 1):
            key = near + (far - near) // 2
            counts = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, num_parts, BLOCK):
                parts = start + tl.arange(0, BLOCK)
                largest = tl.load(parts_ptr + parts, mask=parts < num_parts, other=float("-inf"))
                counts += ((-largest + top).to(tl.int64, bitcast=True) <= key).to(tl.int32)
            counted = tl.sum(counts, axis=0)
            if counted >= goal:
                far, reached = key, counted
            else:
                near = key
    return far


@triton.jit
def list_tokens(
    list_ptr, row_ptr, counts_ptr, penalties, vocab, top, scale, least, reach, LIST: tl.constexpr, BLOCK: tl.constexpr
):
    """Lists tokens within reach, LIST at most, of weights of at least `least`, as `load_block` reads them.

    Returns (how many there are within reach, how many there are in all, and the sum of these as a pair).
    """
    num_listed = tl.zeros((), tl.int32)
    counts, highs, lows = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keys, weights = weigh_block(row_ptr, counts_ptr, penalties, tokens, tokens < vocab, top, scale, least)
        counts += (weights > 0).to(tl.int32)
        highs += weights >> 32
        lows += weights & WORD
        near = (weights > 0) & (keys <= reach)
        places = tl.cumsum(near.to(tl.int32), axis=0) + (num_listed - 1)
        num_listed += tl.sum(near.to(tl.int32), axis=0)
        near &= places < LIST
        tl.store(list_ptr + places, tokens, mask=near)
        tl.store(list_ptr + LIST + places, keys, mask=near)
        tl.store(list_ptr + 2 * LIST + places, weights, mask=near)
    low = tl.sum(lows, axis=0)
    return num_listed, tl.sum(counts, axis=0), tl.sum(highs, axis=0) + (low >> 32), low & WORD


@triton.jit
def sample_candidates(
    tokens_ptr, logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, indices_ptr, counts_ptr,
    slots_ptr, penalties_ptr, parts_ptr, list_ptr, stride_logits_b, stride_counts_r, stride_parts_b, stride_list_b,
    vocab, INVERSE_CDF: tl.constexpr, LIST: tl.constexpr, PART: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_b
    parts_ptr += row * stride_parts_b
    list_ptr += row * stride_list_b
    penalties = None
    if counts_ptr is not None:
        slot = tl.load(slots_ptr + row)
        counts_ptr += slot * stride_counts_r
        penalties = load_penalties(penalties_ptr + 3 * row, slot)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    cuts = (top_k > 0) | (top_p < 1.0)
    top, token, broken = find_highest(
        row_ptr, counts_ptr, penalties, vocab, parts_ptr, cuts & (temperature > 0), PART, BLOCK_V
    )
    if can_draw(temperature, top, broken):
        scale, least = scale_of(temperature), least_weight(tl.load(min_p_ptr + row))
        reach = tl.full((), NOWHERE, tl.int64)
        num_listed, list_high, list_low = tl.zeros((), tl.int32), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        count, high, low = tl.zeros((), tl.int32), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if cuts:
            num_parts = tl.cdiv(vocab, PART)
            tl.debug_barrier()  # the parts' maxima are there for all threads
            if vocab > LIST:
                reach = find_reach(parts_ptr, num_parts, top, tl.minimum(LIST // 4, num_parts // 2), BLOCK_V)
            num_listed, count, high, low = list_tokens(
                list_ptr, row_ptr, counts_ptr, penalties, vocab, top, scale, least, reach, LIST, BLOCK_V
            )
            tl.debug_barrier()  # the list is
            _, list_high, list_low, reach, _ = add_up(
                row_ptr, counts_ptr, penalties, list_ptr, True, tl.minimum(num_listed, LIST), top, scale, least,
                NOWHERE, vocab - 1, BLOCK_V, LIST,
            )  # fmt: skip
        elif INVERSE_CDF:
            count, high, low, _, _ = add_up(
                row_ptr, counts_ptr, penalties, None, False, vocab, top, scale, least, NOWHERE, vocab - 1, BLOCK_V, 0
            )
        token = draw_token(
            row_ptr, counts_ptr, penalties, list_ptr, vocab, top, scale, least, top_k, top_p, tl.load(seeds_ptr + row),
            tl.load(indices_ptr + row).to(tl.int32), cuts & (num_listed <= LIST), num_listed, reach, list_high,
            list_low, count, high, low, INVERSE_CDF, BLOCK_V, LIST,
        )  # fmt: skip
    tl.store(tokens_ptr + row, mark_token(token, top, broken))


def launch(
    run: Run,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor | None,
    slots: torch.Tensor | None,
    penalties: torch.Tensor | None,
    inverse_cdf: bool,
) -> None:
    rows, vocab = logits.shape
    run.launch(
        sample_candidates,
        (rows,),
        **pointers("tokens logits[b]", tokens, logits),
        **pointers("temperature top_k top_p min_p seeds indices", temperature, top_k, top_p, min_p, seeds, indices),
        **pointers("counts slots penalties", counts, slots, penalties),
        **pointers("parts[b] list[b]", run.workspace["parts"], run.workspace["list"]),
        stride_counts_r=0 if counts is None else counts.stride(0),
        vocab=vocab,
        INVERSE_CDF=inverse_cdf,
        **run.config,
    )


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> dict[str, Buffer]:
    rows, parts = int(axes["B"]), triton.cdiv(int(axes["V"]), config["PART"])
    return {"parts": Buffer((rows, parts), torch.float64), "list": Buffer((rows, 3 * config["LIST"]), torch.int64)}


VARIANT = Variant(
    wins="long rows of which top-k or top-p keep some hundred tokens",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    # 4 tokens a thread, as bisection's. With 168 registers a multiprocessor holds three rows, with 128 threads spill.
    # 4096 candidates are 1024 that are looked for, and what else is in their parts.
    default={
        "": Config(BLOCK_V=512, LIST=4096, PART=32, num_warps=4, maxnreg=168),
        "gfx942": Config(BLOCK_V=2048, LIST=4096, PART=32, num_warps=8),
        "interpreter": Config(BLOCK_V=512, LIST=32, PART=8),
    },
    key=("V",),
    deterministic=True,
    batch_invariant=True,
)
