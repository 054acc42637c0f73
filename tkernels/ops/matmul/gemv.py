"""Matrix-vector product: the weight streams through registers once, is multiplied in fp32, and summed in a fixed order.

Wins at one token, where the weight's bytes are all that counts: no tile of the input is padded to a matrix unit's
rows, every lane reads 16 bytes of a row of the weight at once, and K is split over programs where the outputs alone do
not fill the device.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import prefetch_rows, wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.split_sums import partial_arguments, partial_buffers, summed_by_the_last, words_per_split

CONFIGS = (
    *(
        Config(BLOCK_N=rows, BLOCK_K=256 * warps, PROGRAMS_PER_SM=programs, num_warps=warps, num_stages=3)
        for rows in (4, 8)
        for warps in (1, 2, 4)
        for programs in (4, 8, 16)
    ),
    Config(BLOCK_N=8, BLOCK_K=256, PROGRAMS_PER_SM=8, num_warps=1, num_stages=3, launch_pdl=1),
)
MAX_SPLITS = 64


@triton.jit
def matmul_gemv(
    out_ptr,
    partial_ptr,
    arrived_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    stride_weight_n,
    outputs,
    inputs,
    inputs_of_split,
    splits,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    """partial [splits, N] and arrived: None, one split."""
    split = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    first = split * inputs_of_split
    end = tl.minimum(first + inputs_of_split, inputs)
    weight_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight_n  # N * stride can pass 2**31
    prefetch_rows(weight_ptrs, mask_n[:, None], first, end, EARLY_TILES * BLOCK_K)
    wait_for_earlier_launches()
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < end
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        x = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)  # [BLOCK_N]
    mask = mask_n
    if partial_ptr is not None:
        is_last, total = summed_by_the_last(
            total, partial_ptr + offs_n, mask_n, arrived_ptr + tl.program_id(0), split, splits, outputs
        )  # at most MAX_SPLITS * 2**24
        mask = mask & is_last
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)
    tl.store(out_ptr + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask)


def split_inputs(outputs: int, inputs: int, config: Config, device: DeviceFacts) -> int:
    """Inputs for one program: enough programs for PROGRAMS_PER_SM on every multiprocessor."""
    return words_per_split(inputs, config["BLOCK_K"], outputs, config, device, MAX_SPLITS)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    outputs, inputs = int(axes["N"]), int(axes["K"])
    splits = triton.cdiv(inputs, split_inputs(outputs, inputs, config, device))
    return partial_buffers(splits, (outputs,), triton.cdiv(outputs, config["BLOCK_N"]))


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if int(axes["M"]) > 1:
        return f"it takes one token at a time, not M = {axes['M']}"
    return None


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    block_n, block_k = run.config["BLOCK_N"], run.config["BLOCK_K"]
    inputs_of_split = split_inputs(outputs, inputs, run.config, run.device)
    splits = triton.cdiv(inputs, inputs_of_split)
    run.launch(
        matmul_gemv,
        (tokens * triton.cdiv(outputs, block_n), splits),  # no token, no programs
        **partial_arguments(run),
        **pointers("out x weight[n] bias", out, x, weight, bias),
        outputs=outputs,
        inputs=inputs,
        inputs_of_split=inputs_of_split,
        splits=splits,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=run.config.num_stages,
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="one token: the weight's bytes are read once and nothing else costs",
    region={"M": (1, 1)},
    launch=launch,
    configs=CONFIGS,
    # By reasoning, not measured. One warp over 256 inputs: each lane has 8 of every row, as one 16-byte load, and rows
    # are added up across lanes once, at the end. Where warps lie across outputs instead, the input comes in loads of 4
    # and 8 bytes. 3.6 instructions for each weight on sm_90, a quarter of what its 4.3 TB/s leave time for. 8 programs
    # on each multiprocessor with two tiles ahead have 64 kB in flight. gfx942's warps have 64 lanes. Interpreted, tiles
    # are small, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_N=8, BLOCK_K=256, PROGRAMS_PER_SM=8, num_warps=1, num_stages=3),
        "gfx942": Config(BLOCK_N=4, BLOCK_K=512, PROGRAMS_PER_SM=8, num_warps=1, num_stages=2),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=32, PROGRAMS_PER_SM=2),
    },
    supports=supports,
    workspace=workspace,
    key=("N", "K"),
    deterministic=True,
    batch_invariant=True,
)
