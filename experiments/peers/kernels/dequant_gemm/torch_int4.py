"""torch's own int4 matmul (`_weight_int4pack_mm`, tinygemm), on its own packing."""

from dataclasses import dataclass
from typing import Any

import torch

from experiments.peers.variants import peer_variant, refuse_other_codes
from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.quantized.weight import QuantizedWeight, unpack_codes

_INNER_K_TILES = 8  # the largest it knows


@dataclass(frozen=True)
class Packed:
    """W[n, k] = (code - 8) * scale + zero, packed as the kernel reads it; scales_and_zeros [G, N, 2]."""

    codes: torch.Tensor
    scales_and_zeros: torch.Tensor
    group_size: int

    def map_tensors(self, function: Any) -> "Packed":
        return Packed(function(self.codes), function(self.scales_and_zeros), self.group_size)


def prepare(weight: QuantizedWeight) -> Packed:
    """The same codes in torch's layout."""
    assert weight.scales is not None, "`supports` refuses a table"
    codes = unpack_codes(weight).t()  # [N, K]
    nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()  # [N, K/2]
    zeros = 8 if weight.zeros is None else weight.zeros  # [G, N]
    offsets = (8 - zeros) * weight.scales
    both = torch.stack((weight.scales, torch.as_tensor(offsets).expand_as(weight.scales)), dim=-1)  # [G, N, 2]
    return Packed(torch._convert_weight_to_int4pack(nibbles, _INNER_K_TILES), both.contiguous(), weight.group_size)


def dequant_gemm(x: torch.Tensor, weight: Any, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op, on the weight as it is or as prepared."""
    packed = weight if isinstance(weight, Packed) else prepare(weight)
    out = torch._weight_int4pack_mm(x, packed.codes, packed.group_size, packed.scales_and_zeros)
    return out if bias is None else out + bias


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if reason := refuse_other_codes(axes, device):
        return reason
    if axes.get("activation") != "bfloat16" or axes.get("weight") != "bfloat16":
        return "it takes bfloat16 alone"
    if axes.get("group_size") not in (32, 64, 128, 256):
        return f"it takes groups of 32, 64, 128 or 256, not {axes.get('group_size')}"
    if int(axes["N"]) % 8 or int(axes["K"]) % 1024:
        return f"it takes N in multiples of 8 and K in multiples of 1024, not {axes['N']} and {axes['K']}"
    return None


VARIANT = peer_variant(None, dequant_gemm, prepare=prepare, supports=supports)
