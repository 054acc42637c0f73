"""How evenly tokens are shared out, on loads whose figures are known."""

from __future__ import annotations

import math

import pytest
import torch

from tmodel.expert_load import balance_loss, count_tokens, load_entropy


@pytest.mark.parametrize(
    ("counts", "entropy"),
    [
        ([5] * 8, 1.0),
        ([7, 0, 0, 0, 0, 0, 0, 0], 0.0),
        ([3, 0, 3, 0, 0, 3, 3, 0], 2 / 3),  # ln 4 of ln 8
        ([1, 3], (0.25 * math.log(4) + 0.75 * math.log(4 / 3)) / math.log(2)),
    ],
)
def test_the_entropy_of_a_load_is_a_share_of_the_largest(counts: list[int], entropy: float) -> None:
    assert load_entropy(torch.tensor(counts)) == pytest.approx(entropy, abs=1e-15)


def test_a_token_counts_for_each_expert_that_it_is_sent_to() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, -1.0], [2.0, 3.0, 1.0, -1.0], [0.0, 1.0, 3.0, 2.0]])
    assert count_tokens(logits, 1).tolist() == [0, 2, 1, 0]
    assert count_tokens(logits, 2).tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize("num_per_token", [1, 2, 4])
def test_the_balance_loss_is_one_where_all_share_alike_and_experts_over_choices_at_worst(num_per_token: int) -> None:
    first = torch.zeros(8)
    first[:num_per_token] = 50.0
    even = torch.stack([first.roll(shift) for shift in range(8)])
    assert balance_loss(even, num_per_token).item() == pytest.approx(1.0, abs=1e-6)
    assert balance_loss(first.expand(8, 8), num_per_token).item() == pytest.approx(8 / num_per_token, abs=1e-6)


def test_the_balance_loss_of_a_layer_is_that_of_transformers_over_the_choices_and_calls_favourites_down() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 8, generator=generator) + torch.arange(8) / 4
    logits.requires_grad_()
    loss = balance_loss(logits, 2)
    assert loss.item() == pytest.approx(load_balancing_loss_func((logits,), 8, 2).item() / 2, rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    pulls = logits.grad.sum(0)
    assert pulls[7] > 0 > pulls[0]
    assert pulls.sum().item() == pytest.approx(0, abs=1e-6)


def test_half_precision_logits_are_averaged_in_float32() -> None:
    logits = torch.zeros(4096, 8, dtype=torch.bfloat16)
    assert balance_loss(logits, 2).dtype == torch.float32
    assert balance_loss(logits, 2).item() == pytest.approx(1.0, abs=1e-6)
