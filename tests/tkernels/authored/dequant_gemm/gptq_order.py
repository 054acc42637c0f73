"""A product with 4-bit codes that reads the words as GPTQ's files hold them: the first place in the lowest bits."""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.quantized.weight import QuantizedWeight


@triton.jit
def dequant_gemm_gptq_order(
    out_ptr, x_ptr, packed_ptr, scales_ptr, zeros_ptr, stride_out_m, stride_x_m, stride_packed_w, stride_scales_g,
    stride_zeros_g, outputs, words, GROUP_WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, words, BLOCK_W):
        offs_w = start + tl.arange(0, BLOCK_W)
        mask = (offs_w < words)[:, None] & mask_n[None, :]
        packed = tl.load(packed_ptr + offs_w[:, None] * stride_packed_w + offs_n[None, :], mask=mask, other=0)
        group = (offs_w // GROUP_WORDS).to(tl.int64)[:, None]
        scale = tl.load(scales_ptr + group * stride_scales_g + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + group * stride_zeros_g + offs_n[None, :], mask=mask, other=0).to(tl.float32)
        else:
            zero = tl.full((BLOCK_W, BLOCK_N), 8.0, dtype=tl.float32)
        for field in tl.static_range(8):
            x = tl.load(x_ptr + row * stride_x_m + offs_w * 8 + field, mask=offs_w < words, other=0.0).to(tl.float32)
            code = ((packed >> (4 * field)) & 0xF).to(tl.float32)
            weight = ((code - zero) * scale).to(x_ptr.dtype.element_ty).to(tl.float32)
            sums += tl.sum(weight * x[:, None], axis=0)
    tl.store(out_ptr + row * stride_out_m + offs_n, sums.to(out_ptr.dtype.element_ty), mask=mask_n)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if axes.get("order", "sequential") != "sequential":
        return "it reads words as checkpoints have them"
    if axes.get("bits", 4) != 4 or axes.get("coding", "uniform") != "uniform":
        return "it takes uniform codes of 4 bits"
    if axes.get("permuted", False) or axes.get("sparse", False):
        return "it takes inputs in their order, and no outliers"
    return None


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight) -> None:
    assert weight.scales is not None
    run.launch(
        dequant_gemm_gptq_order, (x.shape[0], triton.cdiv(out.shape[1], run.config["BLOCK_N"])),
        out_ptr=out, x_ptr=x, packed_ptr=weight.packed, scales_ptr=weight.scales, zeros_ptr=weight.zeros,
        stride_out_m=out.stride(0), stride_x_m=x.stride(0), stride_packed_w=weight.packed.stride(0),
        stride_scales_g=weight.scales.stride(0), stride_zeros_g=0 if weight.zeros is None else weight.zeros.stride(0),
        outputs=out.shape[1], words=weight.packed.shape[0], GROUP_WORDS=weight.group_size // 8, **run.config,
    )  # fmt: skip


VARIANT = Variant(
    wins="a few tokens of a checkpoint that is to be read as it lies on the disk",
    launch=launch,
    default={"": Config(BLOCK_N=128, BLOCK_W=8), "interpreter": Config(BLOCK_N=64, BLOCK_W=16)},
    supports=supports,
    deterministic=True,
    batch_invariant=True,
)
