"""An op's definition: what is true of every variant of it.

The public entry, the property tests, the sanitizers, the benchmarks and the YAML schema all read it, so that a new
variant needs nothing but its own file.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from tkernels.batching import Batching
from tkernels.contract.arguments import Argument, ContractError, Output, Tensor
from tkernels.contract.axes import Axes, Axis, Choose, Constraint, Value
from tkernels.overlap import shared_memory


@dataclass(frozen=True)
class Case:
    """One point of an op with its inputs: what the oracle, the variants, the roofline and the timer all see.

    loaded: Those weights that a variant has made its own form of, in `inputs`, as they were before.
    """

    contract: "Contract"
    axes: Axes
    seed: int
    inputs: Mapping[str, Any]
    loaded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes_moved(self) -> int:
        return self.contract.bytes_moved(self)

    @property
    def flops(self) -> int:
        return self.contract.flops(self)


Work = Literal["traffic", "gemm", "prefill", "decode"]
"""What an op's time goes into: memory traffic, products with a weight, attention of chunks of tokens, or attention of
one token a sequence."""


@dataclass(frozen=True)
class Contract:
    """Everything that holds for every variant of one op. See DESIGN: "The contract: an op".

    Attributes:
        reference: The definition, float64 in, float64 out; its signature is the op's. Returns what `pack` makes of the
            outputs in the order of `outputs`. An output element that the op leaves untouched is NaN in the reference's
            result.
        baseline: Torch's own best way; the variant `torch`. Same signature and results.
        make_inputs: (axes, seed, device) -> keyword arguments, poisoned with NaN wherever nothing may be read.
        bytes_moved: Each unique byte once.
        flops: By the usual counting (2 for a multiply-add).
        writes: The arguments that it writes.
        consumes: Those whose contents are undefined afterwards, each variant's scratch to use or to leave: the
            definition writes them or not, and nobody looks.
        default: The variant chosen on CUDA when nothing was named.
        benchmarks: Realistic points, by name, the typical one last.
        inspected: By name, what a benchmark point has to be at, or to leave open, to be compiled beside the last of
            all: where a kernel is other code there.
        loaded: The axes of a weight as checkpoints have it, which is what a variant's `prepare` gets.
        corners: Points that no draw reaches and a kernel may be wrong at, by name; what they leave open is drawn.
        batching: How its batch is taken apart; without one, `batch_invariant` cannot be tested.
        work: What its time goes into: by this the inspection knows what its code must have, and a report groups it.
        sections: What of a call's work profiles tell apart, by name, in order. A launcher enters one by
            `run.section(name)`; a function with parts is given such a callable after them, `section`.
    """

    name: str
    reference: Callable[..., Any]
    baseline: Callable[..., Any]
    axes: tuple[Axis, ...]
    arguments: Mapping[str, Argument]
    make_inputs: Callable[[Axes, int, torch.device], dict[str, Any]]
    bytes_moved: Callable[[Case], int]
    flops: Callable[[Case], int]
    default: str
    outputs: Mapping[str, Output] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    consumes: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    benchmarks: Mapping[str, Axes] = field(default_factory=dict)
    inspected: Mapping[str, Axes] = field(default_factory=dict)
    loaded: Axes = field(default_factory=dict)
    corners: Mapping[str, Axes] = field(default_factory=dict)
    batching: Batching | None = None
    work: Work = "traffic"
    sections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parameters = list(inspect.signature(self.reference).parameters)
        if parameters != list(self.arguments):
            raise ContractError(f"{self.name}: arguments {list(self.arguments)} are not the reference's {parameters}")
        points = (*self.benchmarks.items(), *self.corners.items(), *self.inspected.items())
        naming = [(f"point {name!r}", set(point)) for name, point in points]
        naming += [(f"constraint {constraint.text!r}", set(constraint.names)) for constraint in self.constraints]
        for what, names in naming:
            if strange := names - set(self.axis_by_name):
                raise ContractError(f"{self.name}: {what} names no axis of it: {sorted(strange)}")
        if strangers := {*self.writes, *self.consumes} - set(parameters):
            raise ContractError(f"{self.name}: writes no such argument: {sorted(strangers)}")
        _ = self.options  # a default that its own rule refuses is an error now

    @cached_property
    def axis_by_name(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

    @property
    def is_exact(self) -> bool:
        """Whether some of its outputs are equal or wrong, so that every operation has to round as the definition's."""
        return any(output.exact for output in self.outputs.values())

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.reference)

    @cached_property
    def options(self) -> dict[str, dict[str, Value]]:
        """Option -> the axes that its default binds. A variant may leave options out: see `Variant`.

        Options are the reference's keyword-only parameters that have a default. One whose rule binds no axis is an axis
        itself: True under its own name where a call sets it, absent otherwise.
        """
        found = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is not inspect.Parameter.empty:
                bound: dict[str, Value] = {}
                self.arguments[name].bind(self.name, name, parameter.default, bound, None)
                found[name] = bound or {name: False}
        return found

    def set_options(self, axes: Axes) -> list[str]:
        """The options that a call at these axes sets away from their defaults; an absent axis says nothing."""
        return [
            name
            for name, default in self.options.items()
            if any(axes.get(axis, value) != value for axis, value in default.items())
        ]

    def find_unaligned(self, axes: Axes) -> str | None:
        """The first argument whose rows are whole pieces of 16 bytes, but whose address or strides are not multiples of
        them, so that a kernel would read it in smaller pieces; None where there is none.
        """
        for name, argument in self.arguments.items():
            if isinstance(argument, Tensor) and not axes.get(f"{name}_aligned", True):
                dtype = argument.fixed_dtype or getattr(torch, str(axes[argument.dtype]))
                if argument.shape[-1].size(axes) * dtype.itemsize % 16 == 0:
                    return name
        return None

    def options_left_out_by(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """The options that a launcher or function of this op has no parameter for."""
        taken = inspect.signature(function).parameters
        return tuple(option for option in self.options if option not in taken)

    @cached_property
    def _parameters(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Positional names and defaults: `Signature.bind` costs 10 us a call, these lookups 1 us."""
        parameters = self.signature.parameters.values()
        positional = tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        return positional, defaults

    def bind_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter by name, in the signature's order, defaults filled in; a wrong call is a ContractError."""
        positional, defaults = self._parameters
        bound = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        repeated = kwargs and not kwargs.keys().isdisjoint(positional[: len(args)])
        if bound.keys() != self.arguments.keys() or len(args) > len(positional) or repeated:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise ContractError(f"{self.name}: {error}; the signature is {self.name}{self.signature}") from None
        return {name: bound[name] for name in self.arguments}

    def bind_axes(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Value], torch.device]:
        """Checks the structure of a call (shapes, dtypes, devices, strides, places in memory; never values) and returns
        its axes, the options that it sets among them.
        """
        axes: dict[str, Value] = {}
        device: torch.device | None = None
        for name, rule in self.arguments.items():
            value = arguments[name]
            rule.bind(self.name, name, value, axes, device)
            if device is None and value is not None:
                device = getattr(value, "device", None)
        if device is None:
            raise ContractError(f"{self.name}: no tensor among the arguments")
        self.check_axes(axes)
        axes |= {name: True for name in self.options if name not in axes and not self._is_off(name, arguments[name])}
        if (written := (*self.writes, *self.consumes)) and (shared := shared_memory(arguments, written)):
            raise ContractError(f"{self.name}: argument {shared[0]!r} {shared[1]}")
        return axes, device

    def _is_off(self, name: str, value: Any) -> bool:
        """Whether an option is at its default, as far as only its own value says so: not where its rule binds axes."""
        if self.options[name] != {name: False}:
            return True
        default = self.signature.parameters[name].default
        return value is default or (not isinstance(value, torch.Tensor) and bool(value == default))

    def check_axes(self, axes: Axes) -> None:
        """Raises where a bound axis leaves its range or a constraint over bound axes does not hold."""
        for axis in self.axes:
            if axis.name in axes and not axis.allows(axes[axis.name]):
                raise ContractError(f"{self.name}: {axis.name} = {axes[axis.name]}, but {axis.rule}")
        for constraint in self.constraints:
            if constraint.names <= axes.keys() and not constraint.holds(axes):
                values = ", ".join(f"{name} = {axes[name]}" for name in sorted(constraint.names))
                raise ContractError(f"{self.name}: {constraint.text} does not hold for {values}")

    def draw_axes(self, choose: Choose, fixed: Axes | None = None, wide: bool = False) -> dict[str, Value]:
        """A point within the constraints. Axes are drawn in order, each from the candidates that can still hold.

        `fixed` axes are taken as given. Drawing is constructive: no draw is thrown away. A `wide` draw takes an axis
        from its wide values where it has any that hold; without it, they change nothing.
        """
        fixed = fixed or {}
        if unknown := set(fixed) - set(self.axis_by_name):
            raise ContractError(f"{self.name}: no axis {sorted(unknown)}; it has {', '.join(self.axis_by_name)}")
        axes: dict[str, Value] = dict(fixed)
        self.check_axes(axes)
        for axis in self.axes:
            if axis.name not in fixed:
                axes[axis.name] = choose(axis.name, self._candidates(axis, axes, wide, bool(fixed)))
        return {axis.name: axes[axis.name] for axis in self.axes}

    def _candidates(self, axis: Axis, axes: Axes, wide: bool, ahead: bool) -> list[Value]:
        """The values to draw an axis from beside those that are fixed or drawn already.

        `ahead`: only those that leave a rule's last axis a value. Axes are in an order that always does, but where a
        later one is fixed.
        """
        known = axes.keys() | {axis.name}
        own = [c for c in self.constraints if axis.name in c.names]
        rules = [c for c in own if len(c.names - known) <= ahead]

        def fits(value: Value) -> bool:
            beside = {**axes, axis.name: value}
            return all(self._can_hold(rule, beside) for rule in rules)

        for values in (axis.wide if wide else (), axis.draws):
            if fitting := [value for value in values if fits(value)]:
                return fitting
        named = ", ".join(str(rule) for rule in rules if rule.names <= known)
        raise ContractError(f"{self.name}: no value of {axis.name} satisfies {named} at {axes}")

    def _can_hold(self, rule: Constraint, axes: Axes) -> bool:
        """Whether a rule holds at these axes, for some value that is drawn of an axis that is not among them."""
        missing = [self.axis_by_name[name] for name in rule.names - axes.keys()]
        if not missing:
            return rule.holds(axes)
        (axis,) = missing
        return any(rule.holds({**axes, axis.name: value}) for value in (*axis.draws, *axis.wide))

    def case(self, axes: Axes, seed: int, device: torch.device | str = "cpu") -> Case:
        """The inputs at one point, from a seed."""
        self.check_axes(axes)
        return Case(self, dict(axes), seed, self.make_inputs(axes, seed, torch.device(device)))

    def allocate_outputs(self, axes: Axes, arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """The outputs that a launcher receives: uninitialized tensors, None for one that was not asked for."""
        return {
            name: output.allocate(axes, device) if output.when is None or arguments[output.when] else None
            for name, output in self.outputs.items()
        }


def pack(outputs: Sequence[Any]) -> Any:
    """What an op returns: its outputs that exist, alone if one, None if the op only writes its arguments."""
    present = tuple(output for output in outputs if output is not None)
    return present[0] if len(present) == 1 else (present or None)


def unpack(result: Any) -> tuple[Any, ...]:
    """The inverse of `pack`, less the outputs that were not asked for."""
    return result if isinstance(result, tuple) else () if result is None else (result,)
