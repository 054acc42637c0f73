"""How evenly routers share tokens out among experts: the loss that evens it while training, and the measure of it."""

from __future__ import annotations

import math

import torch


def count_tokens(router_logits: torch.Tensor, num_per_token: int) -> torch.Tensor:
    """Tokens that each expert gets, int64 [experts], where logits [tokens, experts] choose `num_per_token` of them."""
    return torch.bincount(router_logits.topk(num_per_token).indices.flatten(), minlength=router_logits.shape[1])


def balance_loss(router_logits: torch.Tensor, num_per_token: int) -> torch.Tensor:
    """The auxiliary loss of one layer's logits [tokens, experts], after Switch Transformers: 1 where all share alike,
    `experts / num_per_token` where the same few get every token.

    It is `experts` times the dot product of each expert's share of the tokens and its mean probability; only the
    latter has a gradient. transformers' own is `num_per_token` times as large, and sums layers up before it multiplies:
    one layer's favourite may be another's neglected.
    """
    tokens, experts = router_logits.shape
    shares = count_tokens(router_logits.detach(), num_per_token) / (tokens * num_per_token)
    return experts * (shares * router_logits.softmax(1, dtype=torch.float32).mean(0)).sum()


def load_entropy(counts: torch.Tensor) -> float:
    """Entropy of counts [experts] as a share of the largest possible: 1 where all are equal, 0 where one has all."""
    shares = counts.double() / counts.sum()
    return -torch.xlogy(shares, shares).sum().item() / math.log(len(counts))
