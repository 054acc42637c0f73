"""vLLM's fused mixture (`fused_experts`, Triton), which sorts the pairs itself, with the tiles that it ships."""

import torch

from experiments.peers.sorted_pairs import refuse_other_experts
from experiments.peers.variants import peer_variant


def moe_mlp(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The op."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    out: torch.Tensor = fused_experts(x, gate_up, down, weights, experts)
    return out


VARIANT = peer_variant("vllm", moe_mlp, supports=refuse_other_experts)
