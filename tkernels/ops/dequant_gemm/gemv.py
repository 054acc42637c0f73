"""Matrix-vector product: the codes stream through registers once, are multiplied in fp32, and summed in a fixed order.

Wins at one token, where the weight's bytes are all that counts: no tile of the input is padded to a matrix unit's
rows, and K is split over programs until the device is full, whatever N is.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.dequant_gemm.weight import QuantizedWeight

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_W=words, PROGRAMS_PER_SM=programs, num_warps=warps, num_stages=3)
    for columns, words, warps in ((32, 16, 2), (64, 16, 4), (128, 8, 4), (128, 16, 4), (128, 16, 8), (256, 16, 8))
    for programs in (1, 2, 4, 8)
)
MAX_SPLITS = 64
REDUCED_PER_PROGRAM = 32


@triton.jit
def dequant_gemm_gemv(
    target_ptr,
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    stride_packed_w,
    stride_scales_g,
    stride_zeros_g,
    outputs,
    words,
    words_per_split,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A row of 8 codes is a word row. target is out[N], or partial sums [splits, N] in fp32, one row a split."""
    split = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    first = split * words_per_split
    end = tl.minimum(first + words_per_split, words)
    sums = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_W, num_stages=STAGES):
        offs_w = start + tl.arange(0, BLOCK_W)
        mask_w = offs_w < end
        mask = mask_w[:, None] & mask_n[None, :]
        row_ptrs = packed_ptr + offs_w[:, None] * stride_packed_w  # below 2**31: QuantizedWeight refuses more
        packed = tl.load(row_ptrs + offs_n[None, :], mask=mask, other=0)  # [BLOCK_W, BLOCK_N]
        if ONE_GROUP:  # the whole tile shares one row of scales
            group = tl.full((1, 1), start // GROUP_WORDS, dtype=tl.int64)
            mask_g = mask_n[None, :]
        else:
            group = (offs_w // GROUP_WORDS).to(tl.int64)[:, None]
            mask_g = mask
        scale_ptrs = scales_ptr + group * stride_scales_g + offs_n[None, :]
        scale = tl.load(scale_ptrs, mask=mask_g, other=0.0).to(tl.float32)  # [1 or BLOCK_W, BLOCK_N]
        if zeros_ptr is not None:
            zero_ptrs = zeros_ptr + group * stride_zeros_g + (offs_n // 8)[None, :]
            zero = (tl.load(zero_ptrs, mask=mask_g, other=0) >> (4 * (offs_n % 8))[None, :]) & 15
        else:
            zero = 8
        products = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.float32)
        for nibble in tl.static_range(8):
            x = tl.load(x_ptr + offs_w * 8 + nibble, mask=mask_w, other=0.0).to(tl.float32)  # [BLOCK_W]
            # The difference is taken while both are integers: no cancellation is left for the sum.
            products += (((packed >> (4 * nibble)) & 15) - zero).to(tl.float32) * x[:, None]
        sums += products * scale
    total = tl.sum(sums, axis=0)  # [BLOCK_N]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)
    target_ptrs = target_ptr + split * outputs + offs_n  # at most MAX_SPLITS * 2**24
    tl.store(target_ptrs, total.to(target_ptr.dtype.element_ty), mask=mask_n)


@triton.jit
def dequant_gemm_gemv_reduce(
    out_ptr, partial_ptr, bias_ptr, outputs, splits, BLOCK_N: tl.constexpr, BLOCK_SPLITS: tl.constexpr
):
    """Sums the splits of each output: partial [splits, N] -> out [N]."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_s = tl.arange(0, BLOCK_SPLITS)
    mask_n = offs_n < outputs
    partial_ptrs = partial_ptr + offs_s[:, None] * outputs + offs_n[None, :]
    mask = (offs_s < splits)[:, None] & mask_n[None, :]
    total = tl.sum(tl.load(partial_ptrs, mask=mask, other=0.0), axis=0)  # [BLOCK_SPLITS, BLOCK_N] -> [BLOCK_N]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)
    tl.store(out_ptr + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask_n)


def word_rows_per_split(outputs: int, inputs: int, config: Config, device: DeviceFacts) -> int:
    """Word rows (of 8 inputs) that one program walks: as few as give every multiprocessor PROGRAMS_PER_SM programs."""
    words, block = inputs // 8, config["BLOCK_W"]
    wanted = device.multiprocessors * config["PROGRAMS_PER_SM"] // triton.cdiv(outputs, config["BLOCK_N"])
    return triton.cdiv(triton.cdiv(words, min(max(wanted, 1), MAX_SPLITS)), block) * block


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    outputs, inputs = int(axes["N"]), int(axes["K"])
    splits = triton.cdiv(inputs // 8, word_rows_per_split(outputs, inputs, config, device))
    return {"partial": Buffer((splits, outputs), torch.float32)} if splits > 1 else {}


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, inputs = weight.shape
    words, block_n = inputs // 8, run.config["BLOCK_N"]
    words_per_split = word_rows_per_split(outputs, inputs, run.config, run.device)
    splits = triton.cdiv(words, words_per_split)
    partial = run.workspace.get("partial")
    run.launch(
        dequant_gemm_gemv,
        (x.shape[0] * triton.cdiv(outputs, block_n), splits),
        target_ptr=out if partial is None else partial,
        x_ptr=x,
        packed_ptr=weight.packed,
        scales_ptr=weight.scales,
        zeros_ptr=weight.zeros,
        bias_ptr=bias if partial is None else None,
        stride_packed_w=weight.packed.stride(0),
        stride_scales_g=weight.scales.stride(0),
        stride_zeros_g=0 if weight.zeros is None else weight.zeros.stride(0),
        outputs=outputs,
        words=words,
        GROUP_WORDS=weight.group_size // 8,
        words_per_split=words_per_split,
        ONE_GROUP=weight.group_size // 8 % run.config["BLOCK_W"] == 0,
        BLOCK_N=block_n,
        BLOCK_W=run.config["BLOCK_W"],
        STAGES=run.config.num_stages,
    )
    if partial is not None:
        run.launch(
            dequant_gemm_gemv_reduce,
            (x.shape[0] * triton.cdiv(outputs, REDUCED_PER_PROGRAM),),
            out_ptr=out,
            partial_ptr=partial,
            bias_ptr=bias,
            outputs=outputs,
            splits=splits,
            BLOCK_N=REDUCED_PER_PROGRAM,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
        )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return None if int(axes["M"]) <= 1 else f"it multiplies one token at a time, not M = {axes['M']}"


VARIANT = Variant(
    wins="one token: the weight's bytes are read once and nothing else costs",
    launch=launch,
    configs=CONFIGS,
    # 16 word rows are one group of 128, and 16 x 64 words over 4 warps are two 16-byte loads a thread; 4 programs on
    # each multiprocessor with two tiles ahead keep 32 kB in flight, about what the memory's latency times its bandwidth
    # asks for. Interpreted, tiles are small, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_N=64, BLOCK_W=16, PROGRAMS_PER_SM=4, num_stages=3),
        "interpreter": Config(BLOCK_N=16, BLOCK_W=4, PROGRAMS_PER_SM=1),
    },
    supports=supports,
    workspace=workspace,
    key=("N", "K", "group_size"),
    deterministic=True,
    batch_invariant=True,
)
