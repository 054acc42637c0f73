"""Why no test notices some mutants, and none should: `reasons.txt` has a line for each.

    file | before -> after | reason

Lines that begin with # say what is below.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("reasons.txt")


@cache
def read_reasons() -> Mapping[tuple[str, str], str]:
    """(file, change) -> reason."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    fields = [[field.strip() for field in line.split(" | ")] for line in lines]
    return {(file, " | ".join(change)): reason for file, *change, reason in fields}


def find_reason(file: str, change: str) -> str:
    """Why the change of `file` stays unnoticed; "" where nobody wrote it down."""
    return read_reasons().get((file, change), "")
