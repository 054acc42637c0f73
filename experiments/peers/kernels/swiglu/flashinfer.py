"""FlashInfer's SiLU-and-multiply."""

import torch

from experiments.peers.installed import needs
from tkernels import Variant


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """The op."""
    import flashinfer

    out: torch.Tensor = flashinfer.silu_and_mul(gate_up)
    return out


VARIANT = Variant(
    wins="a peer", function=swiglu, supports=needs("flashinfer"), deterministic=True, batch_invariant=False
)
