"""The row of the inspection table: one kernel of one variant, compiled for one architecture at one point."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompiledKernel:
    """One launch as compiled.

    status: ok; unsupported (the variant says so) or failed (the compiler says so, or it needs more shared memory than
        a block may have), each with its `reason`.
    default: the config is the variant's default for the architecture.
    point: one of `points.POINTS` or the contract's own, or "axes" where axes were held by hand.
    registers: of a thread. spill_bytes: of a thread, in its code (NVIDIA: ptxas' spill stores or loads, whichever are
        more) or in scratch memory (AMD).
    shared_bytes: of a block. occupancy: resident warps over the most that a multiprocessor holds.
    matrix_instructions: {kind: instructions in the code}.
    access_bytes: {width in bytes: share of the main loop's bytes}, of accesses to global memory, each instruction
        counted once; bulk_copies (TMA) are counted beside them. loop: there is a main loop; where there is none, the
        whole kernel stands for it. loop_instructions: how many the longest of its loops has; None where there is none.
    early_launch: how it waits for launches ahead of it, {"waits": 1, "prefetches": L2 prefetches before that,
        "writes": stores and atomics before that}, none that are 0.
    narrow: main-loop accesses to 8- and 16-bit floats of less than 16 bytes, "file.py:line float width".
    lowered: what has fewer digits than fp32's arithmetic, "file.py:line what" (see `precision`).
    rounded: in an op whose results are exact, what rounds otherwise than its text, "file.py:line what" (see
        `rounding`).
    launch: its position among the variant's launches. grid: programs by axis. waves: grid over what is resident.
    workspace_bytes: of the variant, for all its launches. compile_s: without any cache.
    work: what the op's time goes into, as its contract says.
    code: a hash of the instructions, whatever the kernel's name. source: the hash of the variant's kernels, as tuned
        configs are kept by: whoever shows a row of the expected table can tell whether the code is still that;
        "" of a variant that launches others' kernels.
    """

    op: str
    variant: str
    kernel: str
    arch: str
    config: Mapping[str, int]
    status: str
    default: bool = True
    point: str = "engine"
    reason: str = ""
    axes: Mapping[str, Any] = field(default_factory=dict)
    launch: int = 0
    grid: tuple[int, ...] = ()
    waves: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    matrix_instructions: Mapping[str, int] = field(default_factory=dict)
    access_bytes: Mapping[str, float] = field(default_factory=dict)
    bulk_copies: int = 0
    loop: bool = False
    loop_instructions: int | None = None
    early_launch: Mapping[str, int] = field(default_factory=dict)
    narrow: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    workspace_bytes: int = 0
    compile_s: float | None = None
    code: str = ""
    source: str = ""
    work: str = "traffic"

    @property
    def name(self) -> str:
        """What the row is about, in one line: "paged_decode.one_pass engine sm_90 (paged_decode_one_pass)"."""
        kernel = f" ({self.kernel})" if self.kernel else ""
        return f"{self.op}.{self.variant} {self.point} {self.arch}{kernel}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> "CompiledKernel":
        """The inverse of `as_json`, after a passage through JSON."""
        lists = {name: tuple(values.get(name, ())) for name in ("grid", "narrow", "lowered", "rounded")}
        return CompiledKernel(**{**values, **lists})

    @staticmethod
    def parse(line: str) -> "CompiledKernel":
        return CompiledKernel.of(json.loads(line))
