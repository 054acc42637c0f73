"""add_rms_norm: what it leaves alone, and what it adds before it rounds."""

import pytest
import torch

from tkernels import OPS, UnsupportedError

VARIANTS = OPS["add_rms_norm"].variants
TRITON = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_inputs_stay_and_outputs_are_new(variant: str) -> None:
    x, residual, weight = torch.ones(2, 8), torch.full((2, 8), 3.0), torch.arange(8.0)
    out, new_residual = VARIANTS[variant](x, residual, weight, 0.0)
    assert torch.equal(new_residual, torch.full((2, 8), 4.0))
    torch.testing.assert_close(out, weight.expand(2, 8), rtol=1e-6, atol=0)
    assert torch.equal(x, torch.ones(2, 8))
    assert torch.equal(residual, torch.full((2, 8), 3.0))
    assert len({tensor.data_ptr() for tensor in (x, residual, out, new_residual)}) == 4


@pytest.mark.parametrize("variant", TRITON)
def test_the_norm_sees_the_sum_before_it_is_rounded(variant: str) -> None:
    # 256 + 1 is no bf16 number: rounded to 256 first, the row would be constant and its norm exactly 1 everywhere.
    x, residual = torch.tensor([[1.0, 256.0]]).bfloat16(), torch.tensor([[256.0, -256.0]]).bfloat16()
    out, new_residual = VARIANTS[variant](x, residual, torch.ones(2).bfloat16(), 0.0)
    assert new_residual.tolist() == [[256.0, 0.0]]
    exact = torch.tensor([257.0 / (257.0**2 / 2) ** 0.5, 0.0]).bfloat16()
    assert torch.equal(out[0], exact)


@pytest.mark.parametrize("variant", TRITON)
def test_a_row_has_the_same_bits_alone(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(4, 100, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(100, generator=generator).bfloat16()
    whole = VARIANTS[variant](x, residual, weight, 1e-6)
    alone = VARIANTS[variant](x[2:3], residual[2:3], weight, 1e-6)
    assert all(torch.equal(a, w[2:3]) for a, w in zip(alone, whole, strict=True))


def test_rows_that_share_a_program_have_the_bits_that_each_has_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(37, 24, generator=generator).bfloat16() for _ in range(2))
    x[3::4] *= 1e3  # neighbours of another size
    arguments = torch.ones(24).bfloat16(), 1e-6
    variant = VARIANTS["rows_per_program"]
    whole = variant(x, residual, *arguments)
    for row in (slice(0, 1), slice(7, 8), slice(30, 31), slice(36, 37), slice(5, 22)):
        alone = variant(x[row], residual[row], *arguments)
        assert all(torch.equal(a, b[row]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize(("variant", "widest"), [("rows_per_program", 2048), ("row_per_program", 32768)])
def test_a_row_too_wide_for_an_algorithm_is_refused(variant: str, widest: int) -> None:
    row = torch.ones(1, widest + 1)
    with pytest.raises(UnsupportedError, match=f"rows wider than {widest}.*H = {widest + 1}"):
        VARIANTS[variant](row, row, row[0], 1e-6)
