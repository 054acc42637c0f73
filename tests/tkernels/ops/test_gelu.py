"""gelu: its two curves, and its ends."""

import math

import pytest
import torch

from tkernels import OPS

VARIANTS = OPS["gelu"].variants


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_curve_is_the_normal_distributions_unless_tanh_is_asked_for(variant: str) -> None:
    x = torch.tensor([[-2.0, -0.5, 0.0, 0.5, 2.0]])
    exact = torch.tensor([[value * share_below(value) for value in x[0].tolist()]])
    by_tanh = torch.tensor([[0.5 * v * (1 + math.tanh((2 / math.pi) ** 0.5 * (v + 0.044715 * v**3))) for v in x[0]]])
    assert (exact - by_tanh).abs().max() > 5e-5
    torch.testing.assert_close(VARIANTS[variant](x), exact, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(VARIANTS[variant](x, tanh=True), by_tanh, rtol=1e-5, atol=1e-7)


def share_below(value: float) -> float:
    """The share of a standard normal distribution below `value`."""
    return math.erfc(-value / 2**0.5) / 2


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_values_give_neither_nan_nor_infinity(variant: str, tanh: bool, dtype: torch.dtype) -> None:
    x = torch.tensor([[-6e4, 6e4, -200.0, 200.0]]).to(dtype)
    assert torch.equal(VARIANTS[variant](x, tanh=tanh), x.clamp(min=0))
