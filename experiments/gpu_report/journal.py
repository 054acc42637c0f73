"""facts.jsonl: what a report has found, one line per fact, on disk before the next thing is begun."""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Fact = Mapping[str, Any]

FILE = "facts.jsonl"


@dataclass(frozen=True)
class Journal:
    """The facts of one folder. Every line has `step` and `event`: begin, fact or end; an end has `status`.

    Several processes may append: each line is one write at the file's end.
    """

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def append(self, step: str, event: str, **fields: Any) -> None:
        """Adds a line and waits until it is on disk."""
        line = json.dumps({"step": step, "event": event, "at": round(time.time(), 3), **fields}, default=str) + "\n"
        with open(self.path, "ab") as file:
            if file.tell() and not self._ends_with_a_line():
                file.write(b"\n")  # a process died within its line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def _ends_with_a_line(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line so far; one that was cut off by a crash is not one."""
        return read_lines(self.path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a facts.jsonl; none where there is no file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row and "event" in row:
            found.append(row)
    return found


def facts(lines: Iterable[Fact], step: str | None = None) -> list[Fact]:
    """The facts among the lines, of one step or of all."""
    return [line for line in lines if line["event"] == "fact" and step in (None, line["step"])]


def done_steps(lines: Iterable[Fact]) -> set[str]:
    """The steps that ended well: a rerun skips those. One that failed or was cut off is tried again."""
    return {line["step"] for line in lines if line["event"] == "end" and line.get("status") == "done"}


def running_step(lines: Iterable[Fact]) -> tuple[str, float] | None:
    """The step that was begun last and has not ended, with the time of its beginning."""
    begun: dict[str, float] = {}
    for line in lines:
        if line["event"] == "begin":
            begun[line["step"]] = line["at"]
        elif line["event"] == "end":
            begun.pop(line["step"], None)
    return max(begun.items(), key=lambda item: item[1]) if begun else None
