"""FlashInfer's SiLU-and-multiply."""

import torch

from experiments.peers.variants import peer_variant


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """The op."""
    import flashinfer

    out: torch.Tensor = flashinfer.silu_and_mul(gate_up)
    return out


VARIANT = peer_variant("flashinfer", swiglu, deterministic=True)
