"""The one door through which every kernel is launched, and the callable that stands behind an op's name.

A launcher is written once, as `launch(run, *outputs, *op's parameters)`, and calls `run.launch(kernel, grid,
**arguments)`. What stands behind `run` decides what that means: a compiled launch, an interpreted one, one under a
sanitizer, a count of programs, or a compilation for an architecture that is not there. Whoever writes a kernel knows
none of this.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tkernels.config import Config
from tkernels.contract import Axes, ContractError, pack
from tkernels.device import DeviceFacts, device_facts
from tkernels.inputs import clone_inputs
from tkernels.ranges import NVTX, Range, Ranges
from tkernels.tuning import NEAREST, Tuning
from tkernels.variant import Variant

_STRUCTURES_KEPT = 4096


class Door(Protocol):
    """Runs, counts or compiles one kernel. `grid` has 1 to 3 entries; x may reach 2**31 - 1, y and z only 65535."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None: ...


def jit_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Triton's own launch: compiled or interpreted, as the process decided when it imported tkernels."""
    kernel[grid](**arguments, num_warps=config.num_warps, num_stages=config.num_stages)


@dataclass(frozen=True, slots=True)
class Run:
    """A launcher's first parameter: the device's facts, the axes that the call binds, the tuned config, the workspace,
    and the door.
    """

    device: DeviceFacts
    axes: Axes
    config: Config
    workspace: Mapping[str, torch.Tensor]
    door: Door

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launches `kernel` over `grid`, every argument by name. An empty grid is no launch at all."""
        if math.prod(grid):
            self.door(kernel, grid, arguments, self.config)


def _argument_structure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What a contract looks at in each argument, hashable; None where one is no strided tensor, number or dtype, and no
    weight that says what its `structure` is.
    """
    parts: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return None
            parts.append((value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16))
        elif value is None or isinstance(value, int | float | torch.dtype):
            parts.append((value.__class__, value))  # the class too, for 1 == 1.0 == True
        elif (structure := getattr(value, "structure", None)) is not None:
            parts.append((value.__class__, structure))
        else:
            return None
    return tuple(parts)


def _storage_places(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """(the first tensor in the same storage, bytes from its beginning) of each tensor: which share memory follows."""
    firsts: dict[int, tuple[int, int]] = {}
    places: list[tuple[int, int]] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            begin = value.data_ptr()
            first, origin = firsts.setdefault(value.untyped_storage().data_ptr(), (len(places), begin))
            places.append((first, begin - origin))
    return tuple(places)


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
    # Structures already checked, with the axes they bind: an engine repeats the same few in every layer and step, and
    # looking one up costs 3 us where checking it costs 15.
    _checked: dict[tuple[Any, ...], tuple[Axes, torch.device]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _writes: bool = field(init=False, repr=False, compare=False)
    _range: Range = field(init=False, repr=False, compare=False)
    _callables: dict[torch.device, tuple[Callable[..., Any], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        contract = self.variant.contract
        object.__setattr__(self, "_writes", bool(contract.writes or contract.consumes))
        object.__setattr__(self, "_range", self.ranges.named(f"{contract.name}.{self.label}", "op"))

    @property
    def label(self) -> str:
        """ "split_kv[num_splits=4]": the variant, with what its config is pinned to."""
        pins = ",".join(f"{name}={value}" for name, value in sorted(self.pins.items()))
        return f"{self.variant.name}[{pins}]" if pins else self.variant.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        structure = _argument_structure(args, kwargs)
        if structure is not None and self._writes:
            structure = (structure, _storage_places(args, kwargs))
        checked = self._checked.get(structure) if structure is not None else None
        axes, device = checked or self._check(structure, args, kwargs)
        with self._range:
            if self.variant.function is not None:
                parts = self._part_callables(device) if self.variant.parts else ()
                return self.variant.function(*parts, *args, **self.variant.taken_arguments(kwargs))
            arguments = self.variant.contract.bind_arguments(args, kwargs)
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):  # Triton launches on the current device, whatever its tensors are on
                    return self._launch(arguments, axes, device)
            return self._launch(arguments, axes, device)

    def _check(
        self, structure: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Axes, torch.device]:
        contract = self.variant.contract
        bound = contract.bind_arguments(args, kwargs)
        axes, device = contract.bind_axes(bound)
        if device.type not in ("cpu", "cuda"):
            first = next(name for name, value in bound.items() if getattr(value, "device", None) == device)
            raise ContractError(f"{contract.name}: argument {first!r} is on {device}; it must be on cpu or cuda")
        chosen = [part.variant for part in self.parts] or None
        self.variant.check_supported(axes, device, chosen)
        if structure is not None:
            if len(self._checked) >= _STRUCTURES_KEPT:
                self._checked.clear()
            self._checked[structure] = (axes, device)
        return axes, device

    def _part_callables(self, device: torch.device) -> tuple[Callable[..., Any], ...]:
        """What a composed fusion calls, in its variant's order."""
        found = self._callables.get(device)
        if found is None:
            parts = self.parts
            if not parts:
                defaults = (op.variants[op.default_on(device)] for op in self.variant.part_ops)
                parts = tuple(Kernel(variant, self.tuning, {}, self.door, ranges=self.ranges) for variant in defaults)
            # The fusion has checked the call: a part that is a plain function, with no config to find, is called as it
            # is. Looking its structure up again would cost 3 us in every layer. One that leaves options out is asked:
            # the fusion may set what the fusion's own axes do not show.
            found = tuple(
                part._call_function if part.variant.function is not None and not part.variant.left_out else part
                for part in parts
            )
            self._callables[device] = found
        return found

    def _call_function(self, *args: Any, **kwargs: Any) -> Any:
        assert self.variant.function is not None, "a variant with a launcher is launched"
        with self._range:
            return self.variant.function(*args, **kwargs)

    def _launch(self, arguments: dict[str, Any], axes: Axes, device: torch.device) -> Any:
        facts = device_facts(device)
        config = self.config(axes, device, arguments)
        outputs = self.variant.contract.allocate_outputs(axes, arguments, device)
        self.launch_into(outputs, arguments, axes, device, facts, config)
        return pack(tuple(outputs.values()))

    def config(self, axes: Axes, device: torch.device, arguments: Mapping[str, Any] | None = None) -> Config:
        """The config that a call at these axes uses; with its arguments, a searching tuning can find it now."""
        facts = device_facts(device)
        on_clones = self.on_clones(axes, device, arguments) if arguments is not None else None
        config = self.tuning.resolve(self.variant, axes, facts, on_clones)
        return self.variant.pinned(config, self.pins) if self.pins else config

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
        variant = self.variant
        workspace = {
            name: variant.zeroed.take(name, b, device)
            if b.zeroed
            else torch.empty(b.shape, dtype=b.dtype, device=device)
            for name, b in variant.workspace(axes, config, facts).items()
        }
        try:
            variant.run_launcher(Run(facts, axes, config, workspace, self.door), outputs, arguments)
        except BaseException:  # an interpreted program that raises, or is interrupted, leaves its counts behind
            variant.zeroed.clear()
            raise


def call_variant(variant: Variant, *args: Any, **kwargs: Any) -> Any:
    """The op, computed by a variant with its nearest tuned config and, where it is a fusion, its parts' defaults."""
    return Kernel(variant, NEAREST, {})(*args, **kwargs)
