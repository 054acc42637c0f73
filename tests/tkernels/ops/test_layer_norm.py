"""layer_norm: means far from zero cost it no digits, and a row's bits are its own."""

from pathlib import Path

import pytest
import torch

from tkernels import OPS, Config, Kernel, UnsupportedError
from tkernels.tuning import NEAREST
from tkernels.verification.check import drawn_results

VARIANTS = OPS["layer_norm"].variants
TRITON = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]


def rows(count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [count, width], weight and bias."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((count, width), (width,), (width,))
    )
    return x, weight, bias


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_it_is_centered_scaled_and_moved(variant: str) -> None:
    out = VARIANTS[variant](torch.tensor([[1.0, 3.0, 1.0, 3.0]]), torch.tensor([1.0, 1, 2, 2]), torch.arange(4.0), 3.0)
    torch.testing.assert_close(out, torch.tensor([[-0.5, 1.5, 1.0, 4.0]]), rtol=1e-6, atol=0)  # 1 / sqrt(1 + 3) = 1/2


@pytest.mark.parametrize("variant", TRITON)
@pytest.mark.parametrize("mean", [0.0, 1000.0, -1e5])
def test_a_mean_far_from_zero_costs_no_digits(variant: str, mean: float) -> None:
    x, weight, bias = rows(3, 300, torch.float32)
    x += mean
    exact = VARIANTS["torch"](x.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(VARIANTS[variant](x, weight, bias, 1e-5).double(), exact, rtol=2e-6, atol=2e-6)


def test_a_variance_made_of_squares_is_found(tmp_path: Path) -> None:
    source, sound = VARIANTS["row_per_program"].file.read_text(), "layer_normalized(x, mask, hidden, eps, 0)"
    assert sound in source
    mean = "tl.sum(x, axis=0) / hidden"
    planted = f"(x - {mean}) * tl.rsqrt(tl.sum(x * x, axis=0) / hidden - ({mean}) * ({mean}) + eps)"
    (tmp_path / "layer_norm").mkdir()
    file = tmp_path / "layer_norm" / "squares.py"
    file.write_text(source.replace("row_per_program", "squares").replace(sound, planted))
    variant = OPS.with_variants_from(tmp_path)["layer_norm"].variants["squares"]
    held = {"activation": "float32", "values": "shifted"}
    assert "wrong" in {result.status for result in drawn_results(variant, 12, fixed=held)}


@pytest.mark.parametrize("config", VARIANTS["rows_per_program"].configs, ids=str)
def test_rows_that_share_a_program_have_the_bits_that_each_has_alone(config: Config) -> None:
    x, weight, bias = rows(37, 24, torch.bfloat16)
    x[3::4] *= 1e3  # neighbours of another size
    kernel = Kernel(VARIANTS["rows_per_program"], NEAREST, config.as_dict())
    whole = kernel(x, weight, bias, 1e-5)
    for row in (0, 7, 36):
        assert torch.equal(kernel(x[row : row + 1], weight, bias, 1e-5), whole[row : row + 1])
    assert torch.equal(kernel(x.flip(0), weight, bias, 1e-5).flip(0), whole)


@pytest.mark.parametrize(("variant", "widest"), [("rows_per_program", 2048), ("row_per_program", 16384)])
def test_a_row_too_wide_for_an_algorithm_is_refused(variant: str, widest: int) -> None:
    row = torch.ones(1, widest + 1)
    with pytest.raises(UnsupportedError, match=f"rows wider than {widest}.*H = {widest + 1}"):
        VARIANTS[variant](row, row[0], row[0], 1e-5)
