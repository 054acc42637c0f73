"""matmul_gelu: what its composition calls, that every tile is computed, and whose bits a row's are."""

import pytest
import torch

from tkernels import OPS, ContractError, Kernel, select
from tkernels.tuning import NEAREST

VARIANTS = OPS["matmul_gelu"].variants
FUSED = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("tanh", [False, True])
def test_the_bias_is_added_before_the_curve(variant: str, tanh: bool) -> None:
    x, weight, bias = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.eye(2), torch.tensor([1.0, -3.0])
    expected = OPS["gelu"].variants["torch"](x + bias, tanh=tanh)
    torch.testing.assert_close(VARIANTS[variant](x, weight, bias=bias, tanh=tanh), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", FUSED)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (16, 64), (33, 48), (40, 33)])
def test_tiles_cover_every_output(variant: str, tokens: int, width: int) -> None:
    x, weight = torch.randn(tokens, 8), torch.randn(width, 8)
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


def test_composed_calls_the_chosen_parts() -> None:
    axes = {"matmul_gelu": {"T": (1, 8), "I": 32, "H": 16, "bias": True, "tanh": True}}
    choices = {"matmul": "persistent", "gelu": "tile_per_program"}
    kernels = select(choices, device="cpu", dtype=torch.float32, axes=axes)
    assert kernels.arm == {**choices, "matmul_gelu": "composed"}
    x, weight, bias = torch.randn(3, 16), torch.randn(32, 16), torch.randn(32)
    product = OPS["matmul"].variants["persistent"](x, weight, bias=bias)
    expected = OPS["gelu"].variants["tile_per_program"](product, tanh=True)
    assert torch.equal(kernels.matmul_gelu(x, weight, bias=bias, tanh=True), expected)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_bias_of_another_width_is_refused(variant: str) -> None:
    with pytest.raises(ContractError, match="matmul_gelu: argument 'bias' gives I = 5, but I = 4"):
        VARIANTS[variant](torch.zeros(2, 8), torch.zeros(4, 8), bias=torch.zeros(5))
