"""swiglu: which half is the gate, and that both kernels compute the same bits however the batch is cut."""

import pytest
import torch

from tkernels import OPS

VARIANTS = OPS["swiglu"].variants
TRITON = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_gate_comes_first(variant: str) -> None:
    gate_up = torch.tensor([[0.0, 1.0, 5.0, 3.0]])
    out = VARIANTS[variant](gate_up)
    torch.testing.assert_close(out, torch.tensor([[0.0, 3 / (1 + torch.e**-1)]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_saturated_gate_gives_neither_nan_nor_infinity(variant: str, dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-6e4, 6e4, 0.0, -200.0, 1.0, 1.0, 6e4, 2.0]]).to(dtype)
    out = VARIANTS[variant](gate_up)
    assert out[0, :3].tolist() == [0.0, float(gate_up[0, 1]), 0.0]
    assert out[0, 3] == 0


def test_one_tile_or_many_give_the_same_bits() -> None:
    gate_up = torch.randn(5, 2 * 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = VARIANTS["fused"](gate_up)
    for variant in TRITON:
        assert torch.equal(VARIANTS[variant](gate_up), whole)
        assert torch.equal(VARIANTS[variant](gate_up[3:4]), whole[3:4])
