"""Liger-Kernel's fused add and RMSNorm, forward alone."""

import torch

from experiments.peers.variants import peer_variant


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    out, new_residual, *_ = fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")
    return out, new_residual


VARIANT = peer_variant("liger_kernel", add_rms_norm, deterministic=True)
