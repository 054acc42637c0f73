"""One call of a variant on tensors that a check made: outputs and scratch memory begin as poison, in chosen places."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Contract, unpack
from tkernels.device import device_facts
from tkernels.errors import TKernelsError
from tkernels.inputs import poison
from tkernels.launch import Door, Kernel, Run
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.addresses import default_door
from tkernels.verification.dry_run import dry_run
from tkernels.verification.read_only import refusing_stores

Place = Callable[[torch.Tensor], torch.Tensor]
"""Takes a tensor that was just filled and returns the one to use for it, with the same contents."""

Fill = Callable[[str, torch.dtype], float | int]
"""(what a tensor is called, its dtype) -> what it begins as."""


class NotZeroError(TKernelsError, RuntimeError):
    """A launch did not leave its zeroed workspace at zero: the next one would begin with what is there."""


def nan_or_largest(name: str, dtype: torch.dtype) -> float | int:
    """The usual poison, in everything."""
    return poison(dtype)


def wanted_outputs(contract: Contract, arguments: Mapping[str, Any]) -> list[str]:
    """The outputs that a call asks for; an argument that is not there is at its default."""
    return [
        name for name, output in contract.outputs.items() if output.when is None or bool(arguments.get(output.when))
    ]


def call(
    variant: Variant,
    arguments: Mapping[str, Any],
    config: Config | None = None,
    *,
    door: Door | None = None,
    fill: Fill = nan_or_largest,
    place: Place = lambda tensor: tensor,
    watch_zeroed: bool = False,
    watch_host: bool = True,
) -> dict[str, torch.Tensor]:
    """Calls a variant on exactly these arguments (what it writes changes) and returns each result by name.

    The results are the outputs asked for and the written arguments. Every output and every workspace that is not
    declared zero begins as `fill` says, outputs first, where `place`, asked right after it, puts it. `door` replaces
    the default, which checks addresses where kernels are interpreted.

    Raises:
        NotZeroError: A workspace that is declared zero is not left so, where `watch_zeroed` asks for it.
        ReadOnlyError: An interpreted kernel stores to an argument that the op only reads, wrapped by the interpreter;
            or it or the launcher writes to what was there before the call and is not of it.
        HostAccessError: The launcher reads a tensor's values on the host, or writes there what the op only reads, where
            `watch_host` asks for it by running the launcher once more.
        Whatever the variant raises.
    """
    contract, door = variant.contract, door or default_door()
    bound = contract.bind_arguments((), arguments)
    if variant.launch is not None:
        outputs = _launch(variant, bound, config, door, fill, place, watch_zeroed, watch_host)
    else:
        results = unpack(Kernel(variant, NEAREST, {}, door)(**bound))
        outputs = dict(zip(wanted_outputs(contract, bound), results, strict=True))
    return outputs | {name: bound[name] for name in contract.writes}


def _launch(
    variant: Variant,
    bound: Mapping[str, Any],
    config: Config | None,
    door: Door,
    fill: Fill,
    place: Place,
    watch_zeroed: bool,
    watch_host: bool,
) -> dict[str, torch.Tensor]:
    contract = variant.contract
    axes, device = contract.bind_axes(bound)
    facts = device_facts(device)
    config = config if config is not None else NEAREST.resolve(variant, axes, facts)  # an empty one is false
    allocated = contract.allocate_outputs(axes, bound, device)
    outputs = {
        name: tensor if tensor is None else place(tensor.fill_(fill(name, tensor.dtype)))
        for name, tensor in allocated.items()
    }
    buffers = variant.workspace(axes, config, facts)
    workspace = {
        name: place(torch.full(b.shape, 0 if b.zeroed else fill(name, b.dtype), dtype=b.dtype, device=device))
        for name, b in buffers.items()
    }
    with refusing_stores(door, contract, bound, [*outputs.values(), *workspace.values()]) as guarded:
        variant.run_launcher(Run(facts, axes, config, workspace, guarded), outputs, bound)
    if watch_host:  # afterwards: what a launcher keeps by shape is a real tensor by now
        dry_run(variant, bound, axes, config, facts)
    left = sorted(name for name, b in buffers.items() if b.zeroed and watch_zeroed and workspace[name].any())
    if left:
        raise NotZeroError(f"the launch did not leave its zeroed workspace at zero: {', '.join(left)}")
    return {name: tensor for name, tensor in outputs.items() if tensor is not None}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits: NaN equals itself, -0 does not equal 0."""
    return torch.equal(bits(one), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers, contiguous."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def first_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Where the first result whose bits differ differs, and how; None where all are bit-identical."""
    for name, expected in one.items():
        got = other[name]
        if same_bits(expected, got):
            continue
        index = tuple((bits(expected) != bits(got)).nonzero()[0].tolist())
        return f"{name}{list(index)} is {float(got[index]):.9g}, not {float(expected[index]):.9g}"
    return None
