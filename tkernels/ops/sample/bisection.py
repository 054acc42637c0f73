"""One program draws a row's token; what top-k and top-p keep is found by guesses, each of which reads the row.

No sort and no memory: a guess halves the scores between which the cut lies, and ends once there is one token between
two guesses, after some twenty. Wins where rows are short (they stay in the L1 or L2 cache), or where nothing is to be
cut: then a row is read twice.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.sample._device import least_weight, scale_of
from tkernels.ops.sample._rows import (
    NOWHERE,
    add_up,
    can_draw,
    draw_token,
    find_highest,
    load_penalties,
    mark_token,
)

CONFIGS = tuple(
    Config(BLOCK_V=block, num_warps=warps) for block, warps in ((1024, 4), (1024, 8), (2048, 8), (4096, 8), (4096, 16))
)


@triton.jit
def sample_bisection(
    tokens_ptr, logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, indices_ptr, counts_ptr,
    slots_ptr, penalties_ptr, stride_logits_b, stride_counts_r, vocab,
    INVERSE_CDF: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_b
    penalties = None
    if counts_ptr is not None:
        slot = tl.load(slots_ptr + row)
        counts_ptr += slot * stride_counts_r
        penalties = load_penalties(penalties_ptr + 3 * row, slot)
    top, token, broken = find_highest(row_ptr, counts_ptr, penalties, vocab, None, False, 1, BLOCK_V)
    temperature = tl.load(temperature_ptr + row)
    if can_draw(temperature, top, broken):
        scale, least = scale_of(temperature), least_weight(tl.load(min_p_ptr + row))
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        count, high, low = tl.zeros((), tl.int32), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if (top_k > 0) | (top_p < 1.0) | INVERSE_CDF:
            count, high, low, _, _ = add_up(
                row_ptr, counts_ptr, penalties, None, False, vocab, top, scale, least, NOWHERE, vocab - 1, BLOCK_V, 0
            )
        token = draw_token(
            row_ptr, counts_ptr, penalties, None, vocab, top, scale, least, top_k, top_p, tl.load(seeds_ptr + row),
            tl.load(indices_ptr + row).to(tl.int32), False, 0, NOWHERE, 0, 0, count, high, low, INVERSE_CDF, BLOCK_V, 0,
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
        sample_bisection,
        (rows,),
        **pointers("tokens logits[b]", tokens, logits),
        **pointers("temperature top_k top_p min_p seeds indices", temperature, top_k, top_p, min_p, seeds, indices),
        **pointers("counts slots penalties", counts, slots, penalties),
        stride_counts_r=0 if counts is None else counts.stride(0),
        vocab=vocab,
        INVERSE_CDF=inverse_cdf,
        **run.config,
    )


VARIANT = Variant(
    wins="short rows, and rows of which top-k and top-p cut nothing",
    launch=launch,
    configs=CONFIGS,
    # 1024 tokens over 8 warps: 4 a thread, a 16-byte load of fp32; 64-bit integers of 8 take so many registers that a
    # multiprocessor holds one row. With two a thread has 128; left alone, ptxas takes 80 on sm_100, and spills.
    # gfx942's warps have 64 threads. Interpreted rows cross blocks too.
    default={
        "": Config(BLOCK_V=1024, num_warps=8, maxnreg=128),
        "gfx942": Config(BLOCK_V=2048, num_warps=8),
        "interpreter": Config(BLOCK_V=512),
    },
    key=("V",),
    deterministic=True,
    batch_invariant=True,
)
