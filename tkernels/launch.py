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

import torch

from tkernels.config import Config
from tkernels.contract import Axes, ContractError, pack
from tkernels.device import DeviceFacts, device_facts
from tkernels.inputs import clone_inputs
from tkernels.ranges import NVTX, Range, Ranges

if TYPE_CHECKING:
    from tkernels.tuning import Tuning
    from tkernels.variant import Variant

_STRUCTURES_KEPT = 4096


class Door(Protocol):
    """Runs, counts or compiles one kernel. `grid` has 1 to 3 entries; x may reach 2**31 - 1, y and z only 65535."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None: ...


def jit_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Triton's own launch: compiled or interpreted, as the process decided when it imported tkernels."""
    kernel[grid](**arguments, num_warps=config.num_warps, num_stages=config.num_stages)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch memory that a variant asks for: uninitialized and one call long, or `zeroed`.

    A zeroed buffer is zero when a launch begins and the launch leaves it at zero again, so that it needs no launch of
    its own to clear it: counters by which programs find out who is last. It is kept from call to call: see
    ZeroedBuffers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False


class ZeroedBuffers:
    """The zeroed buffers of one variant: one per name, device, stream and shape, at the same address for good.

    Launches of one stream run one after the other, so they can share a buffer that each leaves at zero; those of two
    streams cannot. All captures of CUDA graphs share one of their own, made beside the first eager one, because
    memory allocated during a capture would be cleared by that graph's replays alone. Two such graphs must not be
    replayed at once.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def take(self, name: str, buffer: Buffer, device: torch.device) -> torch.Tensor:
        """The buffer for a launch now.

        Raises:
            RuntimeError: a capture asks for a buffer that no launch before it has used.
        """
        place = (name, device, buffer.shape, buffer.dtype)
        if device.type != "cuda":
            return self._made((*place, 0), buffer, device)
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and (*place, "capture") not in self._kept:
            raise RuntimeError(
                f"workspace {name!r} {list(buffer.shape)} is not there yet: launch once before the capture"
            )
        if capturing:
            return self._kept[*place, "capture"]
        self._made((*place, "capture"), buffer, device)
        return self._made((*place, torch.cuda.current_stream(device).cuda_stream), buffer, device)

    def _made(self, key: tuple[Any, ...], buffer: Buffer, device: torch.device) -> torch.Tensor:
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        return found

    def not_zero(self) -> list[str]:
        """Names of the buffers that some launch did not leave at zero. Waits for the device."""
        return sorted({key[0] for key, tensor in self._kept.items() if tensor.device.type != "meta" and tensor.any()})

    def clear(self) -> None:
        """Writes zeros again, after a launch that failed."""
        for tensor in self._kept.values():
            tensor.zero_()


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


def _structure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
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


def _places(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
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

    variant: "Variant"
    tuning: "Tuning"
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
        structure = _structure(args, kwargs)
        if structure is not None and self._writes:
            structure = (structure, _places(args, kwargs))
        checked = self._checked.get(structure) if structure is not None else None
        axes, device = checked or self._check(structure, args, kwargs)
        with self._range:
            if self.variant.function is not None:
                if self.variant.parts:
                    return self.variant.function(*self._part_callables(device), *args, **kwargs)
                return self.variant.function(*args, **kwargs)
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
        if self.parts:  # the ones that were chosen, where the variant itself would ask the defaults
            for op, part in zip(self.variant.part_ops, self.parts, strict=True):
                part.variant.check_supported(self.variant.axes_of_part(op, axes), device)
        else:
            self.variant.check_supported(axes, device)
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
            # is. Looking its structure up again would cost 3 us in every layer.
            found = tuple(part._call_function if part.variant.function is not None else part for part in parts)
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
        assert variant.launch is not None, "a variant without a launcher is a function"
        try:
            variant.launch(Run(facts, config, workspace, self.door), *outputs.values(), **arguments)
        except BaseException:  # an interpreted program that raises, or is interrupted, leaves its counts behind
            variant.zeroed.clear()
            raise
