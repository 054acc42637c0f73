"""The interpreter's patches: what they repair is silently wrong without them, so each is pinned by what a GPU would
do.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tkernels.interpreter import round_to_bf16
from tkernels.language import dot


def torch_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def test_rounding_to_bf16_is_to_nearest_even_for_every_kind_of_value() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000  # every value exactly half-way between two bf16
    edges = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 3.3895314e38], dtype=np.float32).view(
        np.uint32
    )
    values = np.concatenate([bits, ties, ties + 1, ties - 1, edges]).view(np.float32)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(round_to_bf16(values), torch_bits(values))


def test_rounding_keeps_nan() -> None:
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7FC00000], dtype=np.uint32).view(np.float32)
    rounded = torch.from_numpy(round_to_bf16(payloads).view(np.int16)).view(torch.bfloat16)
    assert rounded.isnan().all()


@triton.jit
def cast_kernel(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask).to(tl.bfloat16), mask=mask)


@triton.jit
def implicit_cast_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def add_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x + x)


@triton.jit
def dot_kernel(out_ptr, a_ptr, b_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    a = tl.load(a_ptr + rows * BLOCK + cols)
    b = tl.load(b_ptr + rows * BLOCK + cols)
    tl.store(out_ptr + rows * BLOCK + cols, dot(a, b, tl.zeros([BLOCK, BLOCK], tl.float32)))


def test_a_kernels_cast_to_bf16_rounds_as_a_gpu_does() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for kernel, sizes in ((cast_kernel, {"n": 100, "BLOCK": 128}), (implicit_cast_kernel, {"BLOCK": 64})):
        out = torch.zeros(100, dtype=torch.bfloat16)
        kernel[(1,)](out, x, **sizes)
        n = min(100, sizes["BLOCK"])
        assert torch.equal(out[:n], x[:n].to(torch.bfloat16))


def test_bf16_arithmetic_is_refused_instead_of_computed_on_bit_patterns() -> None:
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"widen with \.to\(tl\.float32\)"):
        add_kernel[(1,)](torch.empty_like(x), x, BLOCK=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot_is_exact_to_fp32_at_every_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    dot_kernel[(1,)](out, a, b, BLOCK=16)
    oracle = a.double() @ b.double()
    assert (out.double() - oracle).abs().max() <= 16 * 2.0**-24 * (a.double().abs() @ b.double().abs()).max()
