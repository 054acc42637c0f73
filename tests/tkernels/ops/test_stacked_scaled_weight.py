"""StackedScaledWeight: all experts' e4m3 blocks as one are each expert's own, and what does not fit is refused."""

import pytest
import torch

from tkernels.quantized.scaled_weight import ScaledWeight, dequantize, quantize_rows
from tkernels.quantized.stacked import dequantize_experts, interleaved_experts
from tkernels.quantized.stacked_scaled import StackedScaledWeight, stack_scaled


def drawn(seed: int, outputs: int = 136, inputs: int = 256) -> ScaledWeight:
    generator = torch.Generator().manual_seed(seed)
    values = (64 * torch.randn((outputs, inputs), generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return ScaledWeight(values, torch.rand((-(-outputs // 128), inputs // 128), generator=generator))


def test_each_expert_is_its_own_weight() -> None:
    weights = [drawn(seed) for seed in range(3)]
    stacked = stack_scaled(iter(weights), len(weights))
    assert stacked.shape == (3, 136, 256)
    assert stacked.nbytes == sum(weight.nbytes for weight in weights)
    dense = dequantize_experts(stacked, torch.float64)
    for number, weight in enumerate(weights):
        own = stacked.expert(number)
        assert torch.equal(own.values.view(torch.uint8), weight.values.view(torch.uint8))
        assert torch.equal(own.scales, weight.scales)
        assert own.values.untyped_storage().data_ptr() == stacked.values.untyped_storage().data_ptr()
        assert torch.equal(dense[number], dequantize(weight, torch.float64))
    assert interleaved_experts(stacked) is stacked
    assert stacked.structure != stack_scaled(weights[:2], 2).structure


def test_experts_that_are_stored_unlike_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expert 1 cannot stand .*: its shape is \(8, 256\), not \(136, "):
        stack_scaled([drawn(0), drawn(1, outputs=8)], 2)
    rows = quantize_rows(torch.ones((136, 256)), torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="expert 1: its scales are not of blocks of 128 x 128"):
        stack_scaled([drawn(0), rows], 2)


@pytest.mark.parametrize(("given", "needed"), [(0, 0), (1, 2), (3, 2), (0, 2)])
def test_more_weights_or_fewer_than_experts_are_refused(given: int, needed: int) -> None:
    said = rf"weights of {given} experts( or more)? are given for {needed}"
    with pytest.raises(ValueError, match=said):
        stack_scaled([drawn(seed) for seed in range(given)], needed)


def test_parts_that_do_not_fit_are_refused() -> None:
    stacked = stack_scaled([drawn(0), drawn(1)], 2)
    with pytest.raises(ValueError, match=r"scales has shape \[1, 2, 2\]; one part for each of 2 experts is needed"):
        StackedScaledWeight(stacked.values, stacked.scales[:1])
    with pytest.raises(ValueError, match=r"scales has shape \[1, 2\]; blocks are of float8_e4m3fn values"):
        StackedScaledWeight(stacked.values, stacked.scales[:, :1])
    with pytest.raises(ValueError, match="blocks are of float8_e4m3fn values"):
        StackedScaledWeight(stacked.values.view(torch.int8), stacked.scales)
