"""Compiles what a launcher would launch, for an architecture that is not there. No GPU, no driver.

A process compiles for one target: Triton's JIT caches by device index and would hand back the first target's binary
for the second. So `compile_variants` starts a process, which runs this module's `main` and prints JSON lines, and
`compile_for` starts one for each architecture, as many at a time as there are cores.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tkernels.verification.inspection.rows import CompiledKernel

DESCRIPTION = "Compile a variant's kernels for an architecture that is not there; one JSON line per kernel."

KERNEL_SECONDS = 300.0
"""For the kernels of one variant at one point, which take a few: a block of 65536 on one warp took over 840."""


class CompilationError(RuntimeError):
    """The compiling process failed as a whole; a kernel that does not compile is a row with its reason instead."""


def _nothing(row: CompiledKernel) -> None:
    pass


def compile_variants(
    arch: str,
    names: Sequence[str],
    axes: Mapping[str, Any] | None = None,
    variants_from: Sequence[Path] = (),
    points: Sequence[str] = ("engine",),
    dump: Path | None = None,
    on_row: Callable[[CompiledKernel], None] = _nothing,
) -> list[CompiledKernel]:
    """Compiles variants, given as "op.variant" (none given: every Triton variant), in a process of its own.

    Args:
        axes: axes to hold, instead of a benchmark point's. points: of
            `tkernels.verification.inspection.points.POINTS`, or a
            contract's own.
        dump: a folder for the texts. on_row: called with each row as it arrives.

    Raises:
        CompilationError: the process failed; its last words are in the message.
    """
    command = [sys.executable, "-m", "tkernels.verification.ahead_of_time", "--arch", arch, *names]
    command += [part for name, value in (axes or {}).items() for part in ("--axis", f"{name}={value}")]
    command += [part for folder in variants_from for part in ("--variants-from", str(folder))]
    command += [part for name in points for part in ("--point", name)]
    command += ["--dump", str(dump)] if dump is not None else []
    # Always compiled: from Triton's cache, times would be of reading files and lines those of another checkout.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"}
    rows = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process, ThreadPoolExecutor(1) as pool:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        complaints = pool.submit(process.stderr.read)
        patience = _ended_after(process)
        for line in process.stdout:
            patience.cancel()
            rows.append(CompiledKernel.parse(line))
            on_row(rows[-1])
            patience = _ended_after(process)
        patience.cancel()
        said = complaints.result().strip()
    if process.returncode == -signal.SIGKILL:
        last = f"after {rows[-1].op}.{rows[-1].variant}" if rows else "from the first kernel on"
        raise CompilationError(
            f"compiling for {arch} was ended: nothing was finished in {KERNEL_SECONDS:.0f} s, {last}; "
            "is a block of a config far too large?"
        )
    if process.returncode:
        said = said.rpartition(" error: ")[2] if said.startswith("usage: ") else said[-2000:]
        raise CompilationError(f"compiling for {arch} failed: {said}")
    return rows


def _ended_after(process: subprocess.Popen[str]) -> threading.Timer:
    timer = threading.Timer(KERNEL_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def compile_for(archs: Sequence[str], names: Sequence[str], **options: Any) -> list[CompiledKernel]:
    """`compile_variants` for each architecture, as many processes at a time as there are cores; rows in their order."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(lambda arch: compile_variants(arch, names, **options), archs)
        return [row for part in parts for row in part]


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


def main() -> None:
    """Runs in a process of its own: `TRITON_INTERPRET=0 python -m tkernels.verification.ahead_of_time --arch sm_90`."""
    import json

    from tkernels import OPS
    from tkernels.contract import parse_axes
    from tkernels.device import TARGETS
    from tkernels.mode import MODE

    parser = argparse.ArgumentParser(prog="python -m tkernels.verification.ahead_of_time", description=DESCRIPTION)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--point", action="append", default=[], help="engine (the default), fp8, unaligned or one of the contract's"
    )
    parser.add_argument("--dump", type=Path, metavar="FOLDER")
    parser.add_argument("--variants-from", action="append", default=[], type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="op.variant", help="default: every Triton variant")
    arguments = parser.parse_args()
    if MODE != "compile":
        parser.error("this process interprets; start it with TRITON_INTERPRET=0")
    if arguments.arch not in TARGETS:
        parser.error(f"unknown architecture {arguments.arch!r}: there is {', '.join(TARGETS)}")
    from tkernels.verification.inspection.compile import compile_point

    ops = OPS
    for folder in arguments.variants_from:
        ops = ops.with_variants_from(folder)
    try:
        activate(arguments.arch)
    except RuntimeError as error:
        parser.error(str(error))
    held = parse_axes(",".join(arguments.axis))
    names = arguments.names or [
        f"{op.name}.{v.name}" for op in ops.values() for v in op.variants.values() if v.kind == "triton"
    ]
    for name in names:
        op_name, _, variant_name = name.partition(".")
        variant = ops[op_name].variants[variant_name]
        for point in arguments.point or ["engine"]:
            for row in compile_point(variant, arguments.arch, point, held, dump=arguments.dump):
                print(json.dumps(row.as_json()), flush=True)


if __name__ == "__main__":
    main()
