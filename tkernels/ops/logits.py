"""Rows of logits as models make them, and as none should."""

from typing import Any

import torch

from tkernels.inputs import Draws

VALUES = ("ordinary", "ties", "peaked", "steep", "barred")


def draw_logits(draws: Draws, batch: int, vocab: int, kind: Any) -> torch.Tensor:
    """[B, V] float32 on the device, of one of `VALUES`."""
    logits = draws.normal((batch, vocab), torch.float32) * 3
    if draws.device.type == "meta" or not logits.numel():
        return logits
    if kind == "ties":  # of few different scores, many of them at both ends
        logits = logits.clamp(-3, 3).round()
    elif kind == "peaked":  # as of a model: by rank^-1.5, in any order
        order = torch.stack([draws.permutation(vocab) for _ in range(batch)]).to(logits.device)
        logits = -1.5 * (order + 1).double().log().float() + logits / 16
    elif kind == "steep":  # distances of all sizes, to those where weights and their differences vanish
        logits = logits * 2.0 ** draws.integers(-20, 6, (batch, 1)).to(logits.device)
    elif kind == "barred":  # most tokens, in some rows all; and rows that no model should make
        barred = draws.integers(0, 3, (batch, vocab)).to(logits.device) > 0
        logits = logits.masked_fill(barred, -torch.inf)
        fates = draws.integers(0, 7, (batch,))
        logits[(fates == 0).to(logits.device)] = -torch.inf
        infinite = (fates == 1).nonzero().squeeze(1)
        logits[infinite, draws.integers(0, vocab - 1, infinite.shape)] = torch.inf
    return logits
