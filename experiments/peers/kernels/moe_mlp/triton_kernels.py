"""triton_kernels' products (`matmul_ogs`) with the gather in the first and the weighted sum in the second.

As its `matmul_ogs.py` has it since the routing's classes moved there. The activation between them is torch's: the one
that it can fuse, gpt-oss's, adds 1 to the up projection.
"""

from typing import Any

import torch
import torch.nn.functional as F

from experiments.peers.sorted_pairs import refuse_other_experts, sorted_pairs
from experiments.peers.variants import MadeOnce, peer_variant

_routings: MadeOnce[tuple[Any, Any, Any]] = MadeOnce()


def moe_mlp(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The op, with the pairs sorted before the call."""
    from triton_kernels.matmul_ogs import matmul_ogs

    arguments = {"experts": experts, "weights": weights}
    data, gather, scatter = _routings.get(arguments, lambda: _routing(experts, weights, gate_up.shape[0]))
    both = matmul_ogs(x, gate_up.transpose(1, 2), None, data, gather_indx=gather)  # [T K, 2 I]
    gate, up = both.chunk(2, dim=-1)
    out: torch.Tensor = matmul_ogs(
        F.silu(gate) * up, down.transpose(1, 2), None, data, scatter_indx=scatter, gammas=data.gate_scal
    )
    return out


def _routing(experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> tuple[Any, Any, Any]:
    """What `matmul_ogs` asks for: its routing data, where rows come from, and where they go."""
    from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx
    from triton_kernels.tensor import make_ragged_tensor_metadata

    pairs = sorted_pairs(experts, num_experts)
    counted = weights.flatten()[pairs.order]  # [T K], in the order of the experts
    tiles = make_ragged_tensor_metadata(pairs.counts, experts.numel())
    data = RoutingData(counted, pairs.counts, num_experts, experts.shape[1], tiles)
    return data, GatherIndx(pairs.order, pairs.places), ScatterIndx(pairs.places, pairs.order)


VARIANT = peer_variant("triton_kernels", moe_mlp, supports=refuse_other_experts)
