"""One way to compute an op: what its file declares, checked once, when it joins the registry."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Contract, ContractError, Value
from tkernels.device import DeviceFacts, device_facts
from tkernels.dims import Dim
from tkernels.launch import Buffer, ZeroedBuffers
from tkernels.mode import unavailable_reason
from tkernels.source_hash import is_jit, source_hash

if TYPE_CHECKING:
    from tkernels.registry import Op


class UnsupportedError(ValueError):
    """A variant was asked for something it does not do; the message says what and why."""


class VariantError(ValueError):
    """A variant file that breaks the rules of its op; the message names the file and the rule."""


Kind = Literal["torch", "triton", "library"]

AxisRanges = Mapping[str, Value | tuple[int, int]]
"""Axis -> its value, or (low, high) where a whole range is meant."""


def _supports_all(axes: Axes, device: DeviceFacts) -> str | None:
    return None


def _no_workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return {}


def _unprepared(weight: Any) -> Any:
    return weight


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant's declaration: the last object in its file, called VARIANT.

    wins: when this algorithm should be the fastest, one sentence.
    launch: `(run, *outputs, *op's parameters)`; or function: a plain callable with the op's signature (torch, peers).
    parts: for a fusion made of other ops, their names; the function gets one callable for each, then the op's
        parameters. `select` binds the chosen ones; called straight from a registry it gets the device's defaults.
    part_axes: part -> axis -> what it is called at: an axis of the fusion ("T", "2*I") or a value. Axes of the same
        name need no entry.
    configs: what tuning tries. default: the untuned choice, by architecture; "" is for every other one.
    supports: (axes, device) -> None, or the reason why not. Called with every axis that the contract binds from a call.
    workspace: (axes, config, device) -> named buffers.
    limits: (low, high) of a config value that may not be every legal number; pins outside are refused.
    key: the axes that select a tuned config; dtypes are always part of it.
    prepare: for a weight op, the weight as this variant wants it, made once at load.
    deterministic: the same bits on every run. batch_invariant: a row's bits do not depend on the batch around it.
    """

    wins: str
    deterministic: bool
    batch_invariant: bool
    launch: Callable[..., None] | None = None
    function: Callable[..., Any] | None = None
    parts: tuple[str, ...] = ()
    part_axes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    configs: tuple[Config, ...] = ()
    default: Mapping[str, Config] = field(default_factory=dict)
    supports: Callable[[Axes, DeviceFacts], str | None] = _supports_all
    workspace: Callable[[Axes, Config, DeviceFacts], Mapping[str, Buffer]] = _no_workspace
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    prepare: Callable[[Any], Any] = _unprepared
    # Filled in when the file joins a registry:
    name: str = ""
    file: Path = field(default_factory=Path)
    _contract: Contract | None = field(default=None, repr=False)
    module: ModuleType | None = field(default=None, repr=False, compare=False)
    part_ops: tuple["Op", ...] = field(default=(), repr=False, compare=False)
    zeroed: ZeroedBuffers = field(default_factory=ZeroedBuffers, init=False, repr=False, compare=False)

    @property
    def contract(self) -> Contract:
        if self._contract is None:
            raise VariantError("this variant has not joined a registry yet")
        return self._contract

    @property
    def kind(self) -> Kind:
        if self.launch is not None:
            return "triton"
        return "torch" if self.name == "torch" else "library"

    @property
    def kernels(self) -> dict[str, Any]:
        """The jit functions of its file by name, in order of definition; helpers, which no launch names, included."""
        members = vars(self.module).items() if self.module else ()
        return {
            name: member
            for name, member in members
            if is_jit(member) and self.module is not None and member.fn.__module__ == self.module.__name__
        }

    @cached_property
    def source(self) -> str:
        """The content hash of its kernels, under which tuned configs are kept. Cached: it parses source."""
        return source_hash(self.kernels)

    def pinned(self, config: Config, pins: Mapping[str, int]) -> Config:
        """`config` with some values replaced; a ValueError where one is unknown or outside what it may be."""
        for name, value in pins.items():
            low, high = self.limits.get(name, (value, value))
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {value}")
        return config.pinned(pins)

    def default_config(self, arch: str) -> Config:
        """The untuned config for an architecture."""
        return self.default.get(arch, self.default[""])

    def unsupported_reason(self, axes: Axes, device: torch.device, facts: DeviceFacts) -> str | None:
        """Why this variant cannot run at these axes on this device, or None where it can."""
        if self.kind == "triton":
            if reason := unavailable_reason(device):
                return reason
            if "float64" in axes.values():
                return "Triton variants accumulate in fp32; float64 is for the torch variants"
        for op in self.part_ops:
            part = op.variants[op.default_on(device)]
            if reason := part.unsupported_reason(self.axes_of_part(op, axes), device, facts):
                return f"its part {op.name}.{part.name}: {reason}"
        return self.supports(axes, facts)

    def axes_of_part(self, op: "Op", axes: AxisRanges) -> dict[str, Any]:
        """What a part is called at where the fusion is called at `axes` (values, or ranges of them)."""
        given = self.part_axes.get(op.name, {})
        mine: dict[str, Any] = {name: axes[name] for name in op.contract.axis_by_name if name in axes}
        for name, what in given.items():
            dim = Dim.parse(what) if isinstance(what, str) else None
            if dim is None or dim.name not in self.contract.axis_by_name:
                mine[name] = what
            elif dim.name in axes:
                value = axes[dim.name]
                ends = [dim.size({dim.name: end}) for end in (value if isinstance(value, tuple) else (value,))]
                mine[name] = tuple(ends) if isinstance(value, tuple) else ends[0]
        return mine

    def with_parts(self, ops: Mapping[str, "Op"]) -> "Variant":
        """This variant with its parts looked up; a VariantError names one that is not an op."""
        for name in (*self.parts, *self.part_axes):
            if name not in ops or name not in self.parts:
                raise VariantError(f"{self.file}: {name!r} is not an op that it could be composed of")
            if any(variant.parts for variant in ops[name].variants.values()):
                raise VariantError(f"{self.file}: its part {name!r} is a fusion itself; name that one's parts")
        for name, axes in self.part_axes.items():
            if unknown := set(axes) - set(ops[name].contract.axis_by_name):
                raise VariantError(f"{self.file}: part_axes names no axis of {name}: {sorted(unknown)}")
        return replace(self, part_ops=tuple(ops[name] for name in self.parts))

    def check_supported(self, axes: Axes, device: torch.device) -> None:
        if reason := self.unsupported_reason(axes, device, device_facts(device)):
            raise UnsupportedError(f"{self.contract.name}: variant {self.name!r} does not support this call: {reason}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op, computed by this variant with its nearest tuned config."""
        from tkernels.launch import Kernel
        from tkernels.tuning import NEAREST

        return Kernel(self, NEAREST, {})(*args, **kwargs)

    def joined(self, contract: Contract, name: str, file: Path, module: ModuleType | None) -> "Variant":
        """This declaration as part of an op, after its rules were checked."""
        variant = replace(self, name=name, file=file, _contract=contract, module=module)
        _check_declaration(variant)
        return variant


def _check_declaration(variant: Variant) -> None:
    where, contract = variant.file, variant.contract
    if (variant.launch is None) == (variant.function is None):
        raise VariantError(f"{where}: a variant has either a launcher or a function")
    expected = list(contract.arguments)
    if variant.launch is not None:
        expected = ["run", *contract.outputs, *expected]
        if variant.parts:
            raise VariantError(f"{where}: a variant with parts is a function that calls them, not a launcher")
    expected = [*variant.parts, *expected]
    entry = variant.launch or variant.function
    assert entry is not None
    if (got := list(inspect.signature(entry).parameters)) != expected:
        raise VariantError(f"{where}: parameters {got} differ from the reference's; {contract.name} takes {expected}")
    if unknown := set(variant.key) - set(contract.axis_by_name):
        raise ContractError(f"{where}: key names no axis of {contract.name}: {sorted(unknown)}")
    if variant.launch is None:
        return
    if "" not in variant.default:
        raise VariantError(f"{where}: default must have an entry for every other architecture, named ''")
    for config in (*variant.configs, *variant.default.values()):
        variant.pinned(config, config.as_dict())
        if set(config) != set(variant.default[""]):
            raise VariantError(
                f"{where}: configs differ in their names: {sorted(config)} and {sorted(variant.default[''])}"
            )
    if variant.batch_invariant:
        batchy = [axis for axis in variant.key if contract.axis_by_name[axis].batch]
        if batchy:
            raise VariantError(f"{where}: a batch-invariant variant's config may not depend on {', '.join(batchy)}")
    prefix = f"{contract.name}_{variant.name}"
    if variant.kernels and not any(name.startswith(prefix) for name in variant.kernels):
        raise VariantError(f"{where}: its kernel must be named {prefix} (found {', '.join(variant.kernels)})")
