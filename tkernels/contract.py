"""What is true of every variant of an op: its axes, arguments, outputs, definition and cost.

An op's `contract.py` builds one `Contract`. The public entry, the property tests, the sanitizers, the benchmarks and
the YAML schema all read it, so that a new variant needs nothing but its own file.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, Literal, Protocol

import torch

from tkernels.batching import Batching
from tkernels.dims import Dim
from tkernels.overlap import shared_memory

Value = int | str | bool
Axes = Mapping[str, Value]
"""Axis name -> value at one point: sizes as int, dtypes and enums by name, options as given (0 where absent)."""


class ContractError(ValueError):
    """A call or a definition that breaks a contract; the message names the op, the argument and the rule."""


@dataclass(frozen=True)
class Int:
    """A size with its legal range. `draws` are the values the property tests choose from: small, and at every edge.
    `wide` are those of a wide draw: as large as a model's, or past what small sizes could hide.

    `batch` marks an axis that depends on what else is in the batch (T, B, a table's width): neither config nor split
    boundaries of a batch-invariant variant may depend on it.
    """

    name: str
    low: int
    high: int
    draws: tuple[int, ...]
    doc: str = ""
    batch: bool = False
    wide: tuple[int, ...] = ()

    def allows(self, value: Value) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high

    @property
    def rule(self) -> str:
        return f"{self.low} <= {self.name} <= {self.high}"


@dataclass(frozen=True)
class Choice:
    """An enum: a dtype by role, an option's presence, a memory layout, a kind of values. `legal` may exceed `draws`.
    `wide` are the values of a wide draw: those that leave something to compute.
    """

    name: str
    draws: tuple[Value, ...]
    doc: str = ""
    legal: tuple[Value, ...] | None = None
    batch: bool = False
    wide: tuple[Value, ...] = ()

    def allows(self, value: Value) -> bool:
        return value in (self.legal or self.draws)

    @property
    def rule(self) -> str:
        return f"{self.name} in ({', '.join(map(str, self.legal or self.draws))})"


Axis = Int | Choice

FLOATS = ("float32", "float16", "bfloat16")


def dtype_axis(role: str, *more: str) -> Choice:
    """A dtype by role. float64 is legal (the torch variants take it, as an oracle for whole models) but not drawn."""
    return Choice(role, (*more, *FLOATS), f"dtype of the {role} tensors", legal=(*more, *FLOATS, "float64"))


class Argument(Protocol):
    """The rule for one parameter of the op: checks a value's structure (never its contents) and binds axes from it."""

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None: ...


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bind_axis(op: str, name: str, axis: str, value: Value, axes: dict[str, Value]) -> None:
    """Notes what an argument says an axis is; a ContractError where one before it said otherwise."""
    known = axes.setdefault(axis, value)
    if known != value:
        raise ContractError(
            f"{op}: argument {name!r} gives {axis} = {value}, but {axis} = {known} from the arguments before"
        )


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: `dims` as a string of sizes ("T Hq D"), `dtype` a role axis or a fixed dtype's name.

    Unit stride in the last dim and any other stride. An optional tensor binds its own name as an axis: given or not.
    One that may come by tensor descriptor (`copied_in_boxes`) binds `<name>_aligned`: whether its address and all its
    strides but the last are multiples of 16 bytes, as a descriptor needs them.
    """

    dims: str
    dtype: str
    optional: bool = False
    copied_in_boxes: bool = False

    @cached_property
    def shape(self) -> tuple[Dim, ...]:
        return tuple(Dim.parse(text) for text in self.dims.split())

    @cached_property
    def fixed_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.dtype, None)

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if self.optional:
            axes[name] = value is not None
            if value is None:
                return
        self._check_form(op, name, value, device)
        if self.fixed_dtype is None:
            bind_axis(op, name, self.dtype, _dtype_name(value.dtype), axes)
        elif value.dtype is not self.fixed_dtype:
            raise ContractError(f"{op}: argument {name!r} must be {self.dtype}, got {_dtype_name(value.dtype)}")
        self._bind_sizes(op, name, value.shape, axes)
        if value.shape and value.shape[-1] > 1 and value.stride(-1) != 1:
            raise ContractError(
                f"{op}: argument {name!r} needs unit stride in its last dim, got strides {value.stride()}"
            )
        if self.copied_in_boxes:
            steps = (stride * value.element_size() for stride in value.stride()[:-1])
            axes[f"{name}_aligned"] = all(step % 16 == 0 for step in (value.data_ptr(), *steps))

    def _check_form(self, op: str, name: str, value: Any, device: torch.device | None) -> None:
        if not isinstance(value, torch.Tensor):
            raise ContractError(f"{op}: argument {name!r} must be a tensor [{self.dims}], got {type(value).__name__}")
        if value.layout is not torch.strided:
            raise ContractError(f"{op}: argument {name!r} must be a strided tensor, got layout {value.layout}")
        if device is not None and value.device != device:
            raise ContractError(f"{op}: argument {name!r} is on {value.device}, the first tensor is on {device}")
        if len(value.shape) != len(self.shape):
            raise ContractError(f"{op}: argument {name!r} must have shape [{self.dims}], got {list(value.shape)}")

    def _bind_sizes(self, op: str, name: str, shape: Sequence[int], axes: dict[str, Value]) -> None:
        for dim, size in zip(self.shape, shape, strict=True):
            if dim.name is None:
                solved: int | None = dim.plus if size == dim.plus else None
            else:
                solved = size if dim.text == dim.name else dim.solve(size)
            if solved is None:
                raise ContractError(f"{op}: argument {name!r} has shape {list(shape)}, where [{self.dims}] is needed")
            if dim.name is not None and axes.setdefault(dim.name, solved) != solved:
                bind_axis(op, name, dim.name, solved, axes)


@dataclass(frozen=True)
class Scalar:
    """A host number. `optional` ones default to None; with `axis`, its value (0 where None) is bound as an axis.

    A float is rounded away from 0 there, so that one that is set is never at the axis' off value.
    """

    kind: type[int] | type[float] | type[bool]
    optional: bool = False
    low: float | None = None
    axis: bool = False

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if value is None and self.optional:
            if self.axis:
                axes[name] = 0
            return
        allowed = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and self.kind is not bool):
            raise ContractError(f"{op}: argument {name!r} must be {self.kind.__name__}, got {value!r}")
        if not math.isfinite(value):
            raise ContractError(f"{op}: argument {name!r} must be finite, got {value!r}")
        if self.low is not None and value < self.low:
            raise ContractError(f"{op}: argument {name!r} must be at least {self.low}, got {value!r}")
        if self.axis:
            axes[name] = math.ceil(value) if value > 0 else math.floor(value)


@dataclass(frozen=True)
class DType:
    """An option that says which dtype an output has: a torch.dtype, bound by its name as the axis `axis`."""

    axis: str

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if not isinstance(value, torch.dtype):
            raise ContractError(f"{op}: argument {name!r} must be a torch.dtype, got {value!r}")
        bind_axis(op, name, self.axis, _dtype_name(value), axes)


@dataclass(frozen=True)
class Output:
    """A tensor that the public entry allocates; `when` names the option (a bool) without which there is none.

    An `exact` one is equal or wrong, whatever its dtype: its definition says how each operation rounds.
    """

    dims: str
    dtype: str
    when: str | None = None
    exact: bool = False

    @cached_property
    def shape(self) -> tuple[Dim, ...]:
        return tuple(Dim.parse(text) for text in self.dims.split())

    def allocate(self, axes: Axes, device: torch.device) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, str(axes.get(self.dtype, self.dtype)))
        return torch.empty([dim.size(axes) for dim in self.shape], dtype=dtype, device=device)


@dataclass(frozen=True)
class Constraint:
    """A relation between axes as a Python expression over their names, evaluated, not only stated."""

    text: str

    @cached_property
    def code(self) -> CodeType:
        return compile(self.text, f"<constraint {self.text}>", "eval")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.code.co_names)

    def holds(self, axes: Axes) -> bool:
        return bool(eval(self.code, {"__builtins__": {}}, dict(axes)))


@dataclass(frozen=True)
class Case:
    """One point of an op with its inputs: what the oracle, the variants, the roofline and the timer all see."""

    contract: "Contract"
    axes: Axes
    seed: int
    inputs: Mapping[str, Any]

    @property
    def bytes_moved(self) -> int:
        return self.contract.bytes_moved(self)

    @property
    def flops(self) -> int:
        return self.contract.flops(self)


Work = Literal["traffic", "gemm", "prefill", "decode"]
"""What an op's time goes into: memory traffic, products with a weight, attention of chunks of tokens, or attention of
one token a sequence."""

Choose = Callable[[str, Sequence[Value]], Value]
"""Picks one of the candidates for the named axis: a seeded generator in `tk check`, hypothesis in the tests."""


@dataclass(frozen=True)
class Contract:
    """Everything that holds for every variant of one op. See DESIGN: "The contract: an op".

    Attributes:
        reference: the definition, float64 in, float64 out; its signature is the op's. Returns what `pack` makes of the
            outputs in the order of `outputs`. An output element that the op leaves untouched is NaN in the reference's
            result.
        baseline: torch's own best way; the variant `torch`. Same signature and results.
        make_inputs: (axes, seed, device) -> keyword arguments, poisoned with NaN wherever nothing may be read.
        bytes_moved: each unique byte once.
        flops: by the usual counting (2 for a multiply-add).
        writes: the arguments that it writes.
        consumes: those whose contents are undefined afterwards, each variant's scratch to use or to leave: the
            definition writes them or not, and nobody looks.
        default: the variant chosen on CUDA when nothing was named.
        benchmarks: realistic points, by name.
        inspected: by name, what a benchmark point has to be at to be compiled beside the last of all: where a kernel is
            other code there.
        corners: points that no draw reaches and a kernel may be wrong at, by name; what they leave open is drawn.
        batching: how its batch is taken apart; without one, `batch_invariant` cannot be tested.
        work: what its time goes into: by this the inspection knows what its code must have, and a report groups it.
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
    corners: Mapping[str, Axes] = field(default_factory=dict)
    batching: Batching | None = None
    work: Work = "traffic"

    def __post_init__(self) -> None:
        parameters = list(inspect.signature(self.reference).parameters)
        if parameters != list(self.arguments):
            raise ContractError(f"{self.name}: arguments {list(self.arguments)} are not the reference's {parameters}")
        known = set(self.axis_by_name)
        for constraint in self.constraints:
            if unknown := constraint.names - known:
                raise ContractError(
                    f"{self.name}: constraint {constraint.text!r} names no axis of it: {sorted(unknown)}"
                )
        for name, point in (*self.benchmarks.items(), *self.corners.items(), *self.inspected.items()):
            if strange := set(point) - known:
                raise ContractError(f"{self.name}: point {name!r} names no axis of it: {sorted(strange)}")
        if strangers := {*self.writes, *self.consumes} - set(parameters):
            raise ContractError(f"{self.name}: writes no such argument: {sorted(strangers)}")
        _ = self.options  # a default that its own rule refuses is an error now

    @cached_property
    def axis_by_name(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

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

    def options_left_out_by(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """The options that a launcher or function of this op has no parameter for."""
        taken = inspect.signature(function).parameters
        return tuple(option for option in self.options if option not in taken)

    @cached_property
    def left_out_by_baseline(self) -> tuple[str, ...]:
        """The options that the baseline does not take: where one is set, nothing measures the natural error."""
        return self.options_left_out_by(self.baseline)

    @cached_property
    def _parameters(self) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]:
        """Positional names, all names, defaults: `Signature.bind` costs 10 us a call, these lookups 1 us."""
        parameters = self.signature.parameters.values()
        positional = tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        return positional, tuple(self.signature.parameters), defaults

    def bind_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter by name, in the signature's order, defaults filled in; a wrong call is a ContractError."""
        positional, names, defaults = self._parameters
        bound = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        repeated = kwargs and not kwargs.keys().isdisjoint(positional[: len(args)])
        if len(bound) != len(names) or len(args) > len(positional) or repeated:
            return self._explain_arguments(args, kwargs)
        try:
            return {name: bound[name] for name in names}
        except KeyError:
            return self._explain_arguments(args, kwargs)

    def _explain_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ContractError(f"{self.name}: {error}; the signature is {self.name}{self.signature}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

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
        for name, default in self.options.items():
            if default == {name: False} and name not in axes and not self._is_default(name, arguments[name]):
                axes[name] = True
        if written := (*self.writes, *self.consumes):
            shared = shared_memory(arguments, written)
            if shared is not None:
                raise ContractError(f"{self.name}: argument {shared[0]!r} {shared[1]}")
        return axes, device

    def _is_default(self, name: str, value: Any) -> bool:
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
            if axis.name in fixed:
                continue
            ready = [c for c in self.constraints if axis.name in c.names and c.names <= axes.keys() | {axis.name}]
            fitting = [
                [v for v in values if all(c.holds({**axes, axis.name: v}) for c in ready)]
                for values in ((axis.wide, axis.draws) if wide else (axis.draws,))
            ]
            candidates: list[Value] = next((values for values in fitting if values), [])
            if not candidates:
                rules = ", ".join(c.text for c in ready)
                raise ContractError(f"{self.name}: no value of {axis.name} satisfies {rules} at {axes}")
            axes[axis.name] = choose(axis.name, candidates)
        return axes

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


def parse_axes(text: str) -> dict[str, Value]:
    """Axes from "T=4,activation=bfloat16,causal=True", the form that a replay command carries."""
    axes: dict[str, Value] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise ContractError(f"axes: {part!r} is not name=value")
        is_number = value.lstrip("-").isdigit()
        axes[name] = int(value) if is_number else {"True": True, "False": False}.get(value, value)
    return axes
