"""Liger-Kernel's RMSNorm, forward alone."""

import torch

from experiments.peers.variants import peer_variant


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op."""
    from liger_kernel.ops.rms_norm import rms_norm_forward

    out: torch.Tensor = rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]
    return out


VARIANT = peer_variant("liger_kernel", rms_norm, deterministic=True)
