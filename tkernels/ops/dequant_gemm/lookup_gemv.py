"""Matrix-vector product with a table for each output: the codes stream through registers once and pick their values.

Wins at one token where codes are looked up (SqueezeLLM): the table's few entries stay in registers, a shuffle picks one
for each weight, and the outliers are added by the same programs. What it computes is far more than gemv does for each
byte (8.7 instructions for each weight on sm_90, against 4.4), so 4-bit tables reach memory's rate sooner than 3-bit
ones, and neither quite.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.dequant_gemm._argument import needs_interleaved
from tkernels.ops.dequant_gemm._outlier_sums import OUTLIERS_AT_A_TIME, outlier_sums_of_one, outliers_arguments
from tkernels.ops.dequant_gemm._unpack import (
    inputs_at,
    looked_up,
    prefetch_words,
    table_arguments,
    table_tile,
    word_tile,
    words_arguments,
)
from tkernels.ops.split_sums import partial_arguments, partial_buffers, summed_by_the_last, words_per_split
from tkernels.quantized.codes import codes_per_word
from tkernels.quantized.weight import QuantizedWeight, interleaved

CONFIGS = (
    *(
        Config(BLOCK_N=columns, BLOCK_K=depth, PROGRAMS_PER_SM=programs, num_warps=warps, num_stages=3)
        for columns, depth, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (32, 128, 4))
        for programs in (2, 4, 8)
    ),
    Config(BLOCK_N=64, BLOCK_K=64, PROGRAMS_PER_SM=4, num_warps=4, num_stages=3, launch_pdl=1),
)
MAX_SPLITS = 64


@triton.jit
def dequant_gemm_lookup_gemv(
    out_ptr,
    partial_ptr,
    arrived_ptr,
    x_ptr,
    packed_ptr,
    high_ptr,
    table_ptr,
    permutation_ptr,
    rows_ptr,
    cols_ptr,
    vals_ptr,
    bias_ptr,
    stride_packed_w,
    stride_high_w,
    stride_table_c,
    outputs,
    words,
    words_of_split,
    splits,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    """A word row is a row of `packed`. partial [splits, N] and arrived: None, one split."""
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    BLOCK_W: tl.constexpr = BLOCK_K // FIELDS
    split = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    first = split * words_of_split
    end = tl.minimum(first + words_of_split, words)
    prefetch_words(
        packed_ptr, stride_packed_w, first, end, tl.program_id(0) * BLOCK_N, outputs, EARLY_TILES * BLOCK_W, BLOCK_N
    )
    wait_for_earlier_launches()
    table = table_tile(table_ptr, stride_table_c, offs_n, mask_n, BITS)
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_W, num_stages=STAGES):
        cols, mask_k = inputs_at(permutation_ptr, start * FIELDS + tl.arange(0, BLOCK_K), end * FIELDS)
        x = tl.load(x_ptr + cols, mask=mask_k, other=0.0).to(tl.float32)
        packed, high = word_tile(
            packed_ptr, high_ptr, stride_packed_w, stride_high_w, start, end, offs_n, mask_n, BLOCK_W
        )
        weight = looked_up(packed, high, table, table_ptr, stride_table_c, offs_n, mask_n, BITS, BLOCK_N, BLOCK_K)
        sums += weight * x[None, :]
    total = tl.sum(sums, axis=1)  # [BLOCK_N]
    if rows_ptr is not None:
        total = outlier_sums_of_one(
            total, x_ptr, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, split, splits, OUTLIERS_AT_A_TIME
        )
    mask = mask_n
    if partial_ptr is not None:
        is_last, total = summed_by_the_last(
            total, partial_ptr + offs_n, mask_n, arrived_ptr + tl.program_id(0), split, splits, outputs
        )  # at most MAX_SPLITS * 2**24
        mask = mask & is_last
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)
    tl.store(out_ptr + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask)


def split_words(outputs: int, places: int, bits: int, config: Config, device: DeviceFacts) -> int:
    """Word rows for one program: enough programs for PROGRAMS_PER_SM on every multiprocessor."""
    fields = codes_per_word(bits)
    return words_per_split(places // fields, config["BLOCK_K"] // fields, outputs, config, device, MAX_SPLITS)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    outputs, places, bits = int(axes["N"]), int(axes["K"]) + int(axes["padding"]), int(axes["bits"])
    splits = triton.cdiv(places // codes_per_word(bits), split_words(outputs, places, bits, config, device))
    return partial_buffers(splits, (outputs,), triton.cdiv(outputs, config["BLOCK_N"]))


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if int(axes["M"]) > 1:
        return f"it takes one token at a time, not M = {axes['M']}"
    if axes.get("coding", "lookup") != "lookup":
        return f"it takes codes that are looked up, not {axes['coding']} ones: gemv does"
    return needs_interleaved(axes, device)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, block_n = weight.shape[0], run.config["BLOCK_N"]
    words = weight.places // codes_per_word(weight.bits)
    words_of_split = split_words(outputs, weight.places, weight.bits, run.config, run.device)
    splits = triton.cdiv(words, words_of_split)
    run.launch(
        dequant_gemm_lookup_gemv,
        (x.shape[0] * triton.cdiv(outputs, block_n), splits),
        **partial_arguments(run),
        **pointers("out x bias permutation", out, x, bias, weight.permutation),
        **words_arguments(weight),
        **table_arguments(weight),
        **outliers_arguments(weight),
        outputs=outputs,
        words=words,
        words_of_split=words_of_split,
        splits=splits,
        BLOCK_N=block_n,
        BLOCK_K=run.config["BLOCK_K"],
        STAGES=run.config.num_stages,
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="one token where codes are looked up: the weight's bytes are read once and its tables stay in registers",
    region={"M": (1, 1)},
    launch=launch,
    configs=CONFIGS,
    # A sum for each weight of a tile: 64 x 64 of them are 32 registers in 4 warps, as many as leave room for the table
    # and for the codes on their way. Interpreted, tiles are small, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_N=64, BLOCK_K=64, PROGRAMS_PER_SM=8, num_warps=4, num_stages=3),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=32, PROGRAMS_PER_SM=1),
    },
    supports=supports,
    workspace=workspace,
    key=("N", "K", "bits", "permuted", "sparse"),
    prepare=interleaved,
    deterministic=True,
    batch_invariant=True,
)
