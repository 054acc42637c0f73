"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies. Every algorithm reads the same interleaved weight, so the choice is made at
each call, on shapes alone. Its tuned config is the algorithm: tuning times each one, last of all variants and with the
config that the project's own lockfile has for it, for every bucket of M, N and K. Where nothing was tuned the choice
follows from which resource is scarce.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.dequant_gemm._argument import axes_of, needs_interleaved
from tkernels.quantized.weight import QuantizedWeight, interleaved

ALGORITHMS = ("gemv", "split_k", "tiled", "dequantize_then_matmul")
BY_TOKENS = 1
LOOKUP_GEMV = "lookup_gemv"
"""What `gemv` is called where codes are looked up."""

CONFIGS = tuple(Config(ALGORITHM=BY_TOKENS + 1 + index) for index in range(len(ALGORITHMS)))

SPLIT_K_TOKENS = 64
"""Up to 32 its rows cost next to nothing; up to 64 the weight is unpacked twice, but by programs that fill the device,
which tiles of 64 rows do not."""

TILED_TOKENS = 512
"""By reasoning: at 8192 x 8192 on an H200 the dense weight's way to memory and back costs 250 MB, 60 us, and 512 tokens
take cuBLAS 90; the tiles that unpack as they go run at perhaps two thirds of its rate."""


def by_tokens(tokens: int) -> str:
    """The algorithm for a number of tokens where nothing was tuned."""
    if tokens <= 1:
        return "gemv"
    if tokens <= SPLIT_K_TOKENS:
        return "split_k"
    return "tiled" if tokens <= TILED_TOKENS else "dequantize_then_matmul"


@cache
def _variants() -> dict[str, Variant]:
    from tkernels.registry import builtin_ops  # not while the registry itself is being made

    known = builtin_ops()["dequant_gemm"].variants
    return {name: known[name] for name in (*ALGORITHMS, LOOKUP_GEMV)}


def chosen(axes: Axes, config: Config, device: DeviceFacts) -> Variant:
    """The algorithm that a call at these axes runs; one that does not take so many tokens gives way to the default, and
    where that does not take such a weight, `tiled` does.
    """
    default = by_tokens(int(axes["M"]))
    wanted = config["ALGORITHM"] - BY_TOKENS - 1
    names = [default, "tiled"] if wanted < 0 else [ALGORITHMS[wanted], default, "tiled"]
    if axes.get("coding", "uniform") == "lookup":
        names = [LOOKUP_GEMV if name == "gemv" else name for name in names]
    return next(v for v in (_variants()[name] for name in names) if not v.supports(axes, device))


def _own_config(variant: Variant, axes: Axes, device: DeviceFacts) -> Config:
    from tkernels.tuning import NEAREST

    return NEAREST.resolve(variant, axes, device)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    variant = chosen(axes, config, device)
    return variant.workspace(axes, _own_config(variant, axes, device), device)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return needs_interleaved(axes)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    axes = {"M": x.shape[0], "activation": str(x.dtype).removeprefix("torch."), **axes_of(weight)}
    variant = chosen(axes, run.config, run.device)
    assert variant.launch is not None, "every algorithm here is launched"
    variant.launch(replace(run, config=_own_config(variant, axes, run.device)), out, x, weight, bias)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=CONFIGS,
    default={"": Config(ALGORITHM=BY_TOKENS)},
    limits={"ALGORITHM": (BY_TOKENS, BY_TOKENS + len(ALGORITHMS))},
    supports=supports,
    workspace=workspace,
    prepare=interleaved,
    key=("M", "N", "K", "bits", "coding", "permuted", "sparse", "group_size"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm
)
