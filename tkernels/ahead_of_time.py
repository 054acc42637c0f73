"""Compiles what a launcher would launch, for an architecture that is not there. No GPU, no driver.

A process compiles for one target: Triton's JIT caches by device index and would hand back the first target's binary
for the second. So `compile_variants` starts a process per architecture, which runs this module's `main` and prints
JSON lines.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

DESCRIPTION = "Compile a variant's kernels for an architecture that is not there; one JSON line per kernel."


class CompilationError(RuntimeError):
    """The compiling process failed as a whole; a kernel that does not compile is a row with its reason instead."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel as compiled. `code` is a hash of the binary's instructions, whatever the kernel's name.

    status: ok, unsupported (the variant says so) or failed (the compiler says so), each with its reason.
    """

    op: str
    variant: str
    kernel: str
    arch: str
    config: Mapping[str, int]
    status: str
    reason: str = ""
    grid: tuple[int, ...] = ()
    shared_bytes: int | None = None
    code: str = ""


def compile_variants(
    arch: str, names: Sequence[str], axes: Mapping[str, Any] | None = None, variants_from: Sequence[Path] = ()
) -> list[CompiledKernel]:
    """Compiles variants, given as "op.variant", at their contracts' first drawn axes unless `axes` fixes some.

    Raises:
        CompilationError: the process failed; its last words are in the message.
    """
    command = [sys.executable, "-m", "tkernels.ahead_of_time", "--arch", arch, *names]
    command += [part for name, value in (axes or {}).items() for part in ("--axis", f"{name}={value}")]
    command += [part for folder in variants_from for part in ("--variants-from", str(folder))]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise CompilationError(f"compiling for {arch} failed: {done.stderr.strip()[-2000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [CompiledKernel(**{**row, "grid": tuple(row["grid"])}) for row in rows]


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


def _activate(arch: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
    driver.set_active(_AbsentDriver(target))


def _code_hash(binary: Any, arch: str) -> str:
    """The PTX (or amdgcn) body without the kernel's name, file names, line numbers and debug sections."""
    text = binary.asm["amdgcn" if arch.startswith("gfx") else "ptx"].split(".section")[0]
    lines = [line.replace(binary.metadata.name, "kernel").split("//")[0].rstrip() for line in text.splitlines()]
    kept = [line for line in lines if not line.lstrip().startswith((".loc", ".file"))]
    return sha256("\n".join(kept).encode()).hexdigest()[:16]


def _compile(variant: Any, arch: str, fixed: Mapping[str, Any]) -> list[CompiledKernel]:
    import torch

    from tkernels.device import TARGETS
    from tkernels.inputs import map_tensors
    from tkernels.launch import Kernel
    from tkernels.tuning import NEAREST

    contract, facts = variant.contract, TARGETS[arch]
    mine = {name: value for name, value in fixed.items() if name in contract.axis_by_name}
    axes = contract.draw_axes(lambda name, candidates: candidates[-1], {**_realistic(contract), **mine})
    case = contract.case(axes, seed=0)
    meta = torch.device("meta")

    def to_meta(tensor: Any) -> Any:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta)

    arguments = map_tensors(contract.bind_arguments((), case.inputs), to_meta)
    bound, _ = contract.bind_axes(arguments)
    config = variant.default_config(arch)
    name = f"{contract.name}.{variant.name}"
    if reason := variant.unsupported_reason(bound, meta, facts):
        return [CompiledKernel(contract.name, variant.name, "", arch, config.as_dict(), "unsupported", reason)]
    rows: list[CompiledKernel] = []

    def compiling_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Any) -> None:
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        row: dict[str, Any] = {"kernel": kernel.__name__, "arch": arch, "config": config.as_dict(), "grid": grid}
        row |= {"op": contract.name, "variant": variant.name}
        try:
            binary = kernel.warmup(grid=grid, **arguments, **options)
        except Exception as error:  # whatever the compiler raises is the row's reason
            rows.append(CompiledKernel(**row, status="failed", reason=f"{type(error).__name__}: {error}"))
            return
        rows.append(
            CompiledKernel(**row, status="ok", shared_bytes=binary.metadata.shared, code=_code_hash(binary, arch))
        )

    outputs = contract.allocate_outputs(bound, arguments, meta)
    Kernel(variant, NEAREST, {}, compiling_door).launch_into(outputs, arguments, bound, meta, facts, config)
    if not rows:
        raise CompilationError(f"{name} launched nothing at {axes}")
    return rows


def _realistic(contract: Any) -> dict[str, Any]:
    """16-bit dtypes, a contiguous layout and ordinary values, where the contract has such axes."""
    wanted = {"activation": "bfloat16", "layout": "contiguous", "values": "ordinary"}
    return {name: value for name, value in wanted.items() if name in contract.axis_by_name}


def main() -> None:
    """Runs in a process of its own: `TRITON_INTERPRET=0 python -m tkernels.ahead_of_time --arch sm_90`."""
    parser = argparse.ArgumentParser(prog="python -m tkernels.ahead_of_time", description=DESCRIPTION)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--variants-from", action="append", default=[], type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="op.variant", help="default: every Triton variant")
    arguments = parser.parse_args()

    from tkernels import OPS
    from tkernels.contract import parse_axes
    from tkernels.device import TARGETS
    from tkernels.mode import MODE

    if MODE != "compile":
        parser.error("this process interprets; start it with TRITON_INTERPRET=0")
    if arguments.arch not in TARGETS:
        parser.error(f"unknown architecture {arguments.arch!r}: there is {', '.join(TARGETS)}")
    ops = OPS
    for folder in arguments.variants_from:
        ops = ops.with_variants_from(folder)
    _activate(arguments.arch)
    names = arguments.names or [
        f"{op.name}.{v.name}" for op in ops.values() for v in op.variants.values() if v.kind == "triton"
    ]
    for name in names:
        op_name, _, variant_name = name.partition(".")
        variant = ops[op_name].variants[variant_name]
        for row in _compile(variant, arguments.arch, parse_axes(",".join(arguments.axis))):
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
