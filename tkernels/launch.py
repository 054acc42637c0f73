"""The one door through which every kernel is launched, and the callable that stands behind an op's name.

A launcher is written once, as `launch(run, *outputs, *op's parameters)`, and calls `run.launch(kernel, grid,
**arguments)`. What stands behind `run` decides what that means: a compiled launch, an interpreted one, one under a
sanitizer, a count of programs, or a compilation for an architecture that is not there. Whoever writes a kernel knows
none of this.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tkernels.call_structure import read_structure, tensors_of
from tkernels.config import Config
from tkernels.contract import Axes, ContractError, pack
from tkernels.device import DeviceFacts, device_facts
from tkernels.inputs import clone_inputs
from tkernels.launch_plan import Launched, LaunchPlan, record_plan
from tkernels.mode import MODE
from tkernels.names import Names
from tkernels.ranges import NVTX, SILENCE, Range, Ranges
from tkernels.tuning import NEAREST, Tuning
from tkernels.variant import UnsupportedError, Variant
from tkernels.workspace import Buffer

_STRUCTURES_KEPT = 4096


Section = Callable[[str], AbstractContextManager[object]]
"""Gives the range of one of the contract's sections, by name."""


class Door(Protocol):
    """Runs, counts or compiles one kernel. `grid` has 1 to 3 entries; x may reach 2**31 - 1, y and z only 65535."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None: ...


def jit_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Triton's own launch: compiled or interpreted, as the process decided when it imported tkernels."""
    _jit_launch(kernel, grid, arguments, config)


def _jit_launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> Any:
    """The same, and the compiled kernel, where there is one."""
    return kernel[grid](**arguments, **launch_options(config))


def launch_options(config: Config) -> dict[str, int | bool]:
    """A config's options as Triton's launch takes them: those that not every backend has only where they are set, and
    never where kernels are interpreted, which has no use for them.
    """
    options: dict[str, int | bool] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if MODE == "compile":
        if config.maxnreg:
            options["maxnreg"] = config.maxnreg
        if config.launch_pdl:
            options["launch_pdl"] = True
    return options


@dataclass(frozen=True, slots=True)
class Run:
    """A launcher's first parameter: the device's facts, the axes that the call binds, the tuned config, the workspace,
    the door, and the ranges that what is launched in one of the contract's sections is launched in.
    """

    device: DeviceFacts
    axes: Axes
    config: Config
    workspace: Mapping[str, torch.Tensor]
    door: Door
    section: Section = field(default=lambda name: SILENCE, kw_only=True)

    @property
    def early_tiles(self) -> int:
        """Tiles of its weights that a program asks for while it waits for earlier launches: none where it need not.

        Four by reasoning, not measured: default configs of the decode path then have 128 kB for each multiprocessor on
        their way, together 17 MB of the 50 MB that Hopper's L2 cache holds.
        """
        return 4 * self.config.launch_pdl

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launches `kernel` over `grid`, every argument by name. An empty grid is no launch at all."""
        if math.prod(grid):
            self.door(kernel, grid, arguments, self.config)


@dataclass(frozen=True, slots=True)
class _Known:
    """What earlier calls of a structure have found: the axes that it binds, and its launches.

    index: Of the device, where it is a CUDA device.
    config: None until the first launch has found it.
    plan: Of all its launches; None where there is none.
    """

    axes: Axes
    device: torch.device
    index: int | None
    config: Config | None = None
    plan: LaunchPlan | None = None


@dataclass(frozen=True)
class Kernel:
    """A variant made callable with the op's signature: the public entry.

    It checks structure (never values, which would need a sync), asks whether the variant supports the point, resolves
    the config, allocates outputs and workspace, and launches. `pins` replace values of the resolved config; `parts` are
    the kernels that a composed fusion calls, in its variant's order: none given, each part's default for the device.
    Each call is a range named "op.variant", with its pins, in `ranges`.
    """

    variant: Variant
    tuning: Tuning
    pins: Mapping[str, int]
    door: Door = jit_door
    parts: tuple["Kernel", ...] = ()
    ranges: Ranges = field(default=NVTX, repr=False, compare=False)
    # Structures already checked, and how they are launched: an engine repeats the same few in every layer and step.
    _known: dict[tuple[Any, ...] | None, _Known] = field(default_factory=dict, init=False, repr=False, compare=False)

    _writes: bool = field(init=False, repr=False, compare=False)
    _range: Range = field(init=False, repr=False, compare=False)
    _sections: Names[Range] = field(init=False, repr=False, compare=False)
    _callables: dict[torch.device, tuple[Callable[..., Any], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        contract = self.variant.contract
        object.__setattr__(self, "_writes", bool(contract.writes or contract.consumes))
        object.__setattr__(self, "_range", self.ranges.named(f"{contract.name}.{self.label}", "op"))
        sections = {name: self.ranges.named(f"{contract.name} {name}", "section") for name in contract.sections}
        object.__setattr__(self, "_sections", Names(f"section of {contract.name}", sections))

    @property
    def label(self) -> str:
        """ "split_kv[num_splits=4]": the variant, with what its config is pinned to."""
        pins = ",".join(f"{name}={value}" for name, value in sorted(self.pins.items()))
        return f"{self.variant.name}[{pins}]" if pins else self.variant.name

    def section(self, name: str) -> Range:
        """The range of one of the contract's sections."""
        return self._sections[name]

    @property
    def section_given(self) -> tuple[Section, ...]:
        """What a composed fusion's function is given after its parts: `section`, where the contract has any."""
        return (self.section,) if self._sections else ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        structure, addresses = read_structure(args, kwargs, self._writes)
        known = self._known.get(structure)  # there is none of None
        if known is None:
            known = self._check(structure, args, kwargs)
        with self._range:
            if self.variant.function is not None:
                parts = self._part_callables(known.device) if self.variant.parts else ()
                return self.variant.function(*parts, *args, **self.variant.taken_arguments(kwargs))
            if known.index is not None and known.index != torch.cuda.current_device():
                with torch.cuda.device(known.device):  # Triton launches on the current one, whatever its tensors are on
                    return self._launch(structure, known, addresses, args, kwargs)
            return self._launch(structure, known, addresses, args, kwargs)

    def _check(self, structure: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Known:
        contract = self.variant.contract
        bound = contract.bind_arguments(args, kwargs)
        axes, device = contract.bind_axes(bound)
        if device.type not in ("cpu", "cuda"):
            first = next(name for name, value in bound.items() if getattr(value, "device", None) == device)
            raise ContractError(f"{contract.name}: argument {first!r} is on {device}; it must be on cpu or cuda")
        chosen = [part.variant for part in self.parts] or None
        self.variant.check_supported(axes, device, chosen)
        known = _Known(axes, device, device.index if device.type == "cuda" else None)
        if structure is not None:
            if len(self._known) >= _STRUCTURES_KEPT:
                self._known.clear()
            self._known[structure] = known
        return known

    def _part_callables(self, device: torch.device) -> tuple[Callable[..., Any], ...]:
        """What a composed fusion calls, in its variant's order, and what names its sections."""
        found = self._callables.get(device)
        if found is None:
            parts = self.parts
            if not parts:
                defaults = (op.variants[op.default_on(device)] for op in self.variant.part_ops)
                parts = tuple(Kernel(variant, self.tuning, {}, self.door, ranges=self.ranges) for variant in defaults)
            # The fusion has checked the call: a part that is a plain function, with no config to find, is called as it
            # is. Looking its structure up again would cost 3 us in every layer. One that leaves options out is asked:
            # the fusion may set what the fusion's own axes do not show.
            called = (
                part._call_function if part.variant.function is not None and not part.variant.left_out else part
                for part in parts
            )
            found = (*called, *self.section_given)
            self._callables[device] = found
        return found

    def _call_function(self, *args: Any, **kwargs: Any) -> Any:
        assert self.variant.function is not None, "a variant with a launcher is launched"
        with self._range:
            return self.variant.function(*args, **kwargs)

    def _launch(
        self,
        structure: tuple[Any, ...] | None,
        known: _Known,
        addresses: list[int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        plan, variant = known.plan, self.variant
        if plan is not None and plan.holds():
            try:
                return plan.run(addresses, variant.zeroed)
            except BaseException:
                variant.zeroed.clear()
                raise
        axes, device, facts = known.axes, known.device, device_facts(known.device)
        arguments = variant.contract.bind_arguments(args, kwargs)
        config = self.config(axes, device, arguments) if known.config is None else known.config
        outputs = variant.contract.allocate_outputs(axes, arguments, device)
        if structure is not None and known.config is None and self.door is jit_door and MODE == "compile":
            tensors = tensors_of(args, kwargs)
            plan = self._record_plan(tensors, outputs, arguments, axes, device, facts, config)
        else:
            self.launch_into(outputs, arguments, axes, device, facts, config)
        if structure is not None and known.config is None:
            self._known[structure] = _Known(axes, device, known.index, config, plan)
        return pack(tuple(outputs.values()))

    def _record_plan(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Mapping[str, Any],
        bound: Mapping[str, Any],
        axes: Axes,
        device: torch.device,
        facts: DeviceFacts,
        config: Config,
    ) -> LaunchPlan | None:
        """Launches into the outputs as `launch_into` does, and notes how."""
        variant, config = self._pick(axes, config, facts)
        buffers = variant.workspace(axes, config, facts)
        workspace = self._take_workspace(buffers, device)

        def run(tell: Callable[[Launched], None]) -> None:
            entered: Range = SILENCE

            def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
                tell(Launched(grid, arguments, _jit_launch(kernel, grid, arguments, config), entered))

            @contextmanager
            def section(name: str) -> Iterator[None]:
                nonlocal entered
                entered = self.section(name)
                try:
                    with entered:
                        yield
                finally:
                    entered = SILENCE

            self._run_launcher(variant, Run(facts, axes, config, workspace, door, section=section), outputs, bound)

        present = [output for output in outputs.values() if output is not None]
        return record_plan(run, tensors, present, workspace, buffers, device)

    def config(self, axes: Axes, device: torch.device, arguments: Mapping[str, Any] | None = None) -> Config:
        """The config that a call at these axes uses; with its arguments, a searching tuning can find it now."""
        facts = device_facts(device)
        on_clones = self.on_clones(axes, device, arguments) if arguments is not None else None
        config = self.tuning.resolve(self.variant, axes, facts, on_clones)
        config = self.variant.pinned(config, self.pins) if self.pins else config
        if (reason := config.unmet_on(facts.arch)) is not None:
            raise UnsupportedError(f"{self.variant.contract.name}.{self.variant.name}: {config.as_dict()}: {reason}")
        return config

    def on_clones(
        self, axes: Axes, device: torch.device, arguments: Mapping[str, Any]
    ) -> Callable[[Config], Callable[[], None]]:
        """Builds a config's launch on clones of what the op writes, for tuning.

        Tuning runs a launch many times: on the caller's tensors it would corrupt what the op writes in place, and one
        config's writes would mask another's mistake.
        """
        contract, facts = self.variant.contract, device_facts(device)

        def launch(config: Config) -> Callable[[], None]:
            own = {name: arguments[name] for name in (*contract.writes, *contract.consumes)}
            mine = {**arguments, **clone_inputs(own)}
            outputs = contract.allocate_outputs(axes, mine, device)
            return lambda: self.launch_into(outputs, mine, axes, device, facts, config)

        return launch

    def launch_into(
        self,
        outputs: Mapping[str, Any],
        arguments: Mapping[str, Any],
        axes: Axes,
        device: torch.device,
        facts: DeviceFacts,
        config: Config,
    ) -> None:
        """Runs the launcher into outputs that the caller owns (the checks poison them first)."""
        variant, config = self._pick(axes, config, facts)
        workspace = self._take_workspace(variant.workspace(axes, config, facts), device)
        run = Run(facts, axes, config, workspace, self.door, section=self.section)
        self._run_launcher(variant, run, outputs, arguments)

    def _pick(self, axes: Axes, config: Config, facts: DeviceFacts) -> tuple[Variant, Config]:
        """The variant that a call runs, and its config: another of the op where this one picks among them."""
        if self.variant.chosen is None:
            return self.variant, config
        picked = self.variant.chosen(axes, config, facts)
        return picked, self.tuning.resolve(picked, axes, facts)

    def _take_workspace(self, buffers: Mapping[str, Buffer], device: torch.device) -> dict[str, torch.Tensor]:
        return {name: self.variant.zeroed.buffer(name, b, device) for name, b in buffers.items()}

    def _run_launcher(
        self, variant: Variant, run: Run, outputs: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        try:
            variant.run_launcher(run, outputs, arguments)
        except BaseException:  # an interpreted program that raises, or is interrupted, leaves its counts behind
            self.variant.zeroed.clear()
            raise


def call_variant(variant: Variant, *args: Any, **kwargs: Any) -> Any:
    """The op, computed by a variant with its nearest tuned config and, where it is a fusion, its parts' defaults."""
    return Kernel(variant, NEAREST, {})(*args, **kwargs)
