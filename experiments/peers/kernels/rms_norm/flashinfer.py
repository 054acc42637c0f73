"""FlashInfer's RMSNorm."""

import torch

from experiments.peers.installed import elementwise_peer


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op."""
    import flashinfer

    out: torch.Tensor = flashinfer.rmsnorm(x, weight, eps)
    return out


VARIANT = elementwise_peer("flashinfer", rms_norm)
