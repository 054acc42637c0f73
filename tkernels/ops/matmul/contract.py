"""matmul: a linear layer with a dense weight."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Tensor, Value, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.products import ROW_CLASSES
from tkernels.ops.served_models import served_products


def reference(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """out[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n].

    Args:
        x: [M, K], any float dtype, free row stride.
        weight: [N, K], as x, free row stride: one row per output feature, as checkpoints store it.
        bias: [N], as x.

    Returns:
        out [M, N], as x.
    """
    out = x @ weight.t()
    return out if bias is None else out + bias


_BLOCK = 256  # output features of a product in blocks
_FEWEST_WEIGHTS = 1 << 21  # 8 MB in fp32: smaller ones stay in a core's cache, and blocks take up to 1.4x the time
_MOST_TOKENS = 256  # there blocks gain 3 to 14%, and less for more tokens


def baseline(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    in_blocks = weight.numel() >= _FEWEST_WEIGHTS and 1 < x.shape[0] <= _MOST_TOKENS
    if in_blocks and x.is_cpu and x.dtype is torch.float32:
        return _multiply_in_blocks(x, weight, bias)
    return F.linear(x, weight, bias)


def _multiply_in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear on a CPU for few tokens, as one product for every 256 output features.

    MKL presumably brings a weight into a layout of its own first, which pays for many tokens only; a block of it stays
    in the core's cache meanwhile. The same bits in half the time: 32 tokens by [4096, 1024] take 7.7 ms where
    F.linear takes 14.6, by [32000, 1024] 59 ms and 119 (one core of an EPYC, with other work beside it).
    """
    tokens, outputs = x.shape[0], weight.shape[0]
    whole = outputs // _BLOCK * _BLOCK
    blocks = weight[:whole].unflatten(0, (-1, _BLOCK)).transpose(1, 2)  # [N / 256, K, 256]
    out = x.new_empty(tokens, outputs)
    products = torch.bmm(x.expand(blocks.shape[0], -1, -1), blocks)  # [N / 256, M, 256]
    out[:, :whole].unflatten(1, (-1, _BLOCK)).copy_(products.transpose(0, 1))
    if whole < outputs:
        out[:, whole:] = F.linear(x, weight[whole:])
    return out if bias is None else out.add_(bias)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    dtype = dtype_of(axes["activation"])
    x, weight = draws.product_operands(tokens, outputs, inputs, axes["values"])
    bias = draws.grid_normal((outputs,), dtype, axes["values"]) if axes["bias"] else None
    return {
        "x": draws.laid_out(x.to(dtype), axes["layout"]),
        "weight": draws.laid_out(weight.to(dtype_of(axes["weight"])), axes["weight_layout"]),
        "bias": None if bias is None else draws.laid_out(bias),
    }


def bytes_moved(case: Case) -> int:
    x, weight, bias = (case.inputs[name] for name in ("x", "weight", "bias"))
    outputs, inputs = weight.shape
    elements = x.shape[0] * (inputs + outputs) + outputs * inputs + (outputs if bias is not None else 0)
    return int(elements * x.element_size())


def flops(case: Case) -> int:
    outputs, inputs = case.inputs["weight"].shape
    return 2 * int(case.inputs["x"].shape[0]) * int(outputs) * int(inputs)


def _benchmarks() -> dict[str, dict[str, Value]]:
    """Every product of the served models, and a square one, which other ops have too. What is compiled ahead of time is
    the last one.
    """
    square = [(f"M={tokens},N=8192,K=8192", tokens, (8192, 8192)) for tokens in (1, 16, 64, 2048)]
    return {
        name: {
            "M": tokens,
            "N": outputs,
            "K": inputs,
            "activation": "bfloat16",
            "weight": "bfloat16",
            "bias": False,
        }
        for name, tokens, (outputs, inputs) in (*served_products(), *square)
    }


CONTRACT = Contract(
    name="matmul",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("M", 0, 2**31 - 1, (0, 2, 3, 17, 40, 1), "tokens", batch=True, wide=(1, 16), classes=ROW_CLASSES),
        Int("N", 1, 2**24, (1, 8, 31, 40, 72), "output features", wide=(136,)),
        Int("K", 1, 2**24, (1, 8, 31, 64, 100, 257, 136), "input features", wide=(640,)),
        dtype_axis("activation"),
        dtype_axis("weight"),
        Choice("bias", (False, True)),
        Choice("layout", LAYOUTS, "of x"),
        Choice("weight_layout", LAYOUTS, "of weight"),
        Choice("values", KINDS),
    ),
    constraints=(Constraint("weight == activation"),),
    arguments={
        "x": Tensor("M K", "activation", read_wide=True),
        "weight": Tensor("N K", "weight", read_wide=True),
        "bias": Tensor("N", "activation", optional=True),
    },
    outputs={"out": Output("M N", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    # At one token of Qwen3-4B, persistent runs 20 programs of its o and down projections on 132 multiprocessors.
    default="auto",
    benchmarks=_benchmarks(),
    corners={"few_outputs": {"M": 1, "N": 8, "K": 16392}},  # one tile, whose inputs are cut as often as they may be
    batching=row_batching("x"),
    work="gemm",
)
