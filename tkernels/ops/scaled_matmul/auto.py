"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies. Its tuned config is the algorithm: tuning times each one, last of all
variants and with the config that the project's own lockfile has for it, for every bucket of M, N and K. Where nothing
was tuned the choice follows from which resource is scarce.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.contract import Value
from tkernels.ops.scaled_matmul._code_sums import unsupported_sums

ALGORITHMS = ("split_k", "tiled")
BY_TOKENS = 1
CONFIGS = tuple(Config(ALGORITHM=BY_TOKENS + 1 + index) for index in range(len(ALGORITHMS)))

SPLIT_K_TOKENS = 64
"""By reasoning: so many tokens are one row of tiles, far fewer than fill a device, unless K is split."""


def by_tokens(tokens: int) -> str:
    """The algorithm for a number of tokens where nothing was tuned."""
    return "split_k" if tokens <= SPLIT_K_TOKENS else "tiled"


@cache
def _variants() -> dict[str, Variant]:
    from tkernels.registry import builtin_ops  # not while the registry itself is being made

    return {name: builtin_ops()["scaled_matmul"].variants[name] for name in ALGORITHMS}


def chosen(axes: Axes, config: Config, device: DeviceFacts) -> Variant:
    """The algorithm that a call at these axes runs; one that does not take so many tokens gives way to the default."""
    default = by_tokens(int(axes["M"]))
    wanted = config["ALGORITHM"] - BY_TOKENS - 1
    variant = _variants()[default if wanted < 0 else ALGORITHMS[wanted]]
    return _variants()[default] if variant.supports(axes, device) else variant


def _own_config(variant: Variant, axes: Axes, device: DeviceFacts) -> Config:
    from tkernels.tuning import NEAREST

    return NEAREST.resolve(variant, axes, device)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    variant = chosen(axes, config, device)
    return variant.workspace(axes, _own_config(variant, axes, device), device)


def launch(
    run: Run,
    out: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    axes: dict[str, Value] = {"M": q.shape[0], "N": weight.shape[0], "K": q.shape[1]}
    axes |= {"codes": str(q.dtype).removeprefix("torch."), "out": str(out_dtype).removeprefix("torch.")}
    variant = chosen(axes, run.config, run.device)
    assert variant.launch is not None, "every algorithm here is launched"
    mine = replace(run, config=_own_config(variant, axes, run.device))
    variant.launch(mine, out, q, scale, weight, weight_scale, bias, out_dtype)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=CONFIGS,
    default={"": Config(ALGORITHM=BY_TOKENS)},
    limits={"ALGORITHM": (BY_TOKENS, BY_TOKENS + len(ALGORITHMS))},
    supports=unsupported_sums,
    workspace=workspace,
    key=("M", "N", "K"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm, and fp8 sums of another order
)
