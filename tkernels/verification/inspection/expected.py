"""The expected table: what every default config compiled to, kept for each Triton version, and what got worse since."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from tkernels.verification.inspection.rows import CompiledKernel

FOLDER = Path(__file__).parent / "expected"
_NAMES = ("op", "variant", "kernel", "arch", "point", "launch")
# They follow from others, differ from run to run, or fail a gate as soon as there is one.
_LEFT_OUT = ("default", "axes", "waves", "compile_s", "code", "work", "rounded")
_KEPT = tuple(one.name for one in fields(CompiledKernel) if one.name not in (*_NAMES, *_LEFT_OUT))
_WIDE = 0.02  # a share that changes by less is another instruction beside the loop's, not another width
_LONGER = 0.02  # a loop that grows by less has its instructions in another order, not more work


Key = tuple[str, str, str, int, str]


def key(row: CompiledKernel) -> Key:
    """What identifies a row: op, variant, point, launch, architecture."""
    return row.op, row.variant, row.point, row.launch, row.arch


def table_path(triton_version: str) -> Path:
    """ "3.7.1" -> .../expected/triton-3.7.jsonl: what differs within a minor version is worth seeing."""
    return FOLDER / f"triton-{'.'.join(triton_version.split('.')[:2])}.jsonl"


def read(path: Path) -> dict[Key, CompiledKernel]:
    """A table's rows by key; empty where there is no such file."""
    if not path.exists():
        return {}
    rows = (CompiledKernel.parse(line) for line in path.read_text().splitlines())
    return {key(row): row for row in rows}


def write(path: Path, rows: Iterable[CompiledKernel]) -> None:
    """One JSON line for each row, sorted, of what does not depend on the machine that compiled it."""
    path.parent.mkdir(exist_ok=True)
    lines = []
    for row in sorted(rows, key=key):
        values = row.as_json()
        kept = {name: values[name] for name in _NAMES}
        kept |= {
            name: values[name] for name in _KEPT if values[name] not in (None, "", {}, ()) or name in ("grid", "narrow")
        }
        lines.append(json.dumps(kept))
    path.write_text("\n".join(lines) + "\n")


def regressions(before: CompiledKernel, now: CompiledKernel) -> list[str]:
    """What got worse: no longer compiles, spills more, lost its best matrix instruction, accesses memory narrower."""
    if before.status == "ok" != now.status:
        return [f"{now.status}: {now.reason}"]
    if now.status != "ok":
        return []
    found = []
    if (now.spill_bytes or 0) > (before.spill_bytes or 0):
        found.append(f"spills {now.spill_bytes} bytes, {before.spill_bytes} before")
    lost = sorted(set(before.matrix_instructions) - set(now.matrix_instructions))
    if lost:
        found.append(f"lost {', '.join(lost)}, has {', '.join(now.matrix_instructions) or 'no matrix instruction'}")
    return found + _narrower_accesses(before, now)


def longer_loop(before: CompiledKernel, now: CompiledKernel) -> list[str]:
    """Says so where the longest loop has more instructions, of the same config: another has other work in a pass."""
    longest, was_longest = now.loop_instructions or 0, before.loop_instructions or 0
    if before.config != now.config or not was_longest or longest <= (1 + _LONGER) * was_longest:
        return []
    return [f"its longest loop has {longest} instructions, {was_longest} before"]


def _narrower_accesses(before: CompiledKernel, now: CompiledKernel) -> list[str]:
    found = []
    if new := sorted(set(_widths(now.narrow)) - set(_widths(before.narrow))):
        found.append(f"narrower: {', '.join(new)}")
    wide, was_wide = (row.access_bytes.get("16", 0) + row.access_bytes.get("32", 0) for row in (now, before))
    if wide < was_wide - _WIDE and not (now.bulk_copies and not before.bulk_copies):
        found.append(f"{wide:.0%} of the main loop's bytes in 16-byte accesses, {was_wide:.0%} before")
    return found


def _widths(narrow: Sequence[str]) -> list[str]:
    """ "file.py:74 bf16 2" -> "bf16 2": lines move."""
    return [" ".join(one.split()[1:]) for one in narrow]


def changed(before: CompiledKernel, now: CompiledKernel) -> dict[str, tuple[object, object]]:
    """Every kept figure that differs: name -> (before, now). Code that compiles to the same is no difference."""
    pairs = {name: (getattr(before, name), getattr(now, name)) for name in _KEPT if name != "source"}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
