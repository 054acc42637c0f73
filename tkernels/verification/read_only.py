"""Stores and atomics fall on what the op writes: one on another argument is an error when it is made.

Also where the value is put back afterwards, so that no comparison of contents would show it: on a GPU another stream,
or another program of the same launch, may read it in between.

Nor does a launch write what outlives it and is nobody's workspace, as a counter in a module's own tensor. Two launches
would share it, on two streams or in a captured graph and beside it, and what one leaves there another begins with. What
a launcher allocates during its call is its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tkernels.config import Config
from tkernels.contract import Contract
from tkernels.errors import TKernelsError
from tkernels.inputs import tensors_in
from tkernels.interpreter.accesses import Access, watch_stores
from tkernels.launch import Door
from tkernels.mode import MODE
from tkernels.verification.addresses import Extent, launch_tensors
from tkernels.verification.dry_run import written_by
from tkernels.verification.sites import describe_site, kernel_site, launcher_site


class ReadOnlyError(TKernelsError, RuntimeError):
    """A write to memory of an argument that the op does not write, or to what was there before and is no argument."""


@contextmanager
def refusing_stores(
    door: Door, contract: Contract, arguments: Mapping[str, Any], own: Iterable[torch.Tensor | None]
) -> Iterator[Door]:
    """The door for one call of a launcher, behind which an interpreted kernel writes to no argument but those that the
    op writes or consumes, and to nothing else that is older than the call. Nor does the launcher itself write the
    latter.

    Args:
        arguments: Every parameter of the op by name. What lies between and beyond the elements of these is nobody's.
        own: Outputs and workspace.
    """
    if MODE != "interpret":
        yield door
        return
    given = [*tensors_in(arguments), *(tensor for tensor in own if tensor is not None)]
    with _Made(contract, {_storage(tensor) for tensor in given}) as made:
        yield _refusing_older(_refusing_arguments(door, contract, arguments), contract, made)


def _refusing_arguments(door: Door, contract: Contract, arguments: Mapping[str, Any]) -> Door:
    """The door that refuses stores to arguments which are only read."""
    written = {*contract.writes, *contract.consumes}
    extents = [(name, Extent.of(name, one)) for name, value in arguments.items() for one in tensors_in({name: value})]
    ours = [extent for name, extent in extents if name in written]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_in(arguments)}
    spans = [(start, start + count) for start, count in storages.items() if count]

    def check(addresses: np.ndarray, mask: np.ndarray, width: int, access: str) -> None:
        live = _live(addresses, mask)
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
            raise ReadOnlyError(_told(access, f"{where}, which {contract.name} only reads"))

    return _watching(door, check)


def _refusing_older(door: Door, contract: Contract, made: "_Made") -> Door:
    """The door that refuses stores to tensors of a launch that were there before the call and are not of it."""

    def older_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        older = [(name, one) for name, one in launch_tensors(arguments).items() if _storage(one) not in made.storages]
        spans = [(name, _storage(one), _storage(one) + one.untyped_storage().nbytes()) for name, one in older]

        def check(addresses: np.ndarray, mask: np.ndarray, width: int, access: str) -> None:
            live = _live(addresses, mask)
            for name, start, end in spans:
                if ((live >= start) & (live < end)).any():
                    raise ReadOnlyError(_told(access, f"{name!r}, which {_OLDER.format(contract.name)}"))

        with made.paused():
            (_watching(door, check) if spans else door)(kernel, grid, arguments, config)

    return older_door


_OLDER = "was there before the call and is neither an argument of {} nor workspace"


def _told(access: str, what: str) -> str:
    made = "atomic on" if access == "atomic" else f"{access} to"
    return f"{made} {what}, at {describe_site(kernel_site())}"


def _live(addresses: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """int64 [live lanes]."""
    addresses, mask = np.broadcast_arrays(addresses, mask)
    return addresses[mask.astype(bool)].astype(np.int64)


def _storage(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins."""
    return int(tensor.untyped_storage().data_ptr())


class _Made(TorchDispatchMode):
    """Notes the memory that torch allocates, and refuses its writes to other memory.

    Attributes:
        storages: Where memory begins that may be written: what was given, and what was allocated since.
    """

    def __init__(self, contract: Contract, given: set[int]) -> None:
        super().__init__()
        self.storages = given
        self._contract, self._is_paused = contract, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation would import torch's compiler, which takes seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a kernel is interpreted: Triton's interpreter copies every argument onto itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        for tensor in written_by(func, args, kwargs):
            if tensor.numel() and _storage(tensor) not in self.storages:
                what = f"a tensor that {_OLDER.format(self._contract.name)}"
                name = func.overloadpacket.__name__
                raise ReadOnlyError(f"writes on the host: {name} writes {what}, at {describe_site(launcher_site())}")
        result = func(*args, **kwargs)
        before = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        found = {_storage(one) for one in tree_leaves(result) if isinstance(one, torch.Tensor)}
        self.storages |= found - before
        return result


def _watching(door: Door, check: Access) -> Door:
    def watching_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        with watch_stores(check):
            door(kernel, grid, arguments, config)

    return watching_door
