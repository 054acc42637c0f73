"""torch.compile's SwiGLU."""

import torch
import torch.nn.functional as F

from experiments.peers.compiled import compiled_variant, wide


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """The op."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(wide(gate)) * wide(up)).to(gate_up.dtype)


VARIANT = compiled_variant(swiglu)
