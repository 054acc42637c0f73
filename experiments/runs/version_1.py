"""Rows of version 1, as runs recorded them until their rows said what memory they took and how busy the machine was."""

from collections.abc import Mapping
from typing import Any

_ADDED = ("host_peak_bytes", "device_peak_bytes", "load_before", "load_after")


def from_version_1(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of version 1 as version 2 has it: what was not recorded then is null."""
    if known := [name for name in _ADDED if name in row]:
        raise ValueError(f"{', '.join(known)}: not of version 1")
    return {**row, **dict.fromkeys(_ADDED)}
