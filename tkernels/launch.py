"""The one door through which every kernel is launched, and the callable that stands behind an op's name.

A launcher is written once, as `launch(run, *outputs, *op's parameters)`, and calls `run.launch(kernel, grid,
**arguments)`. What stands behind `run` decides what that means: a compiled launch, an interpreted one, one under a
sanitizer, a count of programs, or a compilation for an architecture that is not there. Whoever writes a kernel knows
none of this.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import nvtx
import torch

from tkernels.config import Config
from tkernels.contract import Axes, pack
from tkernels.device import DeviceFacts, device_facts
from tkernels.inputs import clone_inputs

if TYPE_CHECKING:
    from tkernels.tuning import Tuning
    from tkernels.variant import Variant

_NVTX = nvtx.get_domain("tkernels")
_POINTS_KEPT = 4096


class Door(Protocol):
    """Runs, counts or compiles one kernel. `grid` has 1 to 3 entries; x may reach 2**31 - 1, y and z only 65535."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None: ...


def jit_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Triton's own launch: compiled or interpreted, as the process decided when it imported tkernels."""
    kernel[grid](**arguments, num_warps=config.num_warps, num_stages=config.num_stages)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch memory that a variant asks for: uninitialized, one call long."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Run:
    """A launcher's first parameter: the device's facts, the tuned config, the workspace, and the door."""

    device: DeviceFacts
    config: Config
    workspace: Mapping[str, torch.Tensor]
    door: Door

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launches `kernel` over `grid`, every argument by name. An empty grid is no launch at all."""
        if math.prod(grid):
            self.door(kernel, grid, arguments, self.config)


@dataclass(frozen=True)
class Kernel:
    """A variant made callable with the op's signature: the public entry.

    It checks structure (never values, which would need a sync), asks whether the variant supports the point, resolves
    the config, allocates outputs and workspace, and launches. `pins` replace values of the resolved config.
    """

    variant: "Variant"
    tuning: "Tuning"
    pins: Mapping[str, int]
    door: Door = jit_door
    # Points already checked against ranges, constraints and support: the same few recur in every step of an engine, and
    # the check costs 5 us of a call's 15.
    _points: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        variant = self.variant
        label = f"{variant.contract.name}.{variant.name}"
        object.__setattr__(self, "_range", _NVTX.get_event_attributes(message=label))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contract = self.variant.contract
        arguments = contract.bind_arguments(args, kwargs)
        axes, device = contract.bind_structure(arguments)
        point = (device, *axes.values())
        if point not in self._points:
            self._check(point, axes, device)
        _NVTX.push_range(self._range)  # type: ignore[attr-defined]
        try:
            if self.variant.function is not None:
                return self.variant.function(**arguments)
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):  # Triton launches on the current device, whatever its tensors are on
                    return self._launch(arguments, axes, device)
            return self._launch(arguments, axes, device)
        finally:
            _NVTX.pop_range()

    def _check(self, point: tuple[Any, ...], axes: Axes, device: torch.device) -> None:
        self.variant.contract.check_axes(axes)
        self.variant.check_supported(axes, device)
        if len(self._points) >= _POINTS_KEPT:
            self._points.clear()
        self._points.add(point)

    def _launch(self, arguments: dict[str, Any], axes: Axes, device: torch.device) -> Any:
        facts = device_facts(device)
        config = self.config(axes, device, arguments)
        outputs = self.variant.contract.allocate_outputs(axes, arguments, device)
        self.launch_into(outputs, arguments, axes, device, facts, config)
        return pack(tuple(outputs.values()))

    def config(self, axes: Axes, device: torch.device, arguments: Mapping[str, Any] | None = None) -> Config:
        """The config that a call at these axes uses; with its arguments, a searching tuning can find it now."""
        facts = device_facts(device)

        def on_clones(config: Config) -> Callable[[], None]:
            # Tuning runs a launch many times: on the caller's tensors it would corrupt what the op writes in place, and
            # one config's writes would mask another's mistake.
            contract = self.variant.contract
            assert arguments is not None
            mine = {**arguments, **clone_inputs({name: arguments[name] for name in contract.writes})}
            outputs = contract.allocate_outputs(axes, mine, device)
            return lambda: self.launch_into(outputs, mine, axes, device, facts, config)

        config = self.tuning.resolve(self.variant, axes, facts, on_clones if arguments is not None else None)
        return config.pinned(self.pins) if self.pins else config

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
        buffers = variant.workspace(axes, config, facts)
        workspace = {name: torch.empty(b.shape, dtype=b.dtype, device=device) for name, b in buffers.items()}
        assert variant.launch is not None, "a variant without a launcher is a function"
        variant.launch(Run(facts, config, workspace, self.door), *outputs.values(), **arguments)
