"""qk_norm_rope against the rotation's other definition, complex multiplication, and its rules."""

from typing import Any

import pytest
import torch

from tkernels import OPS, ContractError

VARIANTS = list(OPS["qk_norm_rope"].variants)


def call_arguments(head_dim: int = 16, rotary: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    angles = torch.outer(torch.arange(9.0), torch.rand(rotary // 2, generator=generator))
    return {
        "q": torch.randn(3, 4, head_dim, generator=generator),
        "k": torch.randn(3, 2, head_dim, generator=generator),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "positions": torch.tensor([8, 0, 5]),
    }


def turned(heads: torch.Tensor, arguments: dict[str, Any], interleaved: bool) -> torch.Tensor:
    """The first R dims as complex numbers times e^(i angle); the rest as they are."""
    phase = torch.complex(arguments["cos"], arguments["sin"])[arguments["positions"]].unsqueeze(1)  # [T, 1, R/2]
    rotary = 2 * phase.shape[-1]
    pairs = heads[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * phase)  # [T, heads, R/2, 2]
    if not interleaved:
        product = product.transpose(-1, -2)
    return torch.cat((product.flatten(-2), heads[..., rotary:]), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_is_a_complex_product(variant: str, interleaved: bool) -> None:
    arguments = call_arguments()
    q, k = arguments["q"].clone(), arguments["k"].clone()
    assert OPS["qk_norm_rope"].variants[variant](**arguments, interleaved=interleaved) is None
    torch.testing.assert_close(arguments["q"], turned(q, arguments, interleaved), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(arguments["k"], turned(k, arguments, interleaved), rtol=1e-5, atol=1e-6)
    assert torch.equal(arguments["q"][1], q[1])  # position 0 turns nothing


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_norm_covers_all_dims_and_each_weight_its_own_heads(variant: str) -> None:
    arguments = call_arguments()
    weights = {"q_weight": torch.linspace(1, 2, 16), "k_weight": torch.linspace(-1, 1, 16)}
    q, k = (
        torch.nn.functional.rms_norm(arguments[name], (16,), weights[f"{name}_weight"], 1e-5) for name in ("q", "k")
    )
    OPS["qk_norm_rope"].variants[variant](**arguments, **weights, eps=1e-5)
    torch.testing.assert_close(arguments["q"], turned(q, arguments, False), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(arguments["k"], turned(k, arguments, False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_has_the_same_bits_alone(variant: str) -> None:
    together, alone = call_arguments(), call_arguments()
    op = OPS["qk_norm_rope"].variants[variant]
    op(**together, q_weight=torch.ones(16), k_weight=torch.ones(16))
    one = {**alone, **{name: alone[name][2:] for name in ("q", "k", "positions")}}
    op(**one, q_weight=torch.ones(16), k_weight=torch.ones(16))
    assert torch.equal(one["q"], together["q"][2:])
    assert torch.equal(one["k"], together["k"][2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_weight": torch.ones(16)}, "q_weight == k_weight does not hold"),
        ({"cos": torch.ones(9, 9), "sin": torch.ones(9, 9)}, "R <= D does not hold"),
        ({"sin": torch.ones(9, 5)}, "'sin' gives R = 10, but R = 12"),
        ({"cos": torch.ones(9, 6).half()}, "table = float16"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "'positions' must be int64"),
        ({"eps": -1.0}, "'eps' must be at least 0"),
    ],
)
def test_bad_calls_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        OPS["qk_norm_rope"].variants["torch"](**{**call_arguments(), **change})
