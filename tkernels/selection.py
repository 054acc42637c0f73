"""From names in a YAML to a frozen set of callables, before any weight is loaded."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from tkernels.device import device_facts
from tkernels.errors import TKernelsError
from tkernels.inputs import dtype_name
from tkernels.launch import Kernel
from tkernels.names import UnknownNameError, unknown_name
from tkernels.ranges import NVTX, Ranges
from tkernels.registry import Registry, builtin_ops
from tkernels.tuning import Tuning
from tkernels.tuning_mode import TuningMode
from tkernels.variant import AxisRanges, Op, UnsupportedError, Variant

Pins = Mapping[str, int]
Choices = Mapping[str, str | Mapping[str, Pins | None]]
"""op -> a variant's name, or {name: {config value: number}} to pin values of its config."""

OpAxes = Mapping[str, AxisRanges | Sequence[AxisRanges]]
"""op -> axis -> its value, or (low, high) where the model will use a range; or several such, where values go together:
weights of 3 bits in groups of 128, and of 4 bits in groups of 32."""


def ways(ranges: AxisRanges | Sequence[AxisRanges]) -> tuple[AxisRanges, ...]:
    """The ways in which an op is called: those given, or the one."""
    return (ranges,) if isinstance(ranges, Mapping) else tuple(ranges)


class SelectionError(TKernelsError, ValueError):
    """A choice that cannot be made: an unknown op, variant or config value, or a variant unsupported here."""


@dataclass(frozen=True)
class KernelSet:
    """The resolved choice: one callable per op that the model calls, as attributes (`kernels.paged_decode(q, ...)`)."""

    kernels: Mapping[str, Kernel]
    tuning: Tuning = field(repr=False)
    ranges: Ranges = field(default=NVTX, repr=False)
    """Where its kernels are named while they run; whoever builds on the set names the rest there."""
    axes: OpAxes = field(default_factory=dict, repr=False)
    """What it was chosen for: the ops that the model calls, and the whole range of axes that it calls them with."""

    @functools.cached_property
    def arm(self) -> dict[str, str]:
        """op -> variant name, with pinned values in brackets; what a results row is labelled with."""
        return {op: kernel.label for op, kernel in sorted(self.running.items())}

    @property
    def running(self) -> dict[str, Kernel]:
        """op -> kernel of all that the model's calls can reach: its own ops and the parts of its composed fusions."""
        parts = {part.variant.contract.name: part for kernel in self.kernels.values() for part in kernel.parts}
        return {**parts, **self.kernels}

    def __iter__(self) -> Iterator[str]:
        return iter(self.kernels)

    def greatest(self, op: str, axis: str) -> int:
        """The most that the model calls `op` with along `axis`, a number."""
        values = [way[axis] for way in ways(self.axes[op])]
        return max(int(value[-1] if isinstance(value, tuple) else value) for value in values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        # Plain attributes: a lookup through __getattr__ costs a microsecond in every layer of every step.
        for name, kernel in self.kernels.items():
            object.__setattr__(self, name, kernel)


def select(
    choices: Choices,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    axes: OpAxes,
    tuning: TuningMode | Tuning = "nearest",
    ops: Registry | None = None,
    ranges: Ranges = NVTX,
) -> KernelSet:
    """The kernel set for a model.

    Args:
        choices: See Choices. An op without one gets the default: its Triton variant on CUDA, `torch` on a CPU; a
            fusion of which a part has one is composed.
        dtype: The activation dtype, which also stands for kv and weight where `axes` does not give those.
        axes: The ops that the model uses, each with the whole range of axes it will call them with.
        ops: The registry; the built-in one by default.
        ranges: Where what runs is named: for NVTX's tools by default, or a Recording.

    Raises:
        SelectionError: An unknown name (with the alternatives and the nearest match), or a variant that does not
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
        used = with_parts(axes, choices, ops, device)
        for name in choices:
            if name not in used:
                raise SelectionError(_unused_reason(name, choices, axes, ops, device))
        made: dict[str, Kernel] = {}  # one kernel for each op, whoever calls it

        def make(op: Op) -> Kernel:
            if op.name not in made:
                kernel = _choose_kernel(op, choices, device, dtype, used[op.name], resolved, ranges)
                made[op.name] = replace(kernel, parts=tuple(make(ops[part]) for part in kernel.variant.parts))
            return made[op.name]

        kernels = {name: make(ops[name]) for name in axes}
    except UnknownNameError as error:
        raise SelectionError(f"kernels: {error}") from None
    return KernelSet(kernels, resolved, ranges, axes)


def with_parts(axes: OpAxes, choices: Choices, ops: Registry, device: torch.device) -> OpAxes:
    """`axes`, and what the parts of the composed fusions among its ops are called at.

    An op that the model calls itself and that is also a part has the range that covers both; a part of a fusion that is
    called in several ways has each of them.
    """
    used: dict[str, AxisRanges | Sequence[AxisRanges]] = dict(axes)
    for fusion, ranges in axes.items():
        name, _ = _read_choice(ops[fusion], choices, device)
        variant = ops[fusion].variants.get(name)
        if variant is None:  # `select` says so, with the alternatives
            continue
        for part in variant.parts:
            mine = [variant.axes_of_part(ops[part].contract, way) for way in ways(ranges)]
            every = [*ways(used.get(part, ())), *mine]
            used[part] = functools.reduce(_cover_ranges, every) if len(mine) == 1 else every
    return used


def _cover_ranges(one: AxisRanges, other: AxisRanges) -> dict[str, Any]:
    """The smallest ranges that hold both; an axis that only one of them gives is that one's."""
    covering: dict[str, Any] = {**one, **other}
    for axis in one.keys() & other.keys():
        ends = [end for value in (one[axis], other[axis]) for end in (value if isinstance(value, tuple) else (value,))]
        if len(set(ends)) > 1:
            covering[axis] = (min(ends), max(ends))
    return covering


def _unused_reason(name: str, choices: Choices, axes: OpAxes, ops: Registry, device: torch.device) -> str:
    """Why nothing calls an op that a choice names: a fusion was chosen in its place, or the model has no use for it."""
    for fusion in axes:
        composed = [variant for variant in ops[fusion].variants.values() if name in variant.parts]
        if composed:
            chosen, _ = _read_choice(ops[fusion], choices, device)
            mine, _ = _read_choice(ops[name], choices, device)
            return (
                f"kernels.{fusion}: {chosen!r} is chosen, which does not call its part {name}, for which {mine!r} is "
                f"chosen: name one of the two, or choose {fusion}: {composed[0].name}"
            )
    used = ", ".join(sorted(with_parts(axes, {}, ops, device)))
    return f"kernels.{name}: this model does not use that op; it uses {used}"


def _choose_kernel(
    op: Op,
    choices: Choices,
    device: torch.device,
    dtype: torch.dtype,
    axes: AxisRanges | Sequence[AxisRanges],
    tuning: Tuning,
    ranges: Ranges,
) -> Kernel:
    name, pins = _read_choice(op, choices, device)
    variant = _find_variant(op, name, axes, device, dtype)
    pins = dict(pins)
    if pins and variant.launch is None:
        raise SelectionError(f"kernels.{op.name}: variant {name!r} has no config to pin")
    if pins:
        try:
            variant.pinned(variant.default[""], pins)
        except ValueError as error:
            raise SelectionError(f"kernels.{op.name}.{name}: {error}") from None
    # Of a composed fusion, the parts that it is given are asked themselves, not the defaults.
    alone = replace(variant, part_ops=()) if variant.parts else variant
    if reason := unsupported_in(alone, axes, device, dtype):
        raise SelectionError(f"kernels.{op.name}: variant {name!r} is unsupported here: {reason}")
    return Kernel(variant, tuning, pins, ranges=ranges)


def _read_choice(op: Op, choices: Choices, device: torch.device) -> tuple[str, Mapping[str, int]]:
    """The variant's name and pins that the choices mean for an op."""
    choice = choices.get(op.name)
    if choice is None:
        return op.default_on(device, choices), {}
    if not isinstance(choice, Mapping):
        return choice, {}
    if len(choice) != 1:
        raise SelectionError(f"kernels.{op.name}: a pinned choice names one variant, got {list(choice)}")
    ((name, pins),) = choice.items()
    return name, pins or {}


def _find_variant(
    op: Op, name: str, ranges: AxisRanges | Sequence[AxisRanges], device: torch.device, dtype: torch.dtype
) -> Variant:
    if name in op.variants:
        return op.variants[name]
    unavailable = {n: unsupported_in(v, ranges, device, dtype) for n, v in op.variants.items()}
    notes = "".join(f"; {n} is unavailable here: {reason}" for n, reason in unavailable.items() if reason)
    raise unknown_name(f"{op.name} variant", name, op.variants, notes)


def unsupported_in(
    variant: Variant, ranges: AxisRanges | Sequence[AxisRanges], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a variant does not support a whole range of axes, or None where it does. Ranges are tried at their ends."""
    return next((reason for way in ways(ranges) if (reason := _unsupported_way(variant, way, device, dtype))), None)


def _unsupported_way(variant: Variant, ranges: AxisRanges, device: torch.device, dtype: torch.dtype) -> str | None:
    roles = ("activation", "kv", "weight", "out")
    dtypes = {axis.name: dtype_name(dtype) for axis in variant.contract.axes if axis.name in roles}
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
            return f"its support depends on the axis {error}, which the model does not give: axes.get reads such a one"
    return None
