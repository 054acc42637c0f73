"""StackedWeight: all experts' codes as one are each expert's own, and what is quantized unlike is refused."""

from dataclasses import replace

import pytest
import torch

from tests.tkernels.ops.test_quantized_weight import drawn
from tkernels.quantized.stacked import StackedWeight, dequantize_experts, interleaved_experts, stack
from tkernels.quantized.weight import QuantizedWeight, dequantize, interleaved

KINDS: list[dict[str, int | str | bool]] = [
    *({"bits": bits} for bits in (2, 3, 4, 8)),
    {"bits": 4, "symmetric": True},
    {"bits": 4, "symmetric": True, "coding": "e2m1"},
    {"bits": 3, "permuted": True, "K": 72, "padding": 24},
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_is_its_own_weight(kind: dict[str, int | str | bool]) -> None:
    weights = [drawn(seed, **kind) for seed in range(3)]
    stacked = stack(weights, len(weights))
    assert stacked.shape == (3, *weights[0].shape)
    assert stacked.nbytes == sum(weight.nbytes for weight in weights)
    dense = dequantize_experts(stacked)
    for number, weight in enumerate(weights):
        for (name, part), (_, own) in zip(stacked.expert(number).parts(), weight.parts(), strict=True):
            assert torch.equal(part, own), name
        assert torch.equal(dense[number], dequantize(weight))
    other = interleaved_experts(stacked)
    assert torch.equal(dequantize_experts(other), dense)
    assert torch.equal(other.packed[1], interleaved(weights[1]).packed)
    assert interleaved_experts(other) is other


def test_zero_points_that_one_expert_has_are_kept_for_all() -> None:
    weights = [drawn(0, symmetric=True), drawn(1)]
    stacked = stack(weights, len(weights))
    assert stacked.zeros is not None
    assert torch.equal(dequantize_experts(stacked), torch.stack([dequantize(weight) for weight in weights]))


def test_codes_in_another_order_than_inputs_stand_beside_others() -> None:
    weights = [drawn(0), drawn(1, permuted=True)]
    stacked = stack(iter(weights), 2)
    assert stacked.permutation is not None
    assert stacked.permutation[0].tolist() == list(range(64))
    assert torch.equal(dequantize_experts(stacked), torch.stack([dequantize(weight) for weight in weights]))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (drawn(1, symmetric=True, coding="e2m1"), "expert 1 .* its coding is e2m1, not uniform"),
        (drawn(1, bits=8), "expert 1 cannot stand beside expert 0: its bits is 8, not 4"),
        (drawn(1, group_size=16), "expert 1 .* its group_size is 16, not 32"),
        (drawn(1, N=8), r"expert 1 .* its shape is \(8, 64\), not \(16, 64\)"),
        (drawn(1, weight="float16", activation="float16"), "expert 1 .* its dtype is torch.float16"),
        (interleaved(drawn(1)), "expert 1 .* its order is interleaved, not sequential"),
        (drawn(1, sparse=True), "expert 1 .* a table or outliers"),
    ],
)
def test_experts_that_are_quantized_unlike_are_refused(other: QuantizedWeight, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        stack([drawn(0), other], 2)


@pytest.mark.parametrize(("given", "needed"), [(0, 0), (1, 2), (3, 2), (0, 2)])
def test_more_weights_or_fewer_than_experts_are_refused(given: int, needed: int) -> None:
    said = rf"weights of {given} experts( or more)? are given for {needed}"
    with pytest.raises(ValueError, match=said):
        stack([drawn(seed) for seed in range(given)], needed)


def test_parts_of_unlike_numbers_of_experts_are_refused() -> None:
    stacked = stack([drawn(0), drawn(1)], 2)
    with pytest.raises(ValueError, match=r"scales has shape \[1, 2, 16\]; one part for each of 2 experts is needed"):
        replace(stacked, scales=stacked.scales[:1])
    with pytest.raises(ValueError, match="group_size"):
        StackedWeight(stacked.packed, stacked.scales, stacked.zeros, group_size=24)
