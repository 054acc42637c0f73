"""add_layer_norm: what it leaves alone, and what it adds before it rounds."""

import pytest
import torch

from tkernels import OPS, UnsupportedError

VARIANTS = OPS["add_layer_norm"].variants
TRITON = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_inputs_stay_and_outputs_are_new(variant: str) -> None:
    x, residual = torch.tensor([[1.0, 3.0]] * 2), torch.full((2, 2), 4.0)
    weight, bias = torch.tensor([2.0, 4.0]), torch.tensor([10.0, 20.0])
    out, new_residual = VARIANTS[variant](x, residual, weight, bias, 3.0)
    assert new_residual.tolist() == [[5.0, 7.0]] * 2
    torch.testing.assert_close(out, torch.tensor([[9.0, 22.0]] * 2), rtol=1e-6, atol=0)  # 1 / sqrt(1 + 3) = 1/2
    assert (x.tolist(), residual.tolist()) == ([[1.0, 3.0]] * 2, [[4.0, 4.0]] * 2)
    assert len({tensor.data_ptr() for tensor in (x, residual, out, new_residual)}) == 4


@pytest.mark.parametrize("variant", TRITON)
def test_the_norm_sees_the_sum_before_it_is_rounded(variant: str) -> None:
    # 256 + 1 is no bf16 number: rounded to 256 first, the row would be constant and its norm 0.
    x, residual = torch.tensor([[1.0, 0.0]]).bfloat16(), torch.full((1, 2), 256.0).bfloat16()
    out, new_residual = VARIANTS[variant](x, residual, torch.ones(2).bfloat16(), torch.zeros(2).bfloat16(), 1e-5)
    assert new_residual.tolist() == [[256.0, 256.0]]
    assert out.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("variant", TRITON)
def test_a_row_has_the_bits_that_it_has_alone(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(37, 24, generator=generator).bfloat16() for _ in range(2))
    x[3::4] *= 1e3  # neighbours of another size
    arguments = torch.ones(24).bfloat16(), torch.ones(24).bfloat16(), 1e-5
    whole = VARIANTS[variant](x, residual, *arguments)
    for row in (slice(0, 1), slice(7, 8), slice(5, 22)):
        alone = VARIANTS[variant](x[row], residual[row], *arguments)
        assert all(torch.equal(a, b[row]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize(("variant", "widest"), [("rows_per_program", 2048), ("row_per_program", 16384)])
def test_a_row_too_wide_for_an_algorithm_is_refused(variant: str, widest: int) -> None:
    row = torch.ones(1, widest + 1)
    with pytest.raises(UnsupportedError, match=f"rows wider than {widest}.*H = {widest + 1}"):
        VARIANTS[variant](row, row, row[0], row[0], 1e-5)
