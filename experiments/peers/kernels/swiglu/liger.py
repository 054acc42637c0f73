"""Liger-Kernel's SwiGLU, forward alone, on halves that lie apart as it wants them."""

import torch

from experiments.peers.variants import MadeOnce, peer_variant

_halves: MadeOnce[tuple[torch.Tensor, torch.Tensor]] = MadeOnce()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """The op."""
    from liger_kernel.ops.swiglu import swiglu_forward

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.contiguous(), up.contiguous()

    out: torch.Tensor = swiglu_forward(*_halves.get({"gate_up": gate_up}, made))[-1]
    return out


VARIANT = peer_variant("liger_kernel", swiglu, deterministic=True)
