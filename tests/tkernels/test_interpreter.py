"""The interpreter's patches: what they repair is silently wrong without them, so each is pinned by what a GPU would
do.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tkernels.interpreter.number_formats import round_to_bf16, round_to_e4m3
from tkernels.interpreter.replaced import overflow_checks
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
def convert_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


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


def test_every_finite_bf16_number_is_read_as_torch_reads_it_subnormal_ones_too() -> None:
    patterns = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    x = patterns[torch.isfinite(patterns)]
    x = torch.cat([x, x.new_zeros(2**16 - x.numel())])
    for kernel in (convert_kernel, implicit_cast_kernel):
        out = torch.ones(2**16)
        kernel[(1,)](out, x, BLOCK=2**16)
        assert torch.equal(out.view(torch.int32), x.float().view(torch.int32))


def test_a_kernels_cast_to_bf16_rounds_as_a_gpu_does() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for kernel, sizes in ((cast_kernel, {"n": 100, "BLOCK": 128}), (implicit_cast_kernel, {"BLOCK": 64})):
        out = torch.zeros(100, dtype=torch.bfloat16)
        kernel[(1,)](out, x, **sizes)
        n = min(100, sizes["BLOCK"])
        assert torch.equal(out[:n], x[:n].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_fp8_code_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = torch.zeros(256, dtype=dtype)
    convert_kernel[(1,)](out, codes, BLOCK=256)
    torch.testing.assert_close(out, codes.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kernels_cast_to_fp8_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, ties, ties * (1 + 2.0**-7), ties * (1 - 2.0**-7), torch.randn(3) * 100])
    x = torch.cat([x, -x]).to(dtype)
    x = torch.cat([x, x.new_zeros(2048 - x.numel())])
    out = torch.zeros(2048, dtype=torch.float8_e4m3fn)
    convert_kernel[(1,)](out, x, BLOCK=2048)
    assert torch.equal(out.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_what_fp8_cannot_hold_becomes_nan_so_that_a_missing_clamp_shows() -> None:
    codes = round_to_e4m3(np.array([448.0, 464.0, 464.1, 1e30, np.inf, -np.inf, np.nan]))
    assert [int(code) & 0x7F for code in codes] == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F]


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


@triton.jit
def masked_copy(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_lanes_that_are_masked_off_are_undefined(dtype: torch.dtype) -> None:
    x, out = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    masked_copy[(1,)](out, x, 5, BLOCK=8)
    assert out[:5].float().eq(1).all()
    assert out[5:].float().isnan().all()


@triton.jit
def load_masked(out_ptr, x_ptr, keep_ptr, BLOCK: tl.constexpr):
    rows, column = tl.arange(0, BLOCK), tl.arange(0, 1)[None, :]
    mask = (tl.load(keep_ptr + rows) > 0)[:, None] & (column < 1)
    tl.store((out_ptr + rows)[:, None] + column, tl.load((x_ptr + rows)[:, None] + column, mask=mask, other=0.0))


@pytest.mark.parametrize("block", [1, 2])
def test_a_block_of_one_element_is_masked_too(block: int) -> None:
    """Triton's own functions ask `if mask` whether there is one: that one says no is no answer to this."""
    out, x = torch.ones(2), torch.full((2,), float("nan"))
    load_masked[(1,)](out, x, torch.zeros(2), block)
    assert out[:block].tolist() == [0.0] * block


@triton.jit
def zero_beyond(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < size, other=0.0))


@pytest.mark.parametrize("block", [1, 2])
def test_a_lane_that_is_masked_off_holds_other_in_a_block_of_one_too(block: int) -> None:
    out = torch.ones(block)
    zero_beyond[(1,)](out, torch.ones(block), 0, BLOCK=block)
    assert out.eq(0).all()


@triton.jit
def rows_of_range(out_ptr, first, rows, stride, STEP: tl.constexpr, WIDE: tl.constexpr, BUILTIN: tl.constexpr):
    begin = first.to(tl.int64) if WIDE else first
    if BUILTIN:
        for row in range(begin, first + rows, STEP):
            tl.store(out_ptr + row - first, row * stride)
    else:
        for row in tl.range(begin, first + rows, STEP, num_stages=2):
            tl.store(out_ptr + row - first, row * stride)


@triton.jit
def squares(out_ptr, first, last):
    for row in range(first, last):
        tl.store(out_ptr + row - first, row * row)


@pytest.mark.parametrize("builtin", [True, False])
def test_a_loops_variable_has_the_type_of_its_bounds(builtin: bool) -> None:
    """As `visit_For` of Triton's compiler types it: what it is multiplied by overflows here where it does there."""
    first, stride = 2**20, 2**12
    out = torch.zeros(4, dtype=torch.int64)
    with overflow_checks():
        rows_of_range[(1,)](out, first, 4, stride, STEP=2, WIDE=True, BUILTIN=builtin)
        assert out.tolist() == [first * stride, 0, (first + 2) * stride, 0]
        with pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow"):
            rows_of_range[(1,)](out, first, 4, stride, STEP=2, WIDE=False, BUILTIN=builtin)


def test_a_loops_variable_multiplied_by_itself_overflows() -> None:
    with overflow_checks(), pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow"):
        squares[(1,)](torch.zeros(4, dtype=torch.int64), 2**16 - 1, 2**16 + 1)
