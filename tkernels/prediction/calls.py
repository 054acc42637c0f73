"""What a variant launches at a point on a GPU that is not there, with the few values that decide how long it runs."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tkernels.config import Config
from tkernels.contract import Axes, Case, Contract
from tkernels.device import DeviceFacts
from tkernels.inputs import dtype_name, map_tensors, tensors_in
from tkernels.launch import Kernel
from tkernels.preparation import prepare_weights
from tkernels.tuning import NEAREST
from tkernels.variant import UnsupportedError, Variant

_META = torch.device("meta")
_MOST_VALUES = 1 << 20  # of a tensor of integers that is kept: lengths, slots and tables, not a weight's codes


@dataclass(frozen=True)
class Launch:
    """One launch.

    scalars: its integers, constants included. offsets: tensor parameter -> where it begins in its storage, in elements.
    types: tensor parameter -> dtype by name. values: those tensors' whole storages whose integers are known.
    sizes: storage -> bytes of it that the launch is given. bytes_moved: of memory, each byte once. product: dtype and
    FLOPs of a launch of torch's own matrix product, whose code nobody here sees; its kernel is None.
    """

    kernel: Any
    grid: tuple[int, int, int]
    config: Config
    scalars: Mapping[str, Any]
    offsets: Mapping[str, int]
    types: Mapping[str, str]
    values: Mapping[str, torch.Tensor] = field(repr=False)
    sizes: Mapping[int, float]
    bytes_moved: float = 0.0
    product: tuple[str, float] | None = None

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def bytes_of(self, storages: Set[int]) -> float:
        """Bytes of these storages that it is given."""
        return sum(size for storage, size in self.sizes.items() if storage in storages)

    def read(self, name: str, offset: int) -> int | None:
        """What a tensor of integers holds; None where that is not known."""
        storage = self.values.get(name)
        return int(storage[offset]) if storage is not None and 0 <= offset < storage.numel() else None


@dataclass(frozen=True)
class Call:
    """A variant at a point: what the contract counts, and its launches in order."""

    bytes_moved: int
    flops: int
    launches: tuple[Launch, ...]


class _KeepsIntegers(TorchFunctionMode):
    """Integers stay on the CPU, with their values, where a contract makes its inputs for the meta device.

    What works on both at once works without values. A float that nobody knows is above what it is compared with: what
    a contract counts is then what a full call moves.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if func is torch.randn:
            return torch.empty(*args, dtype=kwargs.get("dtype"), device=_META)
        if func in _ABOVE and tensors and tensors[0].is_meta and tensors[0].numel() <= _MOST_VALUES:
            return torch.ones(tensors[0].shape, dtype=torch.bool)
        if func is torch.Tensor.to and not args[0].is_meta and _is_index(args[0]):
            args = tuple("cpu" if one == _META else one for one in args)
            kwargs = {name: "cpu" if value == _META else value for name, value in kwargs.items()}
        elif kwargs.get("device") == _META and not tensors and _is_index(made := func(*args, **kwargs)):
            return func(*args, **{**kwargs, "device": "cpu"}) if made.is_meta else made
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # of tensors with values beside some without
            if not any(one.is_meta for one in tensors):
                raise
            bare = [one.to(_META) if isinstance(one, torch.Tensor) else one for one in args]
            return func(*bare, **kwargs)


_ABOVE = (torch.gt, torch.ge, torch.Tensor.gt, torch.Tensor.ge, torch.Tensor.__gt__, torch.Tensor.__ge__)


def _is_index(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    whole = not tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 4
    return whole and tensor.numel() <= _MOST_VALUES


class _NotesProducts(TorchDispatchMode):
    """Notes the matrix products that a launcher leaves to torch, in turn with its own launches."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation would import torch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
            product = (dtype_name(left.dtype), 2.0 * result.numel() * left.shape[-1])
            sizes = _sizes((left, right, result))
            self._launches.append(Launch(None, (1, 1, 1), Config(), {}, {}, {}, {}, sizes, product=product))
        return result


def case_without_values(contract: Contract, axes: Axes) -> Case:
    """A point of an op, of any size: its floats have no values, its integers (lengths, slots, tables) have theirs."""
    drawn = contract.draw_axes(lambda name, candidates: candidates[0], axes)
    with _KeepsIntegers():
        return contract.case(drawn, 0, _META)


def make_call(variant: Variant, case: Case, facts: DeviceFacts, pins: Mapping[str, int] | None = None) -> Call:
    """What a variant launches on a device, with its default config for it and `pins` in that.

    Args:
        case: Of `case_without_values`, or with values; as checkpoints have its weights.

    Raises:
        UnsupportedError: The variant does not support the point there.
        Whatever its launcher raises on tensors without values.
    """
    contract = variant.contract
    with _KeepsIntegers():
        arguments = prepare_weights(variant, contract.bind_arguments((), case.inputs))
        bytes_moved, flops = contract.bytes_moved(case), contract.flops(case)
    known: dict[int, torch.Tensor] = {}
    bare = map_tensors(arguments, lambda tensor: _without_values(tensor, known))
    bound, _ = contract.bind_axes(bare)
    if reason := variant.refusal(bound, facts):
        raise UnsupportedError(reason)
    config = variant.default_config(facts.arch)
    config = variant.pinned(config, pins) if pins else config
    launches = _launch(variant, bare, bound, facts, config, known)
    return Call(bytes_moved, flops, _share_bytes(launches, bytes_moved, bare))


def _without_values(tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """A meta tensor of the same strides; of one that has values, its storage's are noted under the new storage."""
    if tensor.is_meta:
        return tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    whole = torch.empty(storage.shape, dtype=tensor.dtype, device=_META)
    known[whole.untyped_storage()._cdata] = storage
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, float]:
    """Storage -> bytes, of the largest tensor in it."""
    sizes: dict[int, float] = {}
    for one in tensors:
        at = one.untyped_storage()._cdata
        sizes[at] = max(sizes.get(at, 0.0), float(one.numel() * one.element_size()))
    return sizes


def _launch(
    variant: Variant,
    bare: Mapping[str, Any],
    axes: Axes,
    facts: DeviceFacts,
    config: Config,
    known: Mapping[int, torch.Tensor],
) -> list[Launch]:
    launches: list[Launch] = []

    def noting_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        mine = {name: tensors_in({name: value})[0] for name, value in arguments.items() if tensors_in({name: value})}
        values = {name: known[at] for name, one in mine.items() if (at := one.untyped_storage()._cdata) in known}
        launches.append(
            Launch(
                kernel,
                (*(int(size) for size in grid), *(1,) * (3 - len(grid))),  # type: ignore[arg-type]
                config,
                {name: value for name, value in arguments.items() if name not in mine},
                {name: int(one.storage_offset()) for name, one in mine.items()},
                {name: dtype_name(one.dtype) for name, one in mine.items()},
                values,
                _sizes(mine.values()),
            )
        )

    outputs = variant.contract.allocate_outputs(axes, bare, _META)
    with _NotesProducts(launches):
        Kernel(variant, NEAREST, {}, noting_door).launch_into(outputs, bare, axes, _META, facts, config)
    return launches


def _share_bytes(launches: Sequence[Launch], bytes_moved: int, arguments: Mapping[str, Any]) -> tuple[Launch, ...]:
    """The launches, with what of the op's bytes each moves: one alone moves them all.

    Of several, each is given tensors of the op, of which a cache's pages may be more than are read, so that together
    they count for the op's bytes at most; what one passes on to the next counts for both.
    """
    if len(launches) == 1:
        return (replace(launches[0], bytes_moved=float(bytes_moved)),)
    own = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments)}
    return tuple(
        replace(one, bytes_moved=min(one.bytes_of(own), float(bytes_moved)) + one.bytes_of(one.sizes.keys() - own))
        for one in launches
    )
