"""torch's grouped products (`torch._grouped_mm`) between a gather of the sorted tokens and the weighted sum."""

import torch
import torch.nn.functional as F

from experiments.peers.sorted_pairs import refuse_other_experts, sorted_pairs
from experiments.peers.variants import peer_variant
from tkernels.contract import Axes
from tkernels.device import DeviceFacts, is_from_sm_90


def moe_mlp(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The op, with the pairs sorted before the call."""
    pairs = sorted_pairs(experts, gate_up.shape[0])
    both = torch._grouped_mm(x[pairs.tokens], gate_up.transpose(1, 2), offs=pairs.ends)  # [T K, 2 I]
    gate, up = both.chunk(2, dim=-1)
    products = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=pairs.ends)  # [T K, H]
    of_tokens = products[pairs.places].view(*experts.shape, -1)  # [T, K, H]
    return torch.bmm(weights[:, None].to(x.dtype), of_tokens)[:, 0]


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if reason := refuse_other_experts(axes, device):
        return reason
    if axes.get("activation") != "bfloat16":
        return "it takes bfloat16 alone"
    if not is_from_sm_90(device.arch):
        return f"it is for sm_90 and later, not {device.arch}"
    if int(axes["H"]) % 8 or int(axes["I"]) % 8:
        return f"it takes H and I in multiples of 8, not {axes['H']} and {axes['I']}"
    return None


VARIANT = peer_variant(None, moe_mlp, supports=supports)
