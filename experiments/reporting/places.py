"""What can stand beside what: rows that served the same workload, at the same swept sizes, of one model and dtype."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from experiments.reporting.table_style import plain, told
from experiments.runs.rows import EngineRow, ParityRow, PeerRow, SpeedupRow

Served = EngineRow | PeerRow | ParityRow | SpeedupRow

_SIZE = "workload."


@dataclass(frozen=True)
class Place:
    """What rows are asked, and what of. sizes: the workload's swept fields, each as it is told."""

    workload: str
    sizes: tuple[str, ...]
    model: str
    dtype: str

    @property
    def parts(self) -> tuple[str, ...]:
        return self.workload, *self.sizes, f"model {self.model}", f"dtype {self.dtype}"


def told_apart(places: Collection[Place]) -> dict[Place, str]:
    """What tells each from the others, for people: "long, num_requests 16, dtype bfloat16"; "" of one alone."""
    distinct = set(places)
    counts = Counter(part for place in distinct for part in set(place.parts))
    return {place: ", ".join(p for p in place.parts if p and counts[p] < len(distinct)) for place in distinct}


def place_of(row: Served) -> Place:
    """Where a row's speed can be compared."""
    settings = sorted((key, value) for key, value in row.settings.items() if key.startswith(_SIZE))
    sizes = tuple(f"{plain(key)} {told(value)}" for key, value in settings)
    return Place(str(row.workload), sizes, str(row.settings.get("model", "")), row.dtype)


def asked_of(row: Served) -> Place:
    """Where a row's answer can be compared: arms of another dtype were asked the same."""
    return replace(place_of(row), dtype="")


def own_settings(row: Served) -> dict[str, Any]:
    """The settings that are the arm's, and not its place's."""
    return {key: v for key, v in row.settings.items() if key not in ("model", "dtype") and not key.startswith(_SIZE)}


def arm_of(row: Served) -> tuple[str, str]:
    """What makes an arm, wherever it serves."""
    return str(sorted(row.arm.items())), str(sorted(own_settings(row).items(), key=str))
