"""From names in a YAML to a frozen set of callables, before any weight is loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from tkernels.contract import Value
from tkernels.device import device_facts
from tkernels.launch import Kernel
from tkernels.registry import Op, Registry, UnknownNameError, builtin_ops, unknown_name
from tkernels.tuning import Tuning, TuningMode
from tkernels.variant import UnsupportedError, Variant

Pins = Mapping[str, int]
Choices = Mapping[str, str | Mapping[str, Pins | None]]
"""op -> a variant's name, or {name: {config value: number}} to pin values of its config."""

Ranges = Mapping[str, Mapping[str, Value | tuple[int, int]]]
"""op -> axis -> its value, or (low, high) where the model will use a range."""


class SelectionError(ValueError):
    """A choice that cannot be made: an unknown op, variant or config value, or a variant unsupported here."""


@dataclass(frozen=True)
class KernelSet:
    """The resolved choice: one callable per op, as attributes (`kernels.paged_decode(q, ...)`)."""

    kernels: Mapping[str, Kernel]
    tuning: Tuning = field(repr=False)

    @property
    def arm(self) -> dict[str, str]:
        """op -> variant name, with pinned values in brackets; what a results row is labelled with."""
        return {op: _label(kernel) for op, kernel in sorted(self.kernels.items())}

    def __iter__(self) -> Iterator[str]:
        return iter(self.kernels)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        # Plain attributes: a lookup through __getattr__ costs a microsecond in every layer of every step.
        for name, kernel in self.kernels.items():
            object.__setattr__(self, name, kernel)


def _label(kernel: Kernel) -> str:
    pins = ",".join(f"{name}={value}" for name, value in sorted(kernel.pins.items()))
    return f"{kernel.variant.name}[{pins}]" if pins else kernel.variant.name


def select(
    choices: Choices,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    axes: Ranges,
    tuning: TuningMode | Tuning = "nearest",
    ops: Registry | None = None,
) -> KernelSet:
    """The kernel set for a model.

    Args:
        choices: see Choices. An op without one gets the default: its Triton variant on CUDA, `torch` on a CPU.
        dtype: the activation dtype, which also stands for kv and weight where `axes` does not give those.
        axes: the ops that the model uses, each with the whole range of axes it will call them with.
        ops: the registry; the built-in one by default.

    Raises:
        SelectionError: an unknown name (with the alternatives and the nearest match), or a variant that does not
            support the whole range on this device (with its reason).
    """
    ops = builtin_ops() if ops is None else ops
    device = torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    resolved = tuning if isinstance(tuning, Tuning) else Tuning(tuning)
    try:
        for name in choices:
            _ = ops[name]
            if name not in axes:
                raise SelectionError(
                    f"kernels.{name}: this model does not use that op; it uses {', '.join(sorted(axes))}"
                )
        kernels = {
            name: _choose(ops[name], choices.get(name), device, dtype, ranges, resolved)
            for name, ranges in axes.items()
        }
    except UnknownNameError as error:
        raise SelectionError(f"kernels: {error}") from None
    return KernelSet(kernels, resolved)


def _choose(
    op: Op,
    choice: str | Mapping[str, Pins | None] | None,
    device: torch.device,
    dtype: torch.dtype,
    ranges: Mapping[str, Value | tuple[int, int]],
    tuning: Tuning,
) -> Kernel:
    if choice is None:
        choice = op.contract.default if device.type == "cuda" else "torch"
    if isinstance(choice, Mapping):
        if len(choice) != 1:
            raise SelectionError(f"kernels.{op.name}: a pinned choice names one variant, got {list(choice)}")
        ((name, pins),) = choice.items()
    else:
        name, pins = choice, {}
    variant = _variant(op, name, ranges, device, dtype)
    pins = dict(pins or {})
    if pins and variant.launch is None:
        raise SelectionError(f"kernels.{op.name}: variant {name!r} has no config to pin")
    if pins:
        try:
            variant.pinned(variant.default[""], pins)
        except ValueError as error:
            raise SelectionError(f"kernels.{op.name}.{name}: {error}") from None
    if reason := unsupported_in(variant, ranges, device, dtype):
        raise SelectionError(f"kernels.{op.name}: variant {name!r} is unsupported here: {reason}")
    return Kernel(variant, tuning, pins)


def _variant(
    op: Op, name: str, ranges: Mapping[str, Value | tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> Variant:
    if name in op.variants:
        return op.variants[name]
    unavailable = {n: unsupported_in(v, ranges, device, dtype) for n, v in op.variants.items()}
    notes = "".join(f"; {n} is unavailable here: {reason}" for n, reason in unavailable.items() if reason)
    raise unknown_name(f"{op.name} variant", name, op.variants, notes)


def unsupported_in(
    variant: Variant, ranges: Mapping[str, Value | tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a variant does not support a whole range of axes, or None where it does. Ranges are tried at their ends."""
    name = str(dtype).removeprefix("torch.")
    dtypes = {axis.name: name for axis in variant.contract.axes if axis.name in ("activation", "kv", "weight", "out")}
    facts = device_facts(device)
    spread = {axis: value if isinstance(value, tuple) else (value,) for axis, value in {**dtypes, **ranges}.items()}
    for point in product(*spread.values()):
        axes = dict(zip(spread, point, strict=True))
        try:
            variant.contract.check_axes(axes)
            if reason := variant.unsupported_reason(axes, device, facts):
                return reason
        except (ValueError, UnsupportedError) as error:
            return str(error)
        except KeyError as error:
            return f"its support depends on the axis {error}, which the model does not give"
    return None
