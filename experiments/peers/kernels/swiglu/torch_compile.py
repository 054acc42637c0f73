"""torch.compile's SwiGLU."""

import torch
import torch.nn.functional as F

from experiments.peers.compiled import compiled, supports, wide
from tkernels import Variant


def _silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(wide(gate)) * wide(up)).to(gate_up.dtype)


_COMPILED = compiled(_silu_and_multiply)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """The op."""
    out: torch.Tensor = _COMPILED(gate_up)
    return out


VARIANT = Variant(wins="a peer", function=swiglu, supports=supports, deterministic=True, batch_invariant=False)
