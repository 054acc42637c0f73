"""matmul's torch variant multiplies few tokens by a large weight block by block, on a CPU."""

from typing import Any

import pytest
import torch

from tkernels import OPS

TORCH = OPS["matmul"].variants["torch"]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What torch.bmm has returned."""
    made: list[torch.Tensor] = []
    bmm = torch.bmm

    def noting(*args: Any) -> torch.Tensor:
        made.append(bmm(*args))
        return made[-1]

    monkeypatch.setattr(torch, "bmm", noting)
    return made


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Numbers whose products and sums are exact, in rows that lie apart."""
    drawn = torch.randint(-3, 4, (shape[0], shape[1] + 3), generator=torch.Generator().manual_seed(seed))
    return drawn.float()[:, : shape[1]]


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "blocks"),
    [
        (2, 8192, 256, True),
        (256, 512, 4096, True),
        (20, 513, 4100, True),  # a row is left over
        (20, 100, 21000, True),  # all rows are
        (1, 8192, 256, False),
        (257, 512, 4096, False),
        (20, 511, 4096, False),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_blocks_are_multiplied_where_they_pay(
    tokens: int, outputs: int, inputs: int, blocks: bool, with_bias: bool, products: list[torch.Tensor]
) -> None:
    x, weight = whole_numbers(tokens, inputs, seed=0), whole_numbers(outputs, inputs, seed=1)
    bias = whole_numbers(1, outputs, seed=2)[0] if with_bias else None
    out = TORCH(x, weight, bias=bias)
    assert bool(products) == blocks
    assert out.is_contiguous()
    assert torch.equal(out, OPS["matmul"].contract.reference(x, weight, bias=bias))


def test_other_dtypes_are_left_to_torch(products: list[torch.Tensor]) -> None:
    x, weight = whole_numbers(2, 256, seed=0), whole_numbers(8192, 256, seed=1)
    for dtype in (torch.bfloat16, torch.float64):
        TORCH(x.to(dtype), weight.to(dtype))
    assert not products
