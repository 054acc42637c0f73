"""What a host asks of a device: to send it arrays, to read its tensors, to record and replay its launches, to wait.

There are two ways to do it. A CPU is its own device: numpy and torch share its memory, and what was launched has run
when the call returns. A GPU runs behind the host, which waits for it nowhere but where it reads. `choose_runtime` is
the one place where a device decides between them; the choice is handed down from there.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ranges import NVTX, Ranges

Replay = Callable[[], torch.Tensor]  # runs what was recorded; always writes to, and returns, the same tensor
StepT = TypeVar("StepT")
"""What a replay in pieces is given: the step that it is of."""
Between = Callable[[Callable[[StepT], object]], None]
"""Runs a call between two pieces, which no piece records: each replay makes it anew, with its own step."""


class Recorder(Protocol):
    """Records launches, to be replayed."""

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Records `run`, which touches fixed tensors alone and has the same effect each time."""
        ...

    def record_pieces(
        self, run: Callable[[Between[StepT]], torch.Tensor], step: StepT
    ) -> Callable[[StepT], torch.Tensor]:
        """Records `run` in pieces, for what happens between them depends on the step.

        Args:
            run: Touches fixed tensors alone but in the calls that it hands to its argument.
            step: Of the runs ahead of the recording.

        Returns:
            A replay: all pieces, and each call where it was made, with the replay's step.
        """
        ...


class Runtime(Protocol):
    """A way to work with a device.

    Attributes:
        device: The device.
        is_host: It is the host itself: its tensors are numpy's arrays, and a launch has run when its call returns.
    """

    device: torch.device

    @property
    def is_host(self) -> bool: ...

    def send(self, array: NDArray[np.generic]) -> torch.Tensor:
        """`array` as a tensor on the device, whose memory it may be. The call does not wait."""
        ...

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in the host's memory that the device copies from and to by itself."""
        ...

    def start_reading(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Starts to copy `tensors`, as they are after all launches so far, to the host.

        Neither the copies nor launches after this call wait for each other. The result waits for the copies and returns
        them, in the same order.
        """
        ...

    def make_recorder(self, ranges: Ranges = NVTX) -> Recorder:
        """A recorder for launches in which `ranges` are entered."""
        ...

    def synchronize(self) -> None:
        """Waits until all that was launched has run."""
        ...

    def release_memory(self) -> None:
        """Gives memory back that was freed and kept for later allocations."""
        ...

    def measure_memory(self) -> tuple[int, int]:
        """(bytes of the device's memory, bytes in use)."""
        ...


class EagerRecorder:
    """Records nothing: a replay runs the launches again."""

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        return run

    def record_pieces(
        self, run: Callable[[Between[StepT]], torch.Tensor], step: StepT
    ) -> Callable[[StepT], torch.Tensor]:
        _run_whole(run, step)  # what cannot be recorded in pieces says so now, as it would on a GPU
        return functools.partial(_run_whole, run)


def _run_whole(run: Callable[[Between[StepT]], torch.Tensor], step: StepT) -> torch.Tensor:
    def call_now(call: Callable[[StepT], object]) -> None:
        call(step)

    return run(call_now)


class HostRuntime:
    """The way of a CPU, which copies nothing and waits for nothing.

    Args:
        device: A CPU; None is torch's.
    """

    is_host = True

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = torch.device("cpu") if device is None else device

    def send(self, array: NDArray[np.generic]) -> torch.Tensor:
        """A tensor that shares the array's memory."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def start_reading(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: list(tensors)

    def make_recorder(self, ranges: Ranges = NVTX) -> Recorder:
        return EagerRecorder()

    def synchronize(self) -> None:
        pass

    def release_memory(self) -> None:
        pass

    def measure_memory(self) -> tuple[int, int]:
        """None count as in use, because the operating system would give most of them back."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0


class CudaRuntime:
    """The way of a GPU: pinned memory, a stream for what is read, and CUDA graphs.

    Args:
        device: A CUDA device.
        cuda: The module torch.cuda, or what behaves as it does.
    """

    is_host = False

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda

    def send(self, array: NDArray[np.generic]) -> torch.Tensor:
        """A copy through pinned memory, for which the call need not wait."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned, so that the device reads and writes it without the CPU."""
        return torch.zeros(shape, dtype=dtype, pin_memory=math.prod(shape) > 0)

    def start_reading(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Copies run on a stream of their own into pinned memory."""
        stream = self._reading
        stream.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(stream):
            copies = [self._copy_pinned(tensor) for tensor in tensors]
            done = self._cuda.Event()
            done.record(stream)

        def wait() -> list[torch.Tensor]:
            done.synchronize()
            return copies

        return wait

    def make_recorder(self, ranges: Ranges = NVTX) -> Recorder:
        return CudaRecorder(self.device, ranges, self._cuda)

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    def release_memory(self) -> None:
        self._cuda.empty_cache()

    def measure_memory(self) -> tuple[int, int]:
        """All memory in use counts, whoever uses it."""
        free, total = self._cuda.mem_get_info(self.device)
        return total, total - free

    @functools.cached_property
    def _reading(self) -> Any:
        return self._cuda.Stream(self.device)

    def _copy_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(self._reading)  # the allocator reuses its memory only after the copy
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)


class CudaRecorder:
    """Records CUDA graphs in one memory pool, which they can share because they never run at the same time.

    Args:
        device: Where the launches run.
        ranges: Name them.
        cuda: As of CudaRuntime.
    """

    _NUM_WARM_UPS = 2  # the first compiles, tunes and allocates; the second runs as later steps do

    def __init__(self, device: torch.device, ranges: Ranges, cuda: Any) -> None:
        self._device = device
        self._ranges = ranges
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        self._warm_up(run)
        graph, captured = self._cuda.CUDAGraph(), self._ranges.captured()
        # "thread_local": launches of other threads do not enter the graph.
        with (
            self._cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            captured.capture(),
        ):
            output = run()

        def replay() -> torch.Tensor:
            with captured.replay():
                graph.replay()
            return output

        return replay

    def record_pieces(
        self, run: Callable[[Between[StepT]], torch.Tensor], step: StepT
    ) -> Callable[[StepT], torch.Tensor]:
        self._warm_up(lambda: _run_whole(run, step))
        captured = self._ranges.captured()
        graphs: list[Any] = []
        calls: list[Callable[[StepT], object]] = []
        # As the context does that `record` enters, but once for all pieces. A pool whose graphs are all gone can be
        # captured into only after its memory was given back.
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        with self._cuda.stream(self._stream), captured.capture(), contextlib.ExitStack() as capture:

            def begin() -> None:
                graph = self._cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                capture.callback(graph.capture_end)
                graphs.append(graph)

            def end_and_begin(call: Callable[[StepT], object]) -> None:
                capture.close()
                calls.append(call)
                begin()

            begin()
            output = run(end_and_begin)

        def replay(step: StepT) -> torch.Tensor:
            with captured.replay():
                for graph, call in zip(graphs, calls, strict=False):
                    graph.replay()
                    call(step)
                graphs[-1].replay()
            return output

        return replay

    def _warm_up(self, run: Callable[[], torch.Tensor]) -> None:
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with self._cuda.stream(self._stream):
                for _ in range(self._NUM_WARM_UPS):
                    run()
        finally:  # what was launched before memory ran out writes to the caches too
            current.wait_stream(self._stream)


def choose_runtime(device: torch.device) -> Runtime:
    """The way to work with `device`: a GPU's for CUDA, else a CPU's."""
    return CudaRuntime(device) if device.type == "cuda" else HostRuntime(device)
