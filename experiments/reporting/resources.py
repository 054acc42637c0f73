"""What the kernels that a run used compile to, from the expected tables of `tk inspect`: only where the code is still
that, so that no figure is of other code than what ran.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reporting.table_style import Cell, Column, PlainTable, cells, format_number, group_by
from tkernels.device import TARGETS
from tkernels.verification.inspection import expected
from tkernels.verification.inspection.rows import CompiledKernel

STAND_IN = "sm_90"
"""Whose code is shown where the run's device compiles none, as a CPU: the H100's and H200's."""

_NUMBERS = ("registers", "spilled", "shared KB", "occ.")


def resources_of(environment: Mapping[str, Any]) -> tuple[PlainTable | None, list[str]]:
    """The table, None where no row fits, and what is to be said about it.

    Args:
        environment: Of the run: its "kernels" are "op.variant" -> hash of the code, None for one without a kernel.
    """
    used = {name: source for name, source in environment.get("kernels", {}).items() if source is not None}
    if not used:
        return None, ["No variant of this run has a Triton kernel."]
    version = str(environment.get("versions", {}).get("triton") or "(unknown)")
    device = environment.get("device", {})
    arch = str(device.get("arch"))
    notes = []
    if arch not in TARGETS:
        notes.append(
            f"{device.get('name')} runs no compiled kernel: this is what the same code compiles to for {STAND_IN} "
            "(H100, H200), ahead of time. Nothing of it was measured."
        )
        arch = STAND_IN
    compiled = group_by(
        expected.read(expected.table_path(version)).values(),
        lambda row: (f"{row.op}.{row.variant}", row.arch, row.source),
    )
    found = {name: compiled.get((name, arch, source), []) for name, source in sorted(used.items())}
    if missing := [name for name, rows in found.items() if not rows]:
        notes.append(
            f"Not in the expected table of Triton {version} as the code was then, for {arch}: {', '.join(missing)}. tk "
            "inspect compiles what there is now."
        )
    return _table(found, arch, version), notes


def _table(found: Mapping[str, Sequence[CompiledKernel]], arch: str, version: str) -> PlainTable | None:
    lines = tuple(_line(name, row) for name, rows in found.items() for row in rows if row.point != "unaligned")
    if not lines:
        return None
    names = ("variant", "kernel", "dtype", "registers", "spilled", "shared KB", "occ.", "matrix", "config")
    columns = tuple(Column(name, right=name in _NUMBERS) for name in names)
    caption = (
        f"{arch}, Triton {version}, each variant's default config at the engine's shapes; the run may have used "
        "another. Registers and bytes spilled: of a thread; shared memory: of a block; occ.: resident warps over the "
        "most there can be; matrix: instructions by kind. From the expected table of tk inspect, where the hash of the "
        "code is the run's."
    )
    return PlainTable(f"Registers, spills and shared memory ({arch})", columns, lines, caption)


def _line(name: str, row: CompiledKernel) -> tuple[Cell, ...]:
    dtype = "e4m3" if row.point == "fp8" else "bf16"
    if row.status != "ok":
        return cells(name, row.kernel, dtype, Cell(row.status, row.status), *["-"] * 4, row.reason)
    kernel = row.kernel.removeprefix(f"{row.op}_") or row.kernel
    matrix = ", ".join(f"{kind}:{count}" for kind, count in row.matrix_instructions.items()) or "-"
    config = ", ".join(f"{key} {value}" for key, value in row.config.items())
    spilled = Cell(format_number(row.spill_bytes, ","), "partly" if row.spill_bytes else "")
    shared = f"{(row.shared_bytes or 0) / 1024:.3g}"
    occupancy = format_number(row.occupancy, ".0%")
    return cells(name, kernel, dtype, f"{row.registers}", spilled, shared, occupancy, matrix, config)
