"""One program keeps as many rows of logits as fill its tile in its registers, and takes the largest of each K times.

Wins everywhere so far: a row is read once, and nothing is written but what is chosen.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.logprobs._rows import ids_of, logits_of, make_keys
from tkernels.ops.rows import too_wide

WIDEST = 1024

CONFIGS = tuple(
    Config(BLOCK_ELEMENTS=elements, num_warps=warps)
    for elements, warps in ((256, 1), (512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (2048, 4), (2048, 8))
)

_LEAST = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["tokens"])
def route_rows_per_program(
    experts_ptr, weights_ptr, logits_ptr, bias_ptr, stride_logits_t, tokens, num_experts, scale,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # T * stride can pass 2**31
    offs = tl.arange(0, BLOCK_E)[None, :]
    row_ptrs = logits_ptr + rows * stride_logits_t
    inside = (rows < tokens) & (offs < num_experts)
    logits = tl.load(row_ptrs + offs, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK_T, BLOCK_E]
    ranked = logits
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + offs, mask=offs < num_experts, other=0.0)
    at_fault = tl.max((ranked != ranked).to(tl.int32), axis=1, keep_dims=True) > 0
    keys = make_keys(tl.where(at_fault, 0.0, ranked), offs)  # of columns past the last expert, behind all experts'
    # The k-th choice lies in column k of tiles like the logits', so that no round moves anything between warps.
    chosen = tl.full((BLOCK_T, BLOCK_E), _LEAST, tl.int64)
    x = tl.full((BLOCK_T, BLOCK_E), float("-inf"), tl.float32)  # the chosen logits
    for k in range(TOP_K):
        best = tl.max(keys, axis=1, keep_dims=True)
        chosen = tl.where(offs == k, best, chosen)
        if bias_ptr is not None:
            x = tl.where(offs == k, tl.sum(tl.where(keys == best, logits, 0.0), axis=1, keep_dims=True), x)
        keys = tl.where(keys == best, _LEAST, keys)
    if bias_ptr is None:
        x = tl.where(offs < TOP_K, logits_of(chosen), x)
    if SIGMOID:
        # exp(x) / (1 + exp(x)) below 0 and 1 / (1 + exp(-x)) above it; where they are divided by their sum, without
        # the exponent that all have, or the sum could be 0.
        shares = tl.minimum(x, 0.0)
        if NORMALIZE:
            shares -= tl.max(shares, axis=1, keep_dims=True)
        shares = tl.exp(shares) / (1.0 + tl.exp(-tl.abs(x)))
        if NORMALIZE:
            shares /= tl.sum(shares, axis=1, keep_dims=True)
    else:
        among = logits
        if NORMALIZE:
            among = x
        largest = tl.max(among, axis=1, keep_dims=True)
        shares = tl.exp(x - largest) / tl.sum(tl.exp(among - largest), axis=1, keep_dims=True)
    offs_out = rows * TOP_K + offs
    is_choice = (rows < tokens) & (offs < TOP_K)
    tl.store(experts_ptr + offs_out, ids_of(chosen), mask=is_choice)
    tl.store(weights_ptr + offs_out, tl.where(at_fault, float("nan"), shares) * scale, mask=is_choice)


def launch(
    run: Run,
    experts: torch.Tensor,
    weights: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    *,
    normalize: bool,
    sigmoid: bool,
    bias: torch.Tensor | None,
    scale: float,
) -> None:
    tokens, num_experts = logits.shape
    block_e = triton.next_power_of_2(num_experts)
    block_t = max(1, run.config["BLOCK_ELEMENTS"] // block_e)
    run.launch(
        route_rows_per_program,
        (triton.cdiv(tokens, block_t),),
        **pointers("experts weights logits[t] bias", experts, weights, logits, bias),
        tokens=tokens,
        num_experts=num_experts,
        scale=scale,
        TOP_K=top_k,
        NORMALIZE=normalize,
        SIGMOID=sigmoid,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_wide(axes, "E", WIDEST, "do not fit into a program's registers", "torch")


VARIANT = Variant(
    wins="everywhere: a row is read once, and neither probabilities nor an order of all experts are written",
    launch=launch,
    configs=CONFIGS,
    supports=supports,
    # 8 elements a thread: one 16-byte load of bf16, and 16 registers of keys. 8 rows of 128 experts, 128 rows of 8.
    default={
        "": Config(BLOCK_ELEMENTS=1024),
        "gfx942": Config(BLOCK_ELEMENTS=1024, num_warps=2),  # of 64 threads
        "interpreter": Config(BLOCK_ELEMENTS=64),
    },
    key=("E", "K"),
    deterministic=True,
    batch_invariant=True,
)
