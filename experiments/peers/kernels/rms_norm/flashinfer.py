"""FlashInfer's RMSNorm."""

import torch

from experiments.peers.installed import needs
from tkernels import Variant


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op."""
    import flashinfer

    out: torch.Tensor = flashinfer.rmsnorm(x, weight, eps)
    return out


VARIANT = Variant(
    wins="a peer", function=rms_norm, supports=needs("flashinfer"), deterministic=True, batch_invariant=False
)
