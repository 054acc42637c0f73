"""rms_norm: both algorithms agree with the definition where a row is many blocks, and a row's bits are its own."""

import pytest
import torch

from tkernels import OPS

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
