"""One program walks its row twice in blocks: once for its largest value, unless a scale is given, and to write codes.

Wins for rows wider than a program's registers hold (from about 32k): nothing spills, and the second read of the row
comes from the L2 cache, which the first has just filled.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.quantized.row_codes import codes_of, reciprocal_of, scale_of, unsupported_codes

CONFIGS = tuple(
    Config(BLOCK_K=block, num_warps=warps) for block, warps in ((1024, 2), (2048, 4), (4096, 8), (8192, 8), (8192, 16))
)


@triton.jit
def quantize_tokens_two_pass(
    q_ptr,
    scale_ptr,
    x_ptr,
    static_scale_ptr,
    stride_q_m,
    stride_x_m,
    inputs,
    reciprocal,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # M * stride can pass 2**31
    x_ptr += row * stride_x_m
    q_ptr += row * stride_q_m
    if static_scale_ptr is None:
        largest = tl.zeros((BLOCK_K,), dtype=tl.float32)
        for start in range(0, inputs, BLOCK_K):
            offs = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + offs, mask=offs < inputs, other=0.0)  # [BLOCK_K]
            largest = tl.maximum(largest, tl.abs(x))  # exact in x's own dtype
        scale = scale_of(tl.max(largest, axis=0), reciprocal)
    else:
        scale = tl.load(static_scale_ptr)
    tl.store(scale_ptr + row, scale)
    for start in range(0, inputs, BLOCK_K):
        offs = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + offs, mask=offs < inputs).to(tl.float32)  # codes past the last are not stored
        codes = codes_of(x, scale, q_ptr.dtype.element_ty, static_scale_ptr is not None)
        tl.store(q_ptr + offs, codes, mask=offs < inputs)


def launch(
    run: Run,
    q: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    static_scale: torch.Tensor | None,
) -> None:
    tokens, inputs = x.shape
    run.launch(
        quantize_tokens_two_pass,
        (tokens,),
        **pointers("q[m] scale x[m] static_scale", q, scale, x, static_scale),
        inputs=inputs,
        reciprocal=reciprocal_of(dtype),
        **run.config,
    )


VARIANT = Variant(
    wins="rows wider than 32k, which would spill from one program's registers",
    region={"K": (32769, 2**24)},
    launch=launch,
    configs=CONFIGS,
    supports=unsupported_codes,
    # 4096 over 8 warps: 16 elements a thread, two 16-byte loads of bf16 in flight and one 16-byte store of codes.
    # gfx942's warps have 64 threads: 4 of them for the same. Interpreted rows are short and cross blocks too.
    default={
        "": Config(BLOCK_K=4096, num_warps=8),
        "gfx942": Config(BLOCK_K=4096, num_warps=4),
        "interpreter": Config(BLOCK_K=128),
    },
    key=("K",),
    deterministic=True,
    batch_invariant=True,
)
