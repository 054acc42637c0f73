"""Compiles what a launcher would launch, for an architecture that is not there. No GPU, no driver.

A process compiles for one target: Triton's JIT caches by device index and would hand back the first target's binary
for the second. So every variant is compiled for every architecture in a process of its own, as many at a time as there
are cores: see `tkernels.isolation`. What ends such a process, a compiler that crashes or does not end, is a row.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tkernels.device import TARGETS
from tkernels.errors import TKernelsError
from tkernels.isolation import Prepare, Server, ServerError, Tell, Work
from tkernels.registry import Registry, builtin_ops, registry_of
from tkernels.verification.inspection.rows import CompiledKernel

KERNEL_SECONDS = 300.0
"""For the kernels of one variant at one point, which take a few: a block of 65536 on one warp took over 840."""


class CompilationError(TKernelsError, RuntimeError):
    """Nothing can be compiled here; a kernel that does not compile is a row with its reason instead."""


OnWhole = Callable[[str, str, Sequence[CompiledKernel]], None]


def compile_for(
    archs: Sequence[str],
    names: Sequence[str],
    axes: Mapping[str, Any] | None = None,
    ops: Registry | None = None,
    points: Sequence[str] = ("engine",),
    dump: Path | None = None,
    on_whole: OnWhole = lambda arch, name, rows: None,
) -> list[CompiledKernel]:
    """Compiles variants, given as "op.variant" (none given: every Triton variant), for each architecture.

    Args:
        axes: Axes to hold, instead of a benchmark point's.
        ops: What the variants are of; None is the built-in ones.
        points: Of `tkernels.verification.inspection.points.POINTS`, or a contract's own.
        dump: A folder for the texts.
        on_whole: Called with an architecture, a variant and all of its rows for it, when they are there. A signal that
            raises ends the processes at once.

    Returns:
        A row for each kernel at each point, by architecture and then variant in the order given.

    Raises:
        CompilationError: An unknown architecture, a tool that is missing, or a process that does not start.
    """
    if unknown := set(archs) - TARGETS.keys():
        raise CompilationError(f"unknown architecture {min(unknown)!r}: there is {', '.join(TARGETS)}")
    ops = ops if ops is not None else builtin_ops()
    about = {"outside": ops.outside(), "axes": dict(axes or {}), "dump": dump and str(dump), "seconds": KERNEL_SECONDS}
    asked = list(product(archs, names or _triton_variants(ops)))
    count = min(os.cpu_count() or 1, len(asked))
    # The servers end first: a thread that waits for one is then free.
    with ThreadPoolExecutor(count) as threads, _servers(count, about) as servers:
        free: SimpleQueue[Server] = SimpleQueue()
        for server in servers:
            free.put(server)

        def compile_one(pair: tuple[str, str]) -> list[CompiledKernel]:
            server = free.get()
            try:
                rows = _compile(server, *pair, points)
            finally:
                free.put(server)
            on_whole(*pair, rows)
            return rows

        return [row for rows in threads.map(compile_one, asked) for row in rows]


def _triton_variants(ops: Registry) -> list[str]:
    return [f"{op.name}.{v.name}" for op in ops.values() for v in op.variants.values() if v.kind == "triton"]


@contextmanager
def _servers(count: int, about: Mapping[str, Any]) -> Iterator[list[Server]]:
    # Always compiled: from Triton's cache, times would be of reading files and lines those of another checkout.
    servers = [Server({"TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"}) for _ in range(count)]
    try:
        for server in servers:
            server.load("tkernels.verification.ahead_of_time:prepare_compilations", about)
        yield servers
    finally:
        for server in servers:
            server.end()


def _compile(server: Server, arch: str, name: str, points: Sequence[str]) -> list[CompiledKernel]:
    """A variant's rows for one architecture. The points after one that ends the process are for another process."""
    rows: list[CompiledKernel] = []
    left = list(points)
    while left:
        begun: list[str] = []

        def hear(message: Mapping[str, Any], begun: list[str] = begun) -> None:
            if "refused" in message:
                raise CompilationError(f"compiling for {arch} failed: {message['refused']}")
            if "point" in message:
                begun.append(message["point"])
            else:
                rows.append(CompiledKernel.of(message["row"]))

        try:
            ending = server.run({"arch": arch, "name": name, "points": left}, hear)
        except ServerError as error:
            raise CompilationError(
                f"compiling for {arch} failed: the process that compilers are forked from {error}"
            ) from None
        if ending.death is None:
            break
        hint = "; is a block of its config far too large?" if ending.timed_out else ""
        at = begun[-1] if begun else left[0]
        op, _, variant = name.partition(".")
        reason = f"{ending.death}{hint}"
        rows.append(CompiledKernel(op, variant, "", arch, {}, "failed", point=at, reason=reason))
        left = left[left.index(at) + 1 :]
    return rows


def prepare_compilations(about: Mapping[str, Any]) -> Prepare:
    """In a server that compiles: each task is a variant, an architecture and points."""
    from tkernels.verification.inspection.compile import compile_point

    ops = registry_of(about["outside"])
    dump = Path(about["dump"]) if about["dump"] is not None else None

    def prepare(task: Mapping[str, Any]) -> Work:
        op, _, variant = task["name"].partition(".")

        def work(tell: Tell) -> None:
            try:
                activate(task["arch"])
            except RuntimeError as error:
                tell({"refused": str(error)})
                return
            for point in task["points"]:
                tell({"point": point})
                tell.within(about["seconds"])
                for row in compile_point(ops[op].variants[variant], task["arch"], point, about["axes"], dump=dump):
                    tell({"row": row.as_json()})

        return work

    return prepare


class _AbsentDriver:
    """Stands in for the driver: all that Triton's compiler asks of one."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def activate(arch: str) -> None:
    """Makes this process compile for `arch`; a RuntimeError names a tool that is missing."""
    from triton import knobs
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tkernels.verification.inspection.compile import nvdisasm

    if arch.startswith("gfx"):
        if "amd" not in backends:
            raise RuntimeError("this Triton has no AMD backend")
        driver.set_active(_AbsentDriver(GPUTarget("hip", arch, 64)))
        return
    number = int(arch[3:])
    tools = (knobs.nvidia.ptxas_blackwell if number >= 100 else knobs.nvidia.ptxas).path, nvdisasm()
    for tool in tools:
        if not Path(tool).is_file():
            raise RuntimeError(f"{tool} is missing, and inspection needs it")
    knobs.nvidia.dump_ptxas_log = True  # registers and spills
    driver.set_active(_AbsentDriver(GPUTarget("cuda", number, 32)))
