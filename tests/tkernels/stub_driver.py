"""Triton's driver without a GPU: kernels are compiled for an architecture, and what would be launched is noted.

Below it everything of Triton's is real: how arguments are specialized, what is compiled again, the hooks of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tkernels.config import Config
from tkernels.launch import launch_options


@dataclass
class Started:
    """A launch as the driver gets it: addresses for tensors, no compile-time constants, None among those."""

    function: str
    stream: int
    grid: tuple[int, int, int]
    named: dict[str, Any]
    metadata: Any
    hooks: tuple[Any, Any]

    @property
    def arguments(self) -> list[Any]:
        return list(self.named.values())


def as_the_driver_sees_it(value: Any) -> Any:
    if hasattr(value, "block_shape"):
        return "box", value.base.data_ptr(), tuple(value.shape), tuple(value.strides), value.block_shape
    return value.data_ptr() if hasattr(value, "data_ptr") else value


@dataclass
class StubDriver:
    """What Triton asks of a driver. device, stream: the current ones. started: what was launched; None notes nothing,
    for who measures.
    """

    target: GPUTarget
    device: int = 0
    stream: int = 0
    started: list[Started] | None = field(default_factory=list)

    @property
    def utils(self) -> StubDriver:
        return self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return f"module of {name}", f"{name} on {device}", 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        if self.started is None:
            return _nothing
        kinds = dict(source.signature)

        def launch(x: int, y: int, z: int, stream: int, function: str, packed: Any, *more: Any) -> None:
            given_metadata, enter, leave, *arguments = more
            assert len(arguments) == len(kinds), "every parameter, constants among them"
            if enter is not None:
                enter(given_metadata)
            given = zip(kinds.items(), arguments, strict=True)
            seen = {name: as_the_driver_sees_it(one) for (name, kind), one in given if kind != "constexpr"}
            assert self.started is not None
            self.started.append(Started(function, stream, (x, y, z), seen, given_metadata, (enter, leave)))
            if leave is not None:
                leave(given_metadata)

        return launch


def _nothing(*arguments: Any) -> None:
    pass


@contextmanager
def stub_driver(arch: int = 90, *, measuring: bool = False) -> Iterator[StubDriver]:
    """The active driver is a stub for an architecture of NVIDIA's. measuring: a launch is no work at all."""
    before, stub = driver._active, StubDriver(GPUTarget("cuda", arch, 32), started=None if measuring else [])
    driver.set_active(stub)
    try:
        yield stub
    finally:
        driver._active = before


class _Compiled(CompiledKernel):  # type: ignore[misc]
    """In the place of a compiled kernel: nothing is compiled."""

    def __init__(self, source: Any) -> None:
        self.src, self.name = source, source.fn.__name__
        self.module, self.packed_metadata, self.metadata = "module", ("packed",), None
        self.function = f"{self.name} on {driver.active.get_current_device()}"
        self._run = driver.active.launcher_cls(source, None)


@cache
def jit_function(kernel: Any) -> JITFunction[Any]:
    """What a kernel of this process, which interprets, is in one that compiles."""
    return JITFunction(kernel.fn, **kernel.kwargs)


@contextmanager
def compiling() -> Iterator[StubDriver]:
    """Kernels are launched as in a process that compiles, by Triton's own JIT, onto a stub and without a compiler."""

    def launch(kernel: Any, grid: tuple[int, ...], arguments: Any, config: Config) -> Any:
        return jit_function(kernel)[grid](**arguments, **launch_options(config))

    with (
        stub_driver() as stub,
        mock.patch("tkernels.launch.MODE", "compile"),
        mock.patch("tkernels.launch._jit_launch", launch),
        mock.patch("triton.compiler.compile", lambda source, target, options: _Compiled(source)),
    ):
        jit_function.cache_clear()
        yield stub
