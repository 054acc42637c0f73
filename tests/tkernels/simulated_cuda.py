"""torch.cuda without a GPU: launches are queued and run late, in any order that streams and events leave open.

Tensors of the simulated device are on cuda:0. Their memory is the host's, and only work that has left its queue touches
it, so whoever looks too early, or forgets to wait, sees what was there before:

- New memory is full of poison, and so is memory that was given back, from the moment its stream comes to that; memory
  that another stream still reads is safe only as far as `record_stream` said so.
- A copy between pinned memory and the device reads and writes the host's side when it runs. Any other copy waits, as
  CUDA's does, and so does a value that the host asks for; `waits` counts both.
- A CUDA graph keeps its launches with the memory that they were captured with. What waits, or copies memory that is not
  pinned, is refused in a capture. A graph that is dropped while a replay of it is queued is an error.

What runs when is a `Pace`. All of them are what a GPU may do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.tkernels.simulated_streams import (
    CudaError,
    Event,
    Graph,
    GraphPool,
    Mark,
    Memory,
    Pace,
    Stream,
    Wait,
    Work,
    fill_with_poison,
    late,
)

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
_LIKE_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default}
_UNINITIALIZED = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
_OF_UNKNOWN_SIZE = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}

_FORMS: dict[Any, Any] = {}  # (operation, forms of its tensors, the rest) -> forms of its results


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated device. To torch's own code, which may have no CUDA, it is one of "meta"."""

    memory: Memory
    data_there: torch.Tensor
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: Memory, data: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # torch gives views of other tensors a version
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
                device="meta",
            )  # fmt: skip
        made.memory, made.data_there = memory, data
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CudaError(f"{func} on a tensor of a simulated device that is no longer there")

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.users.add(stream)

    def data_ptr(self) -> int:
        return self.data_there.data_ptr()

    def numpy(self, **options: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()


@dataclass(frozen=True)
class Form:
    """Of a tensor: shape, strides, dtype."""

    given: tuple[torch.Size, tuple[int, ...], torch.dtype]


class SimulatedCuda(TorchDispatchMode):
    """What stands for the module torch.cuda, to be handed to CudaRuntime, and a context in which its tensors live.

    Args:
        pace: What runs when.

    Attributes:
        streams: All of them; the first is the current one unless another is entered.
        waits: What the host has waited for, in order.
        faults: What was done that CUDA leaves undefined.
        total_bytes, free_bytes: Of memory, as `mem_get_info` says.
    """

    total_bytes, free_bytes = 2**30, 2**29

    def __init__(self, pace: Pace = late) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.current = self.Stream()
        self.capturing: Graph | None = None
        self.waits: list[str] = []
        self.faults: list[str] = []
        self.num_emptied = 0
        self._pace = pace
        self._pools: list[GraphPool] = []
        self._pinned: dict[int, torch.Tensor] = {}  # by address, kept so that no other memory gets it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch need not import what compiles: two seconds."""
        return False

    def __enter__(self) -> SimulatedCuda:
        self._lazy_init = torch.cuda._lazy_init  # type: ignore[attr-defined]
        torch.cuda._lazy_init = lambda: None  # type: ignore[attr-defined]
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.cuda._lazy_init = self._lazy_init  # type: ignore[attr-defined]

    # The names of torch.cuda.

    def Stream(self, device: torch.device | None = None) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def Event(self) -> Event:
        return Event(self)

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def graph_pool_handle(self) -> GraphPool:
        self._pools.append(GraphPool())
        return self._pools[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current

    def synchronize(self, device: torch.device | None = None) -> None:
        self.note_wait("the device")
        for stream in reversed(self.streams):
            self._wait_for(stream)

    def empty_cache(self) -> None:
        self.num_emptied += 1
        for pool in self._pools:
            pool.is_known = pool.num_graphs > 0

    def mem_get_info(self, device: torch.device | None = None) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def is_current_stream_capturing(self) -> bool:
        return self.capturing is not None

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: GraphPool, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.synchronize()
        self.empty_cache()
        with self.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()

    # What launches and runs.

    def launch(self, kernel: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Queues `kernel`, which gets the memory of `tensors`."""
        data = [tensor.data_there if isinstance(tensor, DeviceTensor) else tensor for tensor in tensors]
        self.push(lambda: kernel(*data))

    def push(self, work: Work | Mark | Wait, stream: Stream | None = None) -> None:
        """Queues work on a stream, the current one by default."""
        stream = self.current if stream is None else stream
        if self.capturing is not None and stream is self.current:
            if callable(work):
                self.capturing.work.append(work)
            return
        stream.queue.append(work)
        self._pace(self)

    def note_wait(self, what: str) -> None:
        if self.capturing is not None:
            raise CudaError(f"operation not permitted when stream is capturing: to wait for {what}")
        self.waits.append(what)

    def run_to(self, mark: Mark) -> None:
        if not mark.is_reached:
            with _at_work():
                while not mark.is_reached:
                    self._run_next(mark.stream)

    def run_ready(self, stream: Stream, count: int = 2**31) -> None:
        """Runs at most `count` pieces of a stream's work, up to what another stream has to come to first."""
        if not stream.queue:
            return
        with _at_work():
            while stream.queue and count > 0:
                first = stream.queue[0]
                if isinstance(first, Wait) and not first.mark.is_reached:
                    return
                self._run_next(stream)
                count -= 1

    def _run_next(self, stream: Stream) -> None:
        first = stream.queue[0]
        if isinstance(first, Wait):
            self.run_to(first.mark)
        work = stream.queue.popleft()
        if isinstance(work, Mark):
            work.is_reached = True
            if work.then is not None:
                work.then()
        elif not isinstance(work, Wait):
            work()

    def give_back(self, memory: Memory) -> None:
        """Its next owner on its own stream may write to it, once other streams that use it have come to this call."""
        data = memory.data
        if memory.graph is not None:
            if memory.graph is self.capturing:
                memory.graph.work.append(lambda: fill_with_poison(data))
            return
        using = list(memory.users)

        def reuse() -> None:
            if using:
                user = using.pop()
                user.queue.append(Mark(user, then=reuse))
            else:
                memory.stream.queue.append(lambda: fill_with_poison(data))

        reuse()

    # The operations of torch.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func in (aten._pin_memory.default, aten.pin_memory.default):
            return self._pin(args[0].clone())
        device = kwargs.get("device")
        is_there = device is not None and device.type in ("cuda", "meta")
        given = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(one, DeviceTensor) for one in given) and not is_there:
            if not kwargs.get("pin_memory"):
                return func(*args, **kwargs)
            return self._pin(func(*args, **kwargs | {"pin_memory": False}))
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self._launch(func, args, kwargs, given)

    def _launch(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        for one in given:
            if not isinstance(one, DeviceTensor) and one.dim():
                raise CudaError(f"{func}: expected all tensors on {DEVICE}, one of {list(one.shape)} is on the host")
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        there_args, there_kwargs = _map(_find_there, (args, kwargs))
        if func.is_view or func in _LIKE_VIEWS:
            memory = next(one.memory for one in given if isinstance(one, DeviceTensor))
            return _map(lambda one: DeviceTensor(memory, one), func(*there_args, **there_kwargs))
        if func._schema.is_mutable:
            self.push(lambda: func(*there_args, **there_kwargs))
            return kwargs.get("out", args[0])
        if func is aten._local_scalar_dense.default or func in _OF_UNKNOWN_SIZE or _selects_by_mask(func, args):
            self._wait_for_work("a value")
            result = func(*there_args, **there_kwargs)
            return _map(self._move, result)
        result = _map(lambda form: self._allocate(*form.given), self._find_form(func, args, kwargs))
        if func not in _UNINITIALIZED:
            targets = [one.data_there for one in _leaves(result)]

            def run() -> None:
                for target, one in zip(targets, _leaves(func(*there_args, **there_kwargs)), strict=True):
                    target.copy_(one)

            self.push(run)
        return result

    def _copy(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A copy between the host and the device, or within it."""
        if func is aten.copy_.default:
            target, source, non_blocking = args[0], args[1], bool(args[2:3] and args[2]) or kwargs.get("non_blocking")
        else:
            source, non_blocking = args[0], kwargs.get("non_blocking")
            dtype, shape = kwargs.get("dtype") or source.dtype, source.shape
            device = kwargs.get("device") or source.device
            if device.type == "cuda":
                target = self._allocate(shape, None, dtype)
            else:
                target = torch.empty(shape, dtype=dtype)
                target = self._pin(target) if non_blocking else target  # as torch does
        there, here = _find_there(target), _find_there(source)
        host = next((one for one in (source, target) if not isinstance(one, DeviceTensor)), None)
        if host is None or (self._is_pinned(host) and non_blocking):
            self.push(lambda: there.copy_(here))
        elif host is source and (non_blocking or not host.dim()):  # memory that is not pinned is staged by the call
            self._refuse_in_capture()
            staged = here.clone()
            if host.dim():
                self.waits.append("memory that is not pinned")  # the driver may wait for the stream
            self.push(lambda: there.copy_(staged))
        else:
            self._refuse_in_capture()
            self.push(lambda: there.copy_(here))
            self._wait_for_work("a copy")
        return target

    def _refuse_in_capture(self) -> None:
        if self.capturing is not None:
            raise CudaError("operation not permitted when stream is capturing: to copy memory that is not pinned")

    def _wait_for_work(self, what: str) -> None:
        self.note_wait(what)
        self._wait_for(self.current)

    def _wait_for(self, stream: Stream) -> None:
        mark = Mark(stream)
        stream.queue.append(mark)
        self.run_to(mark)

    def _find_form(self, func: Any, args: Any, kwargs: Any) -> Any:
        """(shape, strides, dtype) of each result, found on torch's meta device."""
        leaves = _leaves((args, kwargs))
        key = func, tuple(
            (one.shape, one.stride(), one.dtype) if isinstance(one, torch.Tensor) else (type(one), repr(one))
            for one in leaves
        )  # fmt: skip
        if key not in _FORMS:
            meta = torch.device("meta")
            own_args, own_kwargs = _map(
                lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=meta)
                if isinstance(one, torch.Tensor) else meta if isinstance(one, torch.device) else one,
                (args, kwargs),
            )  # fmt: skip
            result = func(*own_args, **own_kwargs)
            _FORMS[key] = _map(lambda one: Form((one.shape, one.stride(), one.dtype)), result)
        return _FORMS[key]

    def _allocate(self, shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype) -> DeviceTensor:
        data = torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
        return DeviceTensor(Memory(self, data), data)

    def _move(self, one: Any) -> Any:
        """A result that the device has computed already."""
        if not isinstance(one, torch.Tensor):
            return one
        made = self._allocate(one.shape, one.stride(), one.dtype)
        made.data_there.copy_(one)
        return made

    def _pin(self, host: torch.Tensor) -> torch.Tensor:
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def _is_pinned(self, host: torch.Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned


@contextmanager
def _at_work() -> Iterator[None]:
    """In what is launched torch acts on the host's memory as ever."""
    with _disable_current_modes(), torch.inference_mode():
        yield


def _find_there(one: Any) -> Any:
    """The memory of a tensor of the device; of a number that is on the host its value now."""
    if isinstance(one, DeviceTensor):
        return one.data_there
    return one.clone() if isinstance(one, torch.Tensor) and not one.dim() else one


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _selects_by_mask(func: Any, args: Any) -> bool:
    return func in (aten.index.Tensor, aten.index_put_.default) and any(
        one is not None and one.dtype is torch.bool for one in args[1]
    )


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same lists, tuples and dicts, with what is in them changed."""
    if isinstance(tree, dict):
        return {key: _map(change, one) for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        changed = [_map(change, one) for one in tree]
        return changed if isinstance(tree, list) else tuple(changed)
    return change(tree)


def _leaves(tree: Any) -> list[Any]:
    """What is in lists, tuples and dicts."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for one in tree for leaf in _leaves(one)]
    return [tree]
