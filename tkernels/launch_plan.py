"""A call's launches, recorded once and repeated for every later call of the same structure.

What a launcher asks its door for follows from the call's structure alone: the kernels, their grids, every number among
their arguments, and of every pointer whose it is. So the first call of a structure is noted while it is launched, and
from then on a call allocates, puts addresses in their places and starts the compiled kernels: no launcher runs, no
argument is specialized again. A launcher that does anything else (it computes on the host, or passes what is no
argument, output or workspace of the call) has no plan and goes on being run.

A plan holds numbers and compiled kernels, none of a call's tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.ranges import Range
from tkernels.workspace import Buffer, ZeroedBuffers

_TENSORS = (torch.Tensor, TensorDescriptor)
_CONSTANTS = (int, float, str, type(None), tl.dtype, tl.constexpr, torch.dtype)


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch as it was asked for, the kernel that was compiled for it, and the section that it is in."""

    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    compiled: Any
    section: Range


@dataclass(frozen=True, slots=True)
class Arguments:
    """A kernel's arguments, in the order of its parameters, without the call's addresses.

    values: Numbers and what else is constant; None where an address or a descriptor goes.
    pointers: (parameter, tensor of the call, bytes from its address).
    boxes: The same of tensor descriptors, each beside one without its tensor.
    """

    values: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]
    boxes: tuple[tuple[int, int, int, TensorDescriptor], ...]

    def at(self, addresses: Sequence[int]) -> list[Any]:
        """What the kernel is given in a call whose tensors lie at these addresses."""
        filled = list(self.values)
        for parameter, tensor, offset in self.pointers:
            filled[parameter] = addresses[tensor] + offset
        for parameter, tensor, offset, box in self.boxes:
            filled[parameter] = _with_base(box, _Address(addresses[tensor] + offset))
        return filled


def _with_base(box: TensorDescriptor, base: Any) -> TensorDescriptor:
    """A descriptor of another tensor of the same form: what it checks of a tensor was checked when it was made."""
    moved = object.__new__(TensorDescriptor)
    vars(moved).update(vars(box), base=base)
    return moved


class _Address:
    """Stands for a descriptor's tensor: Triton's launcher asks where it is."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A launch without its addresses. Triton refuses a kernel one of whose globals has changed since it was compiled:
    `constants` are those, (where, name, value), and one that is another now ends the plan.
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, int, int]
    arguments: Arguments
    constants: tuple[tuple[Mapping[str, Any], str, Any], ...]

    def holds(self) -> bool:
        if self.kernel.pre_run_hooks:
            return False
        for found, name, value in self.constants:  # noqa: SIM110  # all() of a generator takes twice as long
            if found.get(name) is not value:
                return False
        return True

    def start(self, addresses: Sequence[int], stream: int) -> None:
        """As Triton's own launch does from the compiled kernel on, its hooks included."""
        compiled, values = self.compiled, self.arguments.at(addresses)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        metadata = None
        if _is_silent(enter) and _is_silent(leave):
            enter = leave = None
        else:
            metadata = compiled.launch_metadata(self.grid, stream, *values)
        x, y, z = self.grid
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *values)


def _is_silent(hook: Any) -> bool:
    """Whether nobody listens: no hook, or Triton's chain of none."""
    return hook is None or not getattr(hook, "calls", True)


def compiler_settings() -> tuple[Any, ...]:
    """What Triton would compile a kernel again for: set by its debugger and its profiler."""
    runtime, compilation = vars(knobs.runtime), vars(knobs.compilation)
    return (
        runtime.get("debug"),
        compilation.get("instrumentation_mode"),
        runtime.get("add_stages_inspection_hook"),
    )


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All launches of a call.

    outputs: (shape, strides, dtype) of those that the call asks for.
    scratch: The bytes of all workspace that is new in each call, in one piece.
    places: Where in it each buffer begins.
    zeroed: The workspace that is kept at zero.
    sections: The launches by the range that they are launched in: SILENCE for those in no section of their op's work.
    settings: Of Triton's compiler, when the kernels were compiled.
    """

    device: torch.device
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    scratch: int
    places: tuple[int, ...]
    zeroed: tuple[tuple[str, Buffer], ...]
    sections: tuple[tuple[Range, tuple[PlannedLaunch, ...]], ...]
    settings: tuple[Any, ...]

    @property
    def launches(self) -> tuple[PlannedLaunch, ...]:
        """All of them, in order."""
        return tuple(launch for _, launches in self.sections for launch in launches)

    def holds(self) -> bool:
        """Whether Triton would still launch these very kernels."""
        if self.settings != compiler_settings():
            return False
        for _, launches in self.sections:
            for launch in launches:
                if not launch.holds():
                    return False
        return True

    def run(self, addresses: list[int], kept: ZeroedBuffers) -> Any:
        """Launches for a call on the current device; returns its outputs as `pack` does.

        Args:
            addresses: Of the call's tensors; the outputs' and the workspace's are added.
            kept: Where the workspace is that is kept at zero.
        """
        device = self.device
        outputs = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self.outputs
        ]
        for output in outputs:
            addresses.append(output.data_ptr())
        if self.places:  # `scratch` lives until all is launched: memory that is given back is the next launch's
            scratch = torch.empty_strided((self.scratch,), (1,), dtype=torch.uint8, device=device)
            begin = scratch.data_ptr()
            for place in self.places:
                addresses.append(begin + place)
        for name, buffer in self.zeroed:
            addresses.append(kept.take(name, buffer, device).data_ptr())
        if self.sections:
            active = driver.active
            stream = active.get_current_stream(active.get_current_device())
            for section, launches in self.sections:
                with section:
                    for launch in launches:
                        launch.start(addresses, stream)
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None


class HostWork(TorchDispatchMode):
    """Notes whether torch does anything but make views."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation would import torch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= not func.is_view
        return func(*args, **(kwargs or {}))


def record_plan(
    run: Callable[[Callable[[Launched], None]], None],
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    workspace: Mapping[str, torch.Tensor],
    buffers: Mapping[str, Buffer],
    device: torch.device,
) -> LaunchPlan | None:
    """Runs a launcher, and returns the plan of what it launched; None where there can be none.

    Args:
        run: Runs the launcher and tells of each launch after it.
        tensors: Of the call's arguments, in the order of their addresses.
        outputs: Those that it asks for.
        workspace, buffers: By name, in the same order.
    """
    launched: list[Launched] = []
    settings = compiler_settings()
    with HostWork() as host:
        run(launched.append)
    fresh = {name: buffer for name, buffer in buffers.items() if not buffer.zeroed}
    zeroed = {name: buffer for name, buffer in buffers.items() if buffer.zeroed}
    sources = [*tensors, *outputs, *(workspace[name] for name in (*fresh, *zeroed))]
    launches = [(one.section, planned) for one in launched if (planned := _plan_launch(one, sources)) is not None]
    if host.found or len(launches) < len(launched):
        return None
    by_section = groupby(launches, key=lambda launch: launch[0])
    places, scratch = _lay_out(list(fresh.values()))
    return LaunchPlan(
        device,
        tuple((tuple(one.shape), one.stride(), one.dtype) for one in outputs),
        scratch,
        places,
        tuple(zeroed.items()),
        tuple((section, tuple(planned for _, planned in mine)) for section, mine in by_section),
        settings,
    )


_ALIGNMENT = 512
"""Bytes, as torch's allocator on CUDA aligns each tensor: kernels were compiled for what they got from it."""


def _lay_out(buffers: Sequence[Buffer]) -> tuple[tuple[int, ...], int]:
    """Where each buffer begins in one piece of memory, and how large that is."""
    places, end = [], 0
    for buffer in buffers:
        places.append(end)
        end += -(-math.prod(buffer.shape) * buffer.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return tuple(places), end


def _plan_launch(launched: Launched, sources: Sequence[torch.Tensor]) -> PlannedLaunch | None:
    compiled = launched.compiled
    if not isinstance(compiled, CompiledKernel):
        return None
    kernel: JITFunction[Any] = compiled.src.fn
    if kernel.launch_metadata:  # it is given the tensors of each launch, and a plan has none
        return None
    arguments = plan_arguments(kernel, launched.arguments, sources)
    if arguments is None:
        return None
    x, y, z = (*launched.grid, 1, 1)[:3]
    # As they are now: Triton keeps a copy, and has just seen that this is its equal.
    constants = tuple((found, name, found[name]) for (name, _), (_, found) in kernel.used_global_vals.items())
    return PlannedLaunch(kernel, compiled, (x, y, z), arguments, constants)


def plan_arguments(kernel: Any, given: Mapping[str, Any], sources: Sequence[torch.Tensor]) -> Arguments | None:
    """A kernel's arguments without the addresses of `sources`; None where one is neither constant nor a part of just
    one of these.
    """
    storages = [source.untyped_storage() for source in sources]
    spans = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
    values: list[Any] = []
    pointers: list[tuple[int, int, int]] = []
    boxes: list[tuple[int, int, int, TensorDescriptor]] = []
    for index, (name, parameter) in enumerate(kernel.signature.parameters.items()):
        value = given.get(name, parameter.default)
        if isinstance(value, _TENSORS):
            place = _find_place(value if isinstance(value, torch.Tensor) else value.base, sources)
            if place is None:
                return None
            if isinstance(value, torch.Tensor):
                pointers.append((index, *place))
            else:
                boxes.append((index, *place, _with_base(value, None)))
            value = None
        elif not isinstance(value, _CONSTANTS):
            return None
        elif isinstance(value, int) and any(begin <= value < end for begin, end in spans):
            return None  # it may be an address that the launcher has asked a tensor for
        values.append(value)
    return Arguments(tuple(values), tuple(pointers), tuple(boxes))


def _find_place(tensor: torch.Tensor, sources: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """(source, bytes from its address) of a source or a view of one; None where that may be another in another call.

    Two sources of one storage may lie elsewhere in the next call, so of those a view is nobody's; so is a source that
    is given twice.
    """
    found = [index for index, source in enumerate(sources) if source is tensor]
    if not found:
        storage = tensor.untyped_storage().data_ptr()
        found = [index for index, source in enumerate(sources) if source.untyped_storage().data_ptr() == storage]
        if tensor.numel() == 0 or any(sources[index].numel() == 0 for index in found):
            return None  # the address of what is empty is 0
    return (found[0], tensor.data_ptr() - sources[found[0]].data_ptr()) if len(found) == 1 else None
