"""One program takes a few groups of a row, which it reads once and keeps in registers until their scales are known.

Wins everywhere: the bytes moved are the minimum, no reduction leaves a group, and rows of any width are many programs.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.quantized.row_codes import BLOCK, codes_of, reciprocal_of, scale_of, unsupported_codes

CONFIGS = tuple(
    Config(BLOCK_GROUPS=groups, num_warps=warps)
    for groups, warps in ((4, 1), (8, 1), (8, 2), (16, 4), (32, 4), (32, 8))
)


@triton.jit
def quantize_groups_group_tile(
    q_ptr,
    scale_ptr,
    x_ptr,
    stride_q_m,
    stride_scale_m,
    stride_x_m,
    groups,
    reciprocal,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # M * stride can pass 2**31
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    mask = group < groups
    offs = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Groups past the last are not stored, whatever is read of them.
    x = tl.load(x_ptr + row * stride_x_m + offs, mask=mask[:, None]).to(tl.float32)  # [BLOCK_GROUPS, GROUP]
    scale = scale_of(tl.max(tl.abs(x), axis=1), reciprocal)  # [BLOCK_GROUPS]
    tl.store(scale_ptr + row * stride_scale_m + group, scale, mask=mask)
    codes = codes_of(x, scale[:, None], q_ptr.dtype.element_ty, False)
    tl.store(q_ptr + row * stride_q_m + offs, codes, mask=mask[:, None])


def launch(run: Run, q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    tokens, groups = scale.shape
    run.launch(
        quantize_groups_group_tile,
        (tokens, triton.cdiv(groups, run.config["BLOCK_GROUPS"])),
        **pointers("q[m] scale[m] x[m]", q, scale, x),
        groups=groups,
        reciprocal=reciprocal_of(q.dtype),
        GROUP=BLOCK,
        **run.config,
    )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return unsupported_codes({"codes": "float8_e4m3fn"}, device)


VARIANT = Variant(
    wins="everywhere: each group is read once",
    launch=launch,
    configs=CONFIGS,
    supports=supports,
    # By reasoning, not measured: 16 elements a thread are two 16-byte loads of bf16 in flight and one 16-byte store of
    # codes. Interpreted, a row of the tests' sizes is several programs, and the last is not full.
    default={"": Config(BLOCK_GROUPS=16, num_warps=4), "interpreter": Config(BLOCK_GROUPS=2)},
    key=("K",),
    deterministic=True,
    batch_invariant=True,
)
