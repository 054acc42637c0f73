"""FlashInfer's SiLU-and-multiply."""

import torch

from experiments.peers.installed import elementwise_peer


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """The op."""
    import flashinfer

    out: torch.Tensor = flashinfer.silu_and_mul(gate_up)
    return out


VARIANT = elementwise_peer("flashinfer", swiglu)
