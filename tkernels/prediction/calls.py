"""What a variant launches at a point on a GPU that is not there, with the few values that decide how long it runs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tkernels.config import Config
from tkernels.contract import Axes, Case, Contract, pack, unpack
from tkernels.device import DeviceFacts
from tkernels.inputs import dtype_name, map_tensors, tensors_in
from tkernels.launch import Kernel
from tkernels.preparation import prepare_weights
from tkernels.registry import builtin_ops
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
    """A variant at a point: what the contract counts, and its launches in order.

    parts: What launches them: the variant itself, or a composed fusion's parts, each with the axes that it is called
    at, but for those that preparing a weight decides.
    """

    bytes_moved: int
    flops: int
    launches: tuple[Launch, ...]
    parts: tuple[tuple[Variant, Axes], ...]


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
    contract, trace = variant.contract, _Trace(facts)
    with _KeepsIntegers():
        bytes_moved, flops = contract.bytes_moved(case), contract.flops(case)
    given = contract.bind_arguments((), case.inputs)
    if variant.parts:
        trace.compose(variant, given, case.axes)
    else:
        trace.launch(variant, given, bytes_moved, pins)
        trace.parts = [(variant, case.axes)]
    return Call(bytes_moved, flops, tuple(trace.launches), tuple(trace.parts))


@dataclass
class _Trace:
    """The launches so far, and the integers that they are given.

    known: storage -> a tensor of it, without which its number could become another's, and its values.
    """

    facts: DeviceFacts
    launches: list[Launch] = field(default_factory=list)
    parts: list[tuple[Variant, Axes]] = field(default_factory=list)
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def launch(
        self,
        variant: Variant,
        arguments: Mapping[str, Any],
        bytes_moved: int | None = None,
        pins: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Adds what a variant launches; returns its outputs, without values.

        Args:
            arguments: With weights as checkpoints have them.
            bytes_moved: What the contract counts; None is to count it.
        """
        contract = variant.contract
        with _KeepsIntegers():
            arguments = prepare_weights(variant, arguments)
        bare, axes = self._bind(contract, arguments)
        if reason := variant.refusal(axes, self.facts):
            raise UnsupportedError(reason)
        if bytes_moved is None:
            with _KeepsIntegers():
                bytes_moved = contract.bytes_moved(Case(contract, axes, 0, arguments))
        config = variant.default_config(self.facts.arch)
        config = variant.pinned(config, pins) if pins else config
        launches: list[Launch] = []
        with torch._C.DisableTorchFunction(), _NotesProducts(launches):
            outputs = contract.allocate_outputs(axes, bare, _META)
            kernel = Kernel(variant, NEAREST, {}, self._door(launches))
            kernel.launch_into(outputs, bare, axes, _META, self.facts, config)
        self.launches += _share_bytes(launches, bytes_moved, bare)
        return outputs

    def compose(self, variant: Variant, arguments: Mapping[str, Any], axes: Axes) -> None:
        """Adds what a composed fusion's parts launch, called as it calls them: on a GPU each op's default."""
        assert variant.function is not None, "a variant with parts is a function"
        parts = [op.variants[op.default_on(torch.device("cuda"))] for op in variant.part_ops]
        given = map_tensors(arguments, lambda one: one if _is_index(one) else self._without_values(one))
        with _KeepsIntegers():
            called: list[Any] = [self._part(part, variant.axes_of_part(part.contract, axes)) for part in parts]
            called += Kernel(variant, NEAREST, {}).section_given
            variant.function(*called, **variant.taken_arguments(given))

    def _part(self, variant: Variant, drawn: Axes) -> Callable[..., Any]:
        """What a composed fusion calls. drawn: the part's axes that no call binds, and others."""
        contract = variant.contract

        def call(*args: Any, **kwargs: Any) -> Any:
            if variant.launch is None:
                raise UnsupportedError(f"its kernels are not compiled here: a {variant.kind} variant")
            given = contract.bind_arguments(args, kwargs)
            _, bound = self._bind(contract, given)
            other = {name: value for name, value in bound.items() if drawn.get(name) != value}
            point = {**drawn, **{name: value for name, value in other.items() if name not in contract.loaded}}
            self.parts.append((variant, {name: point[name] for name in contract.axis_by_name if name in point}))
            outputs = self.launch(variant, given)
            made = self._make_integers(contract, given) if contract in _of_integers().values() else None
            return pack(tuple((made or outputs).values()))

        return call

    def _bind(self, contract: Contract, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Axes]:
        """The arguments without values, and the axes that they bind."""
        with torch._C.DisableTorchFunction():  # for a composed fusion's integers are on the CPU
            bare = map_tensors(arguments, self._without_values)
            return bare, contract.bind_axes(bare)[0]

    def _door(self, launches: list[Launch]) -> Callable[..., None]:
        def note(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
            mine = {name: found[0] for name, value in arguments.items() if (found := tensors_in({name: value}))}
            values = {name: self.known[at][1] for name, one in mine.items() if (at := _storage(one)) in self.known}
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
            self._note_made(kernel, arguments)

        return note

    def _note_made(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        """Notes the integers that a kernel makes where it makes all those of its op, of others that are known."""
        contract = _of_integers().get(kernel.__name__)
        given = {name.removesuffix("_ptr").lower(): value for name, value in arguments.items()}
        if contract is None or not {*contract.outputs, *contract.arguments} <= given.keys():
            return
        made = self._make_integers(contract, {name: given[name] for name in contract.arguments})
        for name, values in (made or {}).items():
            self.known[_storage(given[name])] = given[name], values

    def _make_integers(self, contract: Contract, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """The outputs by the contract's definition; None where it reads what is not known."""
        known = map_tensors(arguments, self._with_values)
        if any(tensor.is_meta for tensor in tensors_in(known)):
            return None
        made = unpack(contract.reference(**known))
        return {name: values.contiguous() for name, values in zip(contract.outputs, made, strict=True)}

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor of the same strides; the values of one that has some are noted under its storage."""
        if tensor.is_meta:
            return tensor
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        whole = torch.empty(storage.shape, dtype=tensor.dtype, device=_META)
        self.known[_storage(whole)] = whole, storage
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse, of a tensor whose values are known."""
        if (found := self.known.get(_storage(tensor))) is None:
            return tensor
        return found[1].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def _of_integers() -> Mapping[str, Contract]:
    """Kernel -> the contract of its op, where all outputs are integers that the definition says exactly."""
    return {
        name: op.contract
        for op in builtin_ops().values()
        if op.contract.outputs
        and all(one.exact and one.dtype in ("int32", "int64") for one in op.contract.outputs.values())
        for variant in op.variants.values()
        for name in variant.kernels
    }


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, float]:
    """Storage -> bytes, of the largest tensor in it."""
    sizes: dict[int, float] = {}
    for one in tensors:
        at = _storage(one)
        sizes[at] = max(sizes.get(at, 0.0), float(one.numel() * one.element_size()))
    return sizes


def _share_bytes(launches: Sequence[Launch], bytes_moved: int, arguments: Mapping[str, Any]) -> Iterator[Launch]:
    """The launches, with what of the op's bytes each moves: one alone moves them all.

    Of several, each is given tensors of the op. Where these are more than the op moves, as a cache's pages or experts
    that nobody chose are, each counts for its share; what one passes on to the next counts for both.
    """
    if len(launches) == 1:
        yield replace(launches[0], bytes_moved=float(bytes_moved))
        return
    own = {_storage(tensor) for tensor in tensors_in(arguments)}
    sizes = {storage: size for one in launches for storage, size in one.sizes.items() if storage in own}
    share = min(1.0, bytes_moved / max(1.0, sum(sizes.values())))
    for one in launches:
        yield replace(one, bytes_moved=one.bytes_of(own) * share + one.bytes_of(one.sizes.keys() - own))
