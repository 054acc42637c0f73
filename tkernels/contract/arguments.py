"""The rules for an op's arguments and outputs: a value's structure is checked, its contents never are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from tkernels.contract.axes import Axes, Value
from tkernels.dims import Dim
from tkernels.errors import TKernelsError
from tkernels.inputs import dtype_name


class ContractError(TKernelsError, ValueError):
    """A call or a definition that breaks a contract; the message names the op, the argument and the rule."""


class Argument(Protocol):
    """The rule for one parameter of the op: checks a value's structure (never its contents) and binds axes from it."""

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None: ...


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
    `indexes` names the dims, first ones of other arguments, into which integers point, as one number ("P S").
    One that kernels read 16 bytes at a time (`read_wide`) binds `<name>_aligned`: whether its address and all its
    strides but the last are multiples of 16 bytes, as a tensor descriptor needs them too.
    """

    dims: str
    dtype: str
    optional: bool = False
    read_wide: bool = False
    indexes: str = ""

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
            bind_axis(op, name, self.dtype, dtype_name(value.dtype), axes)
        elif value.dtype is not self.fixed_dtype:
            raise ContractError(f"{op}: argument {name!r} must be {self.dtype}, got {dtype_name(value.dtype)}")
        self._bind_sizes(op, name, value.shape, axes)
        if value.shape and value.shape[-1] > 1 and value.stride(-1) != 1:
            raise ContractError(
                f"{op}: argument {name!r} needs unit stride in its last dim, got strides {value.stride()}"
            )
        if self.read_wide:
            axes[f"{name}_aligned"] = is_aligned(value)

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
            solved = size if dim.text == dim.name else dim.solve(size)
            if dim.name is not None and solved is not None:
                bind_axis(op, name, dim.name, solved, axes)
            elif dim.name is not None or not dim.names <= axes.keys() or dim.size(axes) != size:
                raise ContractError(f"{op}: argument {name!r} has shape {list(shape)}, where [{self.dims}] is needed")


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether its address and all its strides but the last are multiples of 16 bytes."""
    steps = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
    return not any(step % 16 for step in (tensor.data_ptr(), *steps))


@dataclass(frozen=True)
class Scalar:
    """A host number. `optional` ones default to None; with `axis`, its value (0 where None) is bound as an axis of its
    name, or of the one that `axis` says.

    A float is rounded away from 0 there, so that one that is set is never at the axis' off value.
    """

    kind: type[int] | type[float] | type[bool]
    optional: bool = False
    low: float | None = None
    axis: bool | str = False

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if rule := self._broken_rule(value):
            raise ContractError(f"{op}: argument {name!r} must be {rule}, got {value!r}")
        if self.axis:
            size = 0 if value is None else math.ceil(value) if value > 0 else math.floor(value)
            bind_axis(op, name, name if self.axis is True else self.axis, size, axes)

    def _broken_rule(self, value: Any) -> str | None:
        """What a value has to be and is not."""
        if value is None and self.optional:
            return None
        allowed = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and self.kind is not bool):
            return self.kind.__name__
        if not math.isfinite(value):
            return "finite"
        return f"at least {self.low}" if self.low is not None and value < self.low else None


@dataclass(frozen=True)
class DType:
    """An option that says which dtype an output has: a torch.dtype, bound by its name as the axis `axis`."""

    axis: str

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if not isinstance(value, torch.dtype):
            raise ContractError(f"{op}: argument {name!r} must be a torch.dtype, got {value!r}")
        bind_axis(op, name, self.axis, dtype_name(value), axes)


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
