"""matmul: the persistent kernel walks every tile, and a row's bits do not depend on the rows around it."""

import pytest
import torch

from tkernels import OPS
from tkernels.contract import ContractError

VARIANTS = OPS["matmul"].variants


@pytest.mark.parametrize(("tokens", "outputs"), [(1, 1), (16, 64), (33, 96), (80, 50), (40, 33)])
def test_fewer_programs_than_tiles_cover_every_tile_once(tokens: int, outputs: int) -> None:
    x, weight = torch.randn(tokens, 8), torch.randn(outputs, 8)
    torch.testing.assert_close(VARIANTS["persistent"](x, weight), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_a_row_alone_and_in_a_batch_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 100, generator=generator).bfloat16() for rows in (37, 24))
    whole = VARIANTS["persistent"](x, weight)
    for row in (0, 15, 16, 36):
        assert torch.equal(VARIANTS["persistent"](x[row : row + 1], weight), whole[row : row + 1])


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_widths_that_differ_are_refused_with_both_named(variant: str) -> None:
    with pytest.raises(ContractError, match="matmul.*weight"):
        VARIANTS[variant](torch.zeros(2, 8), torch.zeros(4, 9))
