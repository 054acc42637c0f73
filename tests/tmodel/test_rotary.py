"""The rotary tables against the formula."""

from __future__ import annotations

import pytest
import torch

from tmodel.rotary import Rope


def test_tables_follow_the_formula() -> None:
    cos, sin = Rope(6, 10000.0).tables(9, dtype=torch.float64, device="cpu")
    assert cos.shape == sin.shape == (9, 3)
    pair = torch.arange(3, dtype=torch.float64)
    exact = torch.outer(torch.arange(9, dtype=torch.float64), 10000.0 ** (-2 * pair / 6))
    torch.testing.assert_close(cos, exact.cos(), rtol=0, atol=2e-6)
    torch.testing.assert_close(sin, exact.sin(), rtol=0, atol=2e-6)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos), rtol=0, atol=1e-15)


def test_a_float32_table_is_the_float64_one_rounded() -> None:
    for wide, narrow in zip(
        Rope(64, 1e6).tables(5000, dtype=torch.float64, device="cpu"),
        Rope(64, 1e6).tables(5000, dtype=torch.float32, device="cpu"),
        strict=True,
    ):
        assert torch.equal(wide.float(), narrow)


@pytest.mark.parametrize("rotary_dim", [0, 1, 7])
def test_odd_widths_are_refused(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match=f"rotary_dim is {rotary_dim}"):
        Rope(rotary_dim, 10000.0)
