"""One way to compute an op: what its file declares, checked once, when it joins the registry."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Contract, Value
from tkernels.declaration import find_faults, taken_outputs
from tkernels.device import INTERPRETER, DeviceFacts, device_facts
from tkernels.dims import Dim
from tkernels.errors import TKernelsError
from tkernels.folders import fault_of_name
from tkernels.language import wait_for_earlier_launches
from tkernels.mode import unavailable_reason
from tkernels.names import Names
from tkernels.source_hash import called_functions, is_jit, source_hash
from tkernels.workspace import Buffer, ZeroedBuffers


class UnsupportedError(TKernelsError, ValueError):
    """A variant was asked for something it does not do; the message says what and why."""


class VariantError(TKernelsError, ValueError):
    """A variant file that breaks the rules of its op; the message names the file and the rule, each on a line.

    declared: The variant, where the file could be imported.
    """

    def __init__(self, message: str, declared: "Variant | None" = None) -> None:
        super().__init__(message)
        self.declared = declared


Kind = Literal["torch", "triton", "library"]

AxisRanges = Mapping[str, Value | tuple[int, int]]
"""Axis -> its value, or (low, high) where a whole range is meant."""


def _ends(axes: AxisRanges, end: int) -> dict[str, Value]:
    """The axes with the first or the last value of each that is a range."""
    return {name: value[end] if isinstance(value, tuple) else value for name, value in axes.items()}


def as_it_is(weight: Any) -> Any:
    """What preparing a weight is where a variant reads it in the layout in which it was loaded."""
    return weight


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant's declaration: the last object in its file, called VARIANT.

    Attributes:
        wins: When this algorithm should be the fastest, one sentence.
        region: The same as data, where sizes say it: axis -> the (low, high) that it is for, both included; everywhere
            where left out. Wide cases and benchmark points reach into it.
        launch: `(run, *outputs, *op's parameters)`; or function: a plain callable with the op's signature (torch,
            peers). Either may leave out options of the op (keyword-only parameters that have a default), and a launcher
            the outputs that only such an option asks for: a call that sets one of these is refused by its name.
        parts: For a fusion made of other ops, their names; the function gets one callable for each, `section` where the
            contract has sections, then the op's parameters. `select` binds the chosen ones; called straight from a
            registry it gets the device's defaults.
        part_axes: Part -> axis -> what it is called at: an axis of the fusion ("T", "2*I") or a value. Axes of the same
            name need no entry.
        configs: What tuning tries beside the defaults; left out, it tries the defaults alone.
        default: The untuned choice, by architecture; "" is for every other one.
        supports: (axes, device) -> None, or the reason why not. Called with every axis that the contract binds from a
            call.
        workspace: (axes, config, device) -> named buffers.
        chosen: (axes, config, device) -> the variant of the same op that a call runs, with its own tuned config, in the
            place of this one.
        limits: (low, high) of a config value that may not be every legal number; pins outside are refused.
        key: The axes that select a tuned config; dtypes are always part of it.
        sum_order: Config -> what decides in which order, and by which instruction, a row's sums are added, comparable.
            A batch-invariant variant needs it where its key names an axis of the batch, which has classes then: tuned
            configs of two classes agree in it.
        prepare: For a weight op, the weight as this variant wants it, made once at load.
        deterministic: The same bits on every run.
        batch_invariant: A row's bits do not depend on the batch around it.
    """

    wins: str
    deterministic: bool
    batch_invariant: bool
    region: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    launch: Callable[..., None] | None = None
    function: Callable[..., Any] | None = None
    parts: tuple[str, ...] = ()
    part_axes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    configs: tuple[Config, ...] | None = None
    default: Mapping[str, Config] = field(default_factory=dict)
    supports: Callable[[Axes, DeviceFacts], str | None] = lambda axes, device: None
    workspace: Callable[[Axes, Config, DeviceFacts], Mapping[str, Buffer]] = lambda axes, config, device: {}
    chosen: Callable[[Axes, Config, DeviceFacts], "Variant"] | None = None
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    sum_order: Callable[[Config], Any] | None = None
    prepare: Callable[[Any], Any] = as_it_is
    # Filled in when the file joins a registry:
    name: str = ""
    file: Path = field(default_factory=Path)
    left_out: tuple[str, ...] = ()  # the op's options that it does not take
    _contract: Contract | None = field(default=None, repr=False)
    module: ModuleType | None = field(default=None, repr=False, compare=False)
    part_ops: tuple["Op", ...] = field(default=(), repr=False, compare=False)
    entry: Callable[..., Any] | None = field(default=None, repr=False, compare=False)  # (variant, *args, **kwargs)
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

    @property
    def waits_for_earlier_launches(self) -> bool:
        """Whether each of its kernels waits, so that it may be launched before what is ahead of it has ended."""
        kernels = self.kernels
        called = [one for kernel in kernels.values() for one in called_functions({"": kernel})[1:]]
        launched = [kernel for kernel in kernels.values() if kernel not in called]
        return bool(launched) and all(wait_for_earlier_launches in called_functions({"": one}) for one in launched)

    def is_for(self, axes: Axes) -> bool:
        """Whether a call at these axes lies in its region."""
        return all(low <= int(axes[name]) <= high for name, (low, high) in self.region.items())

    def pinned(self, config: Config, pins: Mapping[str, int]) -> Config:
        """`config` with some values replaced; a ValueError where one is unknown or outside what it may be."""
        self.check_limits(pins)
        return config.pinned(pins)

    def check_limits(self, values: Mapping[str, int]) -> None:
        """Raises ValueError for a config's value that is outside what the declaration limits it to."""
        for name, value in values.items():
            low, high = self.limits.get(name, (value, value))
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {value}")
        if values.get("launch_pdl") and not self.waits_for_earlier_launches:
            raise ValueError(
                "launch_pdl is for kernels that call tkernels.language.wait_for_earlier_launches, and not all of its do"
            )

    def default_config(self, arch: str) -> Config:
        """The untuned config for an architecture."""
        return self.default.get(arch, self.default[""])

    def refusal(self, axes: Axes, facts: DeviceFacts) -> str | None:
        """Why its declaration refuses these axes on such a device, wherever this process runs; None where it does not.

        Args:
            axes: As the contract binds them from a call, or those of them that are known.
        """
        if self.left_out and (refused := set(self.left_out).intersection(self.contract.set_options(axes))):
            return f"{self.name} does not take {', '.join(sorted(refused))}"
        if self.kind == "triton" and facts.arch != INTERPRETER.arch and (name := self.contract.find_unaligned(axes)):
            # Compiled for sm_90, products of such tensors spill 456 to 1,284 bytes, and no copy runs ahead of them.
            return f"{name}'s address and strides must be multiples of 16 bytes, as those of its clone() are"
        return self.supports(axes, facts)

    def unsupported_reason(
        self, axes: Axes, device: torch.device, facts: DeviceFacts, parts: Sequence["Variant"] | None = None
    ) -> str | None:
        """Why this variant cannot run at these axes on this device, or None where it can.

        Args:
            parts: The variants that a composed fusion calls; None for each part's default on the device.
        """
        if self.kind == "triton":
            if reason := unavailable_reason(device):
                return reason
            if "float64" in axes.values():
                return "Triton variants accumulate in fp32; float64 is for the torch variants"
        if parts is None:
            parts = [op.variants[op.default_on(device)] for op in self.part_ops]
        for part in parts:
            if reason := part.unsupported_reason(self.axes_of_part(part.contract, axes), device, facts):
                return f"its part {part.contract.name}.{part.name}: {reason}"
        return self.refusal(axes, facts)

    @cached_property
    def axes_left_out(self) -> Axes:
        """What the axes of the options that it leaves out are at in every call that it takes."""
        off = [self.contract.options[name] for name in self.left_out]
        return {axis: value for one in off for axis, value in one.items() if axis in self.contract.axis_by_name}

    def taken_arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call without the options that this variant leaves out, which are at their defaults."""
        if not self.left_out:
            return arguments
        return {name: value for name, value in arguments.items() if name not in self.left_out}

    def run_launcher(self, run: Any, outputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Calls the launcher with the outputs and arguments that it takes.

        Args:
            run: The launcher's first argument, a Run.
            outputs: Every output of the op by name, None for those that the call does not ask for.
            arguments: Every parameter of the op by name.
        """
        assert self.launch is not None, "a variant without a launcher is a function"
        if self.left_out:
            outputs = {name: outputs[name] for name in taken_outputs(self.contract, self.left_out)}
        self.launch(run, *outputs.values(), **self.taken_arguments(arguments))

    def axes_of_part(self, part: Contract, axes: AxisRanges) -> dict[str, Any]:
        """What a part is called at where the fusion is called at `axes` (values, or ranges of them)."""
        mine: dict[str, Any] = {name: axes[name] for name in (*part.axis_by_name, *part.options) if name in axes}
        for name, what in self.part_axes.get(part.name, {}).items():
            dim = Dim.parse(what) if isinstance(what, str) else None
            if dim is None or not dim.names or not dim.names <= self.contract.axis_by_name.keys():
                mine[name] = what
            elif dim.names <= axes.keys():
                low, high = (dim.size(_ends(axes, end)) for end in (0, 1))  # it grows with each of its axes
                mine[name] = (low, high) if any(isinstance(axes[axis], tuple) for axis in dim.names) else low
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

    def check_supported(self, axes: Axes, device: torch.device, parts: Sequence["Variant"] | None = None) -> None:
        """Raises UnsupportedError where `unsupported_reason` has one."""
        if reason := self.unsupported_reason(axes, device, device_facts(device), parts):
            raise UnsupportedError(f"{self.contract.name}: variant {self.name!r} does not support this call: {reason}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op, computed by this variant with its nearest tuned config."""
        if self.entry is None:
            raise VariantError("only a registry's variants can be called themselves; make a Kernel of this one")
        return self.entry(self, *args, **kwargs)

    def joined(
        self,
        contract: Contract,
        name: str,
        file: Path,
        module: ModuleType | None,
        entry: Callable[..., Any] | None = None,
    ) -> "Variant":
        """This declaration as part of an op, after its rules were checked.

        Args:
            entry: What a call of the variant is, `(variant, *args, **kwargs)`; without one it cannot be called itself.
        """
        declared = self.launch or self.function
        left_out = contract.options_left_out_by(declared) if callable(declared) else ()
        variant = replace(self, name=name, file=file, left_out=left_out, _contract=contract, module=module, entry=entry)
        if faults := find_faults(variant):
            raise VariantError("\n".join(fault.at(file) for fault in faults), variant)
        return variant


@dataclass(frozen=True)
class Op:
    """A contract and its variants; `torch`, made of the contract's baseline, is always among them."""

    contract: Contract
    variants: Names[Variant]

    @property
    def name(self) -> str:
        return self.contract.name

    def fault_of_name(self, name: str) -> str | None:
        """Why no further variant of this op may have the name; None where one may."""
        if name in self.variants:
            return f"{self.name} already has a variant {name!r}, in {self.variants[name].file}"
        return fault_of_name(name)

    def default_on(self, device: torch.device, chosen: Container[str] = ()) -> str:
        """The variant where none is named: on CUDA the contract's default, on a CPU, which interprets Triton, `torch`.

        A fusion with a composed variant is that one on a CPU, and wherever one of its parts is chosen by name: it is
        what its parts are.

        Args:
            chosen: The ops of which a variant is named.
        """
        for variant in self.variants.values():
            if variant.parts and (device.type != "cuda" or any(part in chosen for part in variant.parts)):
                return variant.name
        return self.contract.default if device.type == "cuda" else "torch"
