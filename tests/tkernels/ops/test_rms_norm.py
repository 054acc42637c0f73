"""rms_norm: both algorithms agree with the definition where a row is many blocks, and a row's bits are its own."""

import pytest
import torch

from tkernels import OPS, Config, Kernel, UnsupportedError
from tkernels.tuning import NEAREST

VARIANTS = OPS["rms_norm"].variants
TRITON = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]


@pytest.mark.parametrize("variant", TRITON)
def test_a_row_of_many_blocks_counts_every_element_once(variant: str) -> None:
    x = torch.ones(1, 1000)
    x[0, -1] = 1000.0  # alone in the tail of the last block
    out = VARIANTS[variant](x, torch.ones(1000), 0.0)
    mean_square = (999 + 1e6) / 1000
    torch.testing.assert_close(out, x / mean_square**0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", TRITON)
def test_a_row_has_the_same_bits_alone(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 300, generator=generator).bfloat16(), torch.randn(300, generator=generator).bfloat16()
    whole = VARIANTS[variant](x, weight, 1e-6)
    for row in range(4):
        assert torch.equal(VARIANTS[variant](x[row : row + 1], weight, 1e-6), whole[row : row + 1])


@pytest.mark.parametrize("config", VARIANTS["rows_per_program"].configs, ids=str)
def test_rows_that_share_a_program_have_the_bits_that_each_has_alone(config: Config) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 24, generator=generator).bfloat16(), torch.randn(24, generator=generator).bfloat16()
    x[3::4] *= 1e3  # neighbours of another size
    kernel = Kernel(VARIANTS["rows_per_program"], NEAREST, config.as_dict())
    whole = kernel(x, weight, 1e-6)
    for row in (0, 1, 7, 30, 36):
        assert torch.equal(kernel(x[row : row + 1], weight, 1e-6), whole[row : row + 1])
    assert torch.equal(kernel(x.flip(0), weight, 1e-6).flip(0), whole)


@pytest.mark.parametrize(("variant", "widest"), [("rows_per_program", 2048), ("row_per_program", 16384)])
def test_a_row_too_wide_for_an_algorithm_is_refused(variant: str, widest: int) -> None:
    with pytest.raises(UnsupportedError, match=f"rows wider than {widest}.*H = {widest + 1}"):
        VARIANTS[variant](torch.ones(1, widest + 1), torch.ones(widest + 1), 1e-6)
