"""Stores and atomics fall on what the op writes: one on another argument is an error when it is made.

Also where the value is put back afterwards, so that no comparison of contents would show it: on a GPU another stream,
or another program of the same launch, may read it in between.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tkernels.config import Config
from tkernels.contract import Contract
from tkernels.errors import TKernelsError
from tkernels.inputs import tensors_in
from tkernels.interpreter.accesses import Access, watch_stores
from tkernels.launch import Door
from tkernels.mode import MODE
from tkernels.verification.addresses import Extent
from tkernels.verification.sites import describe_site, kernel_site


class ReadOnlyError(TKernelsError, RuntimeError):
    """A store or an atomic on memory of an argument that the op does not write."""


def refusing_stores(door: Door, contract: Contract, arguments: Mapping[str, Any]) -> Door:
    """The door, behind which an interpreted kernel writes to no argument but those that the op writes or consumes.

    Args:
        arguments: Every parameter of the op by name. What lies between and beyond the elements of these is nobody's.
    """
    if MODE != "interpret":
        return door
    written = {*contract.writes, *contract.consumes}
    extents = [(name, Extent.of(name, one)) for name, value in arguments.items() for one in tensors_in({name: value})]
    ours = [extent for name, extent in extents if name in written]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_in(arguments)}
    spans = [(start, start + count) for start, count in storages.items() if count]

    def check(addresses: np.ndarray, mask: np.ndarray, width: int, access: str) -> None:
        addresses, mask = np.broadcast_arrays(addresses, mask)
        live = addresses[mask.astype(bool)].astype(np.int64)
        if not len(live):
            return
        low, high = int(live.min()), int(live.max()) + width
        near = [(start, end) for start, end in spans if start < high and low < end]
        if not near:
            return
        touched = (live[:, None] + np.arange(width)).ravel()  # bytes
        bad = np.zeros(len(touched), dtype=bool)
        for start, end in near:
            bad |= (touched >= start) & (touched < end)
        for extent in ours:
            bad &= ~extent.covers(touched)
        if bad.any():
            hit = next((name for name, one in extents if name not in written and one.covers(touched[bad][:1])[0]), None)
            where = f"{hit!r}" if hit else "memory between or beyond the elements of the arguments"
            site = describe_site(kernel_site())
            made = "atomic on" if access == "atomic" else f"{access} to"
            raise ReadOnlyError(f"{made} {where}, which {contract.name} only reads, at {site}")

    return _watching(door, check)


def _watching(door: Door, check: Access) -> Door:
    def watching_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        with watch_stores(check):
            door(kernel, grid, arguments, config)

    return watching_door
