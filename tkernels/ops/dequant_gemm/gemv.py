"""Matrix-vector product: the codes stream through registers once, are multiplied in fp32, and summed in a fixed order.

Wins at one token, where the weight's bytes are all that counts: no tile of the input is padded to a matrix unit's
rows, nothing passes through shared memory but the loads in flight, and K is split over programs until the device is
full, whatever N is.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.dequant_gemm.argument import only_plain
from tkernels.ops.dequant_gemm.split_sums import summed_by_the_last, words_per_split
from tkernels.ops.dequant_gemm.unpack import weight_arguments, weight_tile
from tkernels.ops.dequant_gemm.weight import QuantizedWeight, interleaved

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_W=words, PROGRAMS_PER_SM=programs, num_warps=warps, num_stages=3)
    for columns, words, warps in ((64, 16, 1), (128, 8, 1), (128, 16, 2), (256, 16, 4))
    for programs in (2, 4, 8)
)
MAX_SPLITS = 64


@triton.jit
def dequant_gemm_gemv_difference(packed, zero, exponent, NIBBLE: tl.constexpr):
    """code - zero-point of one nibble of each word, exact, in fp32.

    The code stays where it is in the word and becomes the low mantissa bits of a number whose bit there counts 1, of
    which that number and the zero-point are subtracted: three operations at the full rate, where a conversion from an
    integer runs at a quarter of it (see unpack.py).
    """
    SHIFT: tl.constexpr = 0 if NIBBLE < 5 else 12  # fp32 has 23 bits of mantissa: nibbles 5 to 7 are shifted down
    PLACE: tl.constexpr = 4 * NIBBLE - SHIFT
    # In a register, not a constant beside the mask: one instruction, not two (see `magic_of`).
    magic = exponent - (PLACE << 23)
    code = (((packed >> SHIFT) & (15 << PLACE)) | magic).to(tl.float32, bitcast=True)  # 2**(23 - PLACE) + code
    return code - (zero + 2.0 ** (23 - PLACE))


@triton.jit
def dequant_gemm_gemv(
    out_ptr,
    partial_ptr,
    arrived_ptr,
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
    words_of_split,
    splits,
    exponent,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A word row is a row of `packed`: 8 inputs for each output. partial [splits, N] and arrived: None, one split."""
    split = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    first = split * words_of_split
    end = tl.minimum(first + words_of_split, words)
    sums = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_W, num_stages=STAGES):
        offs_k = start * 8 + tl.arange(0, BLOCK_W * 8)
        x = tl.load(x_ptr + offs_k, mask=offs_k < end * 8, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, (BLOCK_W, 2, 2, 2)))  # [BLOCK_W, 2, 2] each: k of a word by its bits
        even04, even26 = tl.split(even)
        odd15, odd37 = tl.split(odd)
        x0, x4 = tl.split(even04)
        x2, x6 = tl.split(even26)
        x1, x5 = tl.split(odd15)
        x3, x7 = tl.split(odd37)
        packed, zero, scale = weight_tile(
            packed_ptr, scales_ptr, zeros_ptr, stride_packed_w, stride_scales_g, stride_zeros_g,
            start, end, offs_n, mask_n, GROUP_WORDS, ONE_GROUP, BLOCK_W,
        )  # fmt: skip
        zero = zero.to(tl.float32)
        # Words are interleaved: the odd codes are below the even ones.
        products = dequant_gemm_gemv_difference(packed, zero, exponent, 0) * x1[:, None]
        products += dequant_gemm_gemv_difference(packed, zero, exponent, 1) * x3[:, None]
        products += dequant_gemm_gemv_difference(packed, zero, exponent, 2) * x5[:, None]
        products += dequant_gemm_gemv_difference(packed, zero, exponent, 3) * x7[:, None]
        products += dequant_gemm_gemv_difference(packed, zero, exponent, 4) * x0[:, None]
        products += dequant_gemm_gemv_difference(packed, zero, exponent, 5) * x2[:, None]
        products += dequant_gemm_gemv_difference(packed, zero, exponent, 6) * x4[:, None]
        products += dequant_gemm_gemv_difference(packed, zero, exponent, 7) * x6[:, None]
        sums += products * scale.to(tl.float32)
    total = tl.sum(sums, axis=0)  # [BLOCK_N]
    mask = mask_n
    if partial_ptr is not None:
        is_last, total = summed_by_the_last(
            total, partial_ptr + offs_n, mask_n, arrived_ptr + tl.program_id(0), split, splits, outputs
        )  # at most MAX_SPLITS * 2**24
        mask = mask & is_last
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)
    tl.store(out_ptr + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask)


def split_words(outputs: int, inputs: int, config: Config, device: DeviceFacts) -> int:
    """Word rows for one program: enough programs for PROGRAMS_PER_SM on every multiprocessor."""
    programs = device.multiprocessors * config["PROGRAMS_PER_SM"]
    return words_per_split(
        inputs // 8, config["BLOCK_W"], triton.cdiv(outputs, config["BLOCK_N"]), programs, MAX_SPLITS
    )


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    outputs, inputs = int(axes["N"]), int(axes["K"])
    splits = triton.cdiv(inputs // 8, split_words(outputs, inputs, config, device))
    if splits == 1:
        return {}
    tiles = triton.cdiv(outputs, config["BLOCK_N"])
    return {
        "partial": Buffer((splits, outputs), torch.float32),
        "arrived": Buffer((tiles,), torch.int32, zeroed=True),
    }


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if int(axes["M"]) > 1:
        return f"it takes one token at a time, not M = {axes['M']}"
    return only_plain(axes)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, inputs = weight.shape
    words, block_n = inputs // 8, run.config["BLOCK_N"]
    words_of_split = split_words(outputs, inputs, run.config, run.device)
    splits = triton.cdiv(words, words_of_split)
    run.launch(
        dequant_gemm_gemv,
        (x.shape[0] * triton.cdiv(outputs, block_n), splits),
        out_ptr=out,
        partial_ptr=run.workspace.get("partial"),
        arrived_ptr=run.workspace.get("arrived"),
        x_ptr=x,
        bias_ptr=bias,
        outputs=outputs,
        words=words,
        words_of_split=words_of_split,
        splits=splits,
        exponent=(127 + 23) << 23,  # of 2**23 in fp32
        **weight_arguments(weight, run.config["BLOCK_W"]),
        BLOCK_N=block_n,
        BLOCK_W=run.config["BLOCK_W"],
        STAGES=run.config.num_stages,
    )


VARIANT = Variant(
    wins="one token: the weight's bytes are read once and nothing else costs",
    launch=launch,
    configs=CONFIGS,
    # One warp over 128 outputs: each thread has 4 outputs of every row, as one 16-byte load, so a row's inputs serve
    # four weights at once and rows are added up without a shuffle: 4.4 instructions for each weight on sm_90, against
    # 5.2 and 5.8 with four warps over 256 and 128 outputs. 16 rows would be 4.1, in registers that unaligned weights
    # spill. 8 programs on each multiprocessor with two tiles ahead have 64 kB in flight. Interpreted, tiles are small,
    # so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_N=128, BLOCK_W=8, PROGRAMS_PER_SM=8, num_warps=1, num_stages=3),
        "interpreter": Config(BLOCK_N=16, BLOCK_W=4, PROGRAMS_PER_SM=1),
    },
    supports=supports,
    workspace=workspace,
    key=("N", "K", "group_size"),
    prepare=interleaved,
    deterministic=True,
    batch_invariant=True,
)
