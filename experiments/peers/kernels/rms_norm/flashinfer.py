"""FlashInfer's RMSNorm."""

import torch

from experiments.peers.variants import peer_variant


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op."""
    import flashinfer

    out: torch.Tensor = flashinfer.rmsnorm(x, weight, eps)
    return out


VARIANT = peer_variant("flashinfer", rms_norm, deterministic=True)
