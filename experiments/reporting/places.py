"""What can stand beside what: rows that served the same workload, at the same swept sizes, of one model and dtype."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from experiments.reporting.table_style import told
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

    def among(self, places: Collection["Place"]) -> str:
        """What tells it from the others, for people: "long, num_requests 16, dtype bfloat16"; "" where it is alone."""
        parts = [self.workload] if any(one.workload != self.workload for one in places) else []
        parts += [size for size in self.sizes if not all(size in one.sizes for one in places)]
        for key in ("model", "dtype"):
            mine = getattr(self, key)
            parts += [f"{key} {mine}"] if any(getattr(one, key) != mine for one in places) else []
        return ", ".join(parts)


def place_of(row: Served) -> Place:
    """Where a row's speed can be compared."""
    settings = sorted((key, value) for key, value in row.settings.items() if key.startswith(_SIZE))
    sizes = tuple(f"{key.removeprefix(_SIZE)} {told(value)}" for key, value in settings)
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
