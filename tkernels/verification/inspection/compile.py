"""Compiles what a launcher launches for the architecture that the driver stands for, and reads what came out.

Runs in a process that compiles for one target (see `ahead_of_time`).
"""

import contextlib
import io
import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Axes
from tkernels.device import TARGETS, DeviceFacts
from tkernels.launch import Kernel, launch_options
from tkernels.source_hash import source_hash
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.dry_run import refusing_host_access
from tkernels.verification.inspection import amdgcn, sass
from tkernels.verification.inspection.accesses import Code, access_shares, elements_by_line, narrow_accesses
from tkernels.verification.inspection.occupancy import LIMITS, occupancy, resident_blocks
from tkernels.verification.inspection.points import OPTION_POINTS, Point, UnalignedPointer, point
from tkernels.verification.inspection.precision import lowered_precision
from tkernels.verification.inspection.rounding import other_roundings
from tkernels.verification.inspection.rows import CompiledKernel

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")


def compile_point(
    variant: Variant,
    arch: str,
    name: str,
    held: Axes | None = None,
    config: Config | None = None,
    dump: Path | None = None,
) -> list[CompiledKernel]:
    """A row for each launch of a variant at a point; none where its contract or its configs have no such point.

    Args:
        held: Axes to hold, of those that the contract has.
        config: Instead of the architecture's default, or of what the point's option chooses.
        dump: A folder for the texts of every kernel: <op>.<variant>.<point>.<launch>.<arch>.{ttir,ptx,sass,amdgcn}.
    """
    facts, contract = TARGETS[arch], variant.contract
    mine = {axis: value for axis, value in (held or {}).items() if axis in contract.axis_by_name}
    here = point(variant, name, facts, mine)
    if here is None:
        return []
    default = variant.default_config(arch)
    if config is None and (option := OPTION_POINTS.get(name)):
        config = next((one for one in variant.configs or () if one.options[option] and not one.unmet_on(arch)), None)
        if config is None:
            return []
    used = config if config is not None else default  # one without constants is false
    source = source_hash(variant.kernels) if variant.kernels else ""  # `auto` launches other variants' kernels
    row = CompiledKernel(
        contract.name, variant.name, "", arch, used.as_dict(), "unsupported", used == default,
        "axes" if mine else name, here.reason or "", dict(here.drawn), source=source,
        work=contract.work,
    )  # fmt: skip
    if here.reason:
        return [row]
    rows = _launches(variant, here, facts, used, row, dump)
    return rows or [replace(row, status="failed", reason="nothing was launched")]


def _launches(
    variant: Variant, here: Point, facts: DeviceFacts, config: Config, row: CompiledKernel, dump: Path | None
) -> list[CompiledKernel]:
    contract, meta = variant.contract, torch.device("meta")
    rows: list[CompiledKernel] = []
    buffers = variant.workspace(here.axes, config, facts).values()
    row = replace(row, workspace_bytes=sum(math.prod(one.shape) * one.dtype.itemsize for one in buffers))

    def compiling_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        if here.name == "unaligned":
            arguments = {
                key: UnalignedPointer(value.dtype) if isinstance(value, torch.Tensor) else value
                for key, value in arguments.items()
            }
        mine = replace(row, kernel=kernel.__name__, launch=len(rows), grid=tuple(int(size) for size in grid))
        log = io.StringIO()
        kernel.device_caches.clear()  # launched by another variant too, it compiles again, and is timed
        begun = time.perf_counter()
        try:
            with contextlib.redirect_stdout(log):  # ptxas' figures: activate asks Triton to print them
                binary = kernel.warmup(grid=grid, **arguments, **launch_options(config))
        except Exception as error:  # whatever the compiler raises is the row's reason
            rows.append(replace(mine, status="failed", reason=f"{type(error).__name__}: {error}"))
            return
        mine = replace(mine, compile_s=round(time.perf_counter() - begun, 3))
        rows.append(_read(mine, binary, log.getvalue(), facts, dump, contract.is_exact))

    outputs = contract.allocate_outputs(here.axes, here.arguments, meta)
    door = Kernel(variant, NEAREST, {}, compiling_door)
    try:
        with refusing_host_access(contract, here.arguments):
            door.launch_into(outputs, here.arguments, here.axes, meta, facts, config)
    except Exception as error:  # a launcher that does not take these arguments
        rows.append(replace(row, status="failed", reason=f"launcher: {type(error).__name__}: {error}"))
    return rows


def _read(
    row: CompiledKernel, binary: Any, log: str, facts: DeviceFacts, dump: Path | None, is_exact: bool
) -> CompiledKernel:
    """The row with everything that the binary says."""
    texts = {"ttir": str(binary.asm["ttir"])}
    metadata, limits = binary.metadata, LIMITS[facts.arch]
    if facts.arch.startswith("gfx"):
        texts["amdgcn"] = str(binary.asm["amdgcn"])
        numbers = amdgcn.metadata(texts["amdgcn"])
        registers, spills = numbers["vgpr_count"], numbers["private_segment_fixed_size"]
        code = amdgcn.parse(texts["amdgcn"])
    else:
        texts["ptx"] = str(binary.asm["ptx"])
        registers = max(int(count) for count in _REGISTERS.findall(log))
        spills = max(int(count) for count in _SPILLS.findall(log))
        texts["sass"] = sass.disassemble(nvdisasm(), binary.asm["cubin"])
        code = sass.parse(texts["sass"])
    if dump is not None:
        stem = f"{row.op}.{row.variant}.{row.point}.{row.launch}.{row.arch}"
        for kind, text in texts.items():
            (dump / f"{stem}.{kind}").write_text(text)
    columns = int(getattr(metadata, "tmem_size", 0) or 0)
    blocks = resident_blocks(limits, metadata.num_warps, registers, metadata.shared, columns)
    row = replace(
        row,
        status="ok",
        registers=registers,
        spill_bytes=spills,
        shared_bytes=metadata.shared,
        occupancy=round(occupancy(limits, metadata.num_warps, blocks), 4),
        code=_code_hash(texts.get("ptx") or texts["amdgcn"], metadata.name),
        lowered=lowered_precision(texts["ttir"], texts.get("ptx", "")),
        rounded=other_roundings(texts["ttir"]) if is_exact else (),
        **_of_code(code, texts["ttir"]),
    )
    if blocks == 0:
        return replace(row, status="failed", reason=f"a block does not fit: {_too_much(row, limits.shared_of_block)}")
    return replace(row, waves=round(math.prod(row.grid) / (blocks * facts.multiprocessors), 2))


def _too_much(row: CompiledKernel, shared: int) -> str:
    if (row.shared_bytes or 0) > shared:
        return f"{row.shared_bytes} bytes of shared memory, {shared} is the most"
    return f"{row.registers} registers a thread, {row.config['num_warps']} warps"


def _of_code(code: Code, ttir: str) -> dict[str, Any]:
    loop = code.main_loop()
    where = loop or code.instructions
    return {
        "loop": bool(loop),
        "loop_instructions": max(map(len, code.main_loops()), default=None),
        "matrix_instructions": code.matrix_instructions,
        "access_bytes": access_shares(where),
        "bulk_copies": sum(one.bulk for one in where),
        "early_launch": sass.early_launch(code),
        "narrow": narrow_accesses(where, elements_by_line(ttir)),
    }


def nvdisasm() -> Path:
    """The wheel's own nvdisasm; a RuntimeError says that it is missing."""
    from triton import knobs

    return Path(knobs.nvidia.nvdisasm.path)


def _code_hash(assembly: str, name: str) -> str:
    """The PTX (or amdgcn) body without the kernel's name, file names, line numbers and debug sections."""
    lines = [
        line.replace(name, "kernel").split("//")[0].rstrip() for line in assembly.split(".section")[0].splitlines()
    ]
    kept = [line for line in lines if not line.lstrip().startswith((".loc", ".file"))]
    return sha256("\n".join(kept).encode()).hexdigest()[:16]
