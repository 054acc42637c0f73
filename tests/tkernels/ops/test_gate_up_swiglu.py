"""gate_up_swiglu: which half is the gate, that every tile is walked, and whose bits a row's are."""

import pytest
import torch

from tkernels import OPS, ContractError, Kernel
from tkernels.tuning import NEAREST

VARIANTS = OPS["gate_up_swiglu"].variants
FUSED = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_gates_rows_come_first(variant: str) -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # gate = x[0], up = x[1]
    out = VARIANTS[variant](torch.tensor([[0.0, 5.0], [1.0, 3.0], [-100.0, 7.0]]), weight)
    torch.testing.assert_close(out, torch.tensor([[0.0], [3 / (1 + torch.e**-1)], [0.0]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", FUSED)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (16, 64), (33, 48), (80, 50), (40, 33)])
def test_fewer_programs_than_tiles_cover_every_tile_once(variant: str, tokens: int, width: int) -> None:
    x, weight = torch.randn(tokens, 8), torch.randn(2 * width, 8)
    torch.testing.assert_close(VARIANTS[variant](x, weight), VARIANTS["torch"](x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", FUSED)
def test_a_row_alone_and_in_a_batch_has_the_same_bits_under_every_config(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 100, generator=generator).bfloat16() for rows in (37, 24))
    for config in VARIANTS[variant].configs:
        kernel = Kernel(VARIANTS[variant], NEAREST, config.as_dict())
        whole = kernel(x, weight)
        for row in (0, 15, 16, 36):
            assert torch.equal(kernel(x[row : row + 1], weight), whole[row : row + 1])


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_an_odd_number_of_weight_rows_is_refused(variant: str) -> None:
    with pytest.raises(ContractError, match="gate_up_swiglu: argument 'weight' has shape"):
        VARIANTS[variant](torch.zeros(2, 8), torch.zeros(5, 8))
