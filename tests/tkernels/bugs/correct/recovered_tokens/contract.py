"""recovered_tokens: the token that takes the place of a rejected draft token, by the target's probabilities."""

import torch

from tkernels.contract import Contract, Int, Output, Tensor
from tkernels.inputs import Draws


def reference(probs, draft, noise):
    """out[t] = the v, other than draft[t], for which probs[t % B, v] / noise[t, v] is largest, as a one-hot row.

    Args:
        probs: [B, V] float32, positive: each row's tokens draw from the same one.
        draft: [T] int32, the rejected tokens.
        noise: [T, V] float32, positive.

    Returns:
        out [T, V] float32, one-hot.
    """
    rows = torch.arange(draft.shape[0], device=draft.device)
    ratios = probs[rows % probs.shape[0]] / noise
    ratios[rows, draft.long()] = 0
    out = torch.zeros_like(ratios)
    out[rows, ratios.argmax(dim=-1)] = 1
    return out


def make_inputs(axes, seed, device):
    draws = Draws(seed, device)
    requests, tokens, vocabulary = int(axes["B"]), int(axes["T"]), int(axes["V"])
    probs = draws.normal((requests, vocabulary), torch.float32).abs() + 0.01
    noise = draws.normal((tokens, vocabulary), torch.float32).abs() + 0.01
    # A rejected token is mostly the likeliest one.
    ratios = probs[torch.arange(tokens) % requests] / noise
    draft = ratios.argmax(dim=-1).int()
    return {"probs": draws.laid_out(probs), "draft": draws.laid_out(draft), "noise": draws.laid_out(noise)}


CONTRACT = Contract(
    name="recovered_tokens",
    reference=reference,
    baseline=reference,
    axes=(
        Int("B", 1, 2**31 - 1, (1, 2), "requests"),
        Int("T", 1, 2**31 - 1, (1, 3, 4), "rejected tokens", wide=(8,)),
        Int("V", 2, 2**24, (2, 31, 64, 100), "vocabulary", wide=(3000,)),
    ),
    arguments={
        "probs": Tensor("B V", "float32"),
        "draft": Tensor("T", "int32"),
        "noise": Tensor("T V", "float32"),
    },
    outputs={"out": Output("T V", "float32", exact=True)},
    make_inputs=make_inputs,
    bytes_moved=lambda case: 4 * (case.inputs["probs"].numel() + 2 * case.inputs["noise"].numel()),
    flops=lambda case: case.inputs["noise"].numel(),
    default="torch",
)
