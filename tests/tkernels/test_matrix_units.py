"""What the interpreter rounds as a GPU's matrix units and 16-bit sums do, and what that shows of a kernel."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tkernels.inputs import Draws
from tkernels.interpreter.replaced import exact_products
from tkernels.matrix_units import round_to_tf32, truncate_to_tf32


@triton.jit
def product_kernel(out_ptr, a_ptr, b_ptr, K: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr):
    rows, depth = tl.arange(0, 16), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + depth[None, :])
    b = tl.load(b_ptr + depth[:, None] * 16 + rows[None, :])
    out = tl.dot(a, b, input_precision=PRECISION, out_dtype=SUMS)
    tl.store(out_ptr + rows[:, None] * 16 + rows[None, :], out.to(tl.float32))


@triton.jit
def default_product_kernel(out_ptr, a_ptr, b_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def sum_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))


def operands(depth: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(depth)
    return (
        torch.randn(16, depth, generator=generator).to(dtype),
        torch.randn(depth, 16, generator=generator).to(dtype),
    )


def product(a: torch.Tensor, b: torch.Tensor, precision: str, sums: tl.dtype = tl.float32) -> torch.Tensor:
    out = torch.full((16, 16), torch.nan)
    product_kernel[(1,)](out, a, b, a.shape[1], precision, sums)
    return out


def cut_to_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The definition in float64: the fraction's first bits, the others dropped."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.trunc(mantissa * 2**bits) / 2**bits, exponent)


def largest_error(out: torch.Tensor, oracle: torch.Tensor, scale: torch.Tensor) -> float:
    return float(((out.double() - oracle).abs() / scale).max())


def test_tf32_operands_are_cut_to_eleven_bits_as_the_units_read_them() -> None:
    a, b = operands(32)
    scale = a.double().abs() @ b.double().abs()
    oracle = cut_to_bits(a, 11) @ cut_to_bits(b, 11)
    assert largest_error(product(a, b, "tf32"), oracle, scale) < 2**-20
    assert largest_error(product(a, b, "tf32"), a.double() @ b.double(), scale) > 2**-13
    default = torch.empty(16, 16)
    default_product_kernel[(1,)](default, a[:, :16].contiguous(), b[:16])
    assert torch.equal(default, product(a[:, :16].contiguous(), b[:16], "tf32"))


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_exact_products_and_those_in_three_parts_have_the_digits_of_fp32(precision: str) -> None:
    a, b = operands(32)
    scale = a.double().abs() @ b.double().abs()
    assert largest_error(product(a, b, precision), a.double() @ b.double(), scale) < 2**-20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_short_operands_lose_nothing(dtype: torch.dtype, precision: str) -> None:
    a, b = operands(32, dtype)
    oracle, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert largest_error(product(a, b, precision), oracle, scale) < 2**-20


def test_what_is_not_finite_stays_so() -> None:
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], dtype=np.float32)
    nan_of_low_bits = np.array([0x7F800001], dtype=np.uint32).view(np.float32)
    for rounded in (round_to_tf32, truncate_to_tf32):
        np.testing.assert_array_equal(rounded(special), special)
        assert np.isnan(rounded(nan_of_low_bits)).all()
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    a[0, 0] = torch.inf
    assert product(a, b, "tf32x3")[0].isinf().all()


def test_fp16_sums_round_at_every_sixteen_products() -> None:
    """2048 + 1 is 2048 in fp16, so that ones are lost once the sum is there; fp32 sums keep all of them."""
    a, b = torch.zeros(16, 64), torch.zeros(64, 16)
    a[:, 0], a[:, 16::16], b[:] = 2048, 1, 1
    assert product(a.half(), b.half(), "ieee", tl.float16).eq(2048).all()
    assert product(a.half(), b.half(), "ieee", tl.float32).eq(2051).all()


def test_a_sum_of_fp16_numbers_rounds_every_addition() -> None:
    """By halves: 2048 + 1 is 2048, + 2 is 2050, + 4 and + 8 are 2062; rounded once it would be 2064."""
    x = torch.ones(16, dtype=torch.float16)
    x[0] = 2048
    out = torch.zeros(1)
    sum_kernel[(1,)](out, x, BLOCK=16)
    assert out.item() == 2062
    sum_kernel[(1,)](out, x.float(), BLOCK=16)
    assert out.item() == 2063


def test_a_sum_of_bf16_numbers_is_refused() -> None:
    with pytest.raises(InterpreterError, match=r"reduction or scan on bf16: widen with \.to\(tl\.float32\)"):
        sum_kernel[(1,)](torch.zeros(1), torch.ones(16, dtype=torch.bfloat16), BLOCK=16)


def test_the_batch_sanitizers_products_round_operands_too() -> None:
    a, b = operands(32)
    with exact_products():
        assert largest_error(product(a, b, "tf32"), cut_to_bits(a, 11) @ cut_to_bits(b, 11), torch.ones(1)) < 2**-20


@pytest.mark.parametrize(("left", "right"), [("tf32", "float32"), ("float32", "tf32"), ("bfloat16", "float32")])
def test_drawn_factors_of_products_show_the_digits_that_either_loses(left: str, right: str) -> None:
    """Summed in fp32 they are exact, so that what differs is what was rounded."""
    x, weight = Draws(0, torch.device("cpu")).product_operands(4, 8, 1280)
    exact = x @ weight.t()
    assert torch.equal(x.float() @ weight.t().float(), exact.float())
    cut = {"tf32": lambda values: cut_to_bits(values, 11), "bfloat16": lambda values: values.bfloat16().double()}
    rounded = cut.get(left, torch.Tensor.double)(x) @ cut.get(right, torch.Tensor.double)(weight).t()
    assert (rounded - exact).abs().max() > 1e3 * 2.0**-24 * exact.abs().max()
