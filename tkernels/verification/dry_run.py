"""A launcher run on tensors without values (meta tensors), which launches nothing.

It shows what would be launched, and what the launcher does with its tensors on the host. A launcher never reads their
values: on a GPU that waits for the device, and ends the capture of a CUDA graph. Here there are none, and the tensors
of the device are told from those that a launcher makes on the host, as on a GPU. Nor does it write what its op only
reads.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tkernels.config import Config
from tkernels.contract import Axes, Contract
from tkernels.device import DeviceFacts
from tkernels.errors import TKernelsError
from tkernels.inputs import map_tensors, tensors_in
from tkernels.launch import Run
from tkernels.variant import Variant
from tkernels.verification.sites import describe_site, launcher_site, raising_site

_META = torch.device("meta")


class HostAccessError(TKernelsError, RuntimeError):
    """A launcher reads a tensor's values on the host, or writes there what its op only reads."""


@dataclass(frozen=True)
class Launch:
    """What a launcher asked its door for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    config: Config


def without_values(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Meta tensors of the same shapes, strides and offsets; views of one storage stay so."""
    storages: dict[int, torch.Tensor] = {}

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages or storage.nbytes() == 0:
            storages[storage.data_ptr()] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META)
        whole = storages[storage.data_ptr()].untyped_storage()
        bare = torch.empty(0, dtype=tensor.dtype, device=_META)
        return bare.set_(whole, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    return map_tensors(inputs, bare)


def dry_run(
    variant: Variant, arguments: Mapping[str, Any], axes: Axes, config: Config, facts: DeviceFacts
) -> list[Launch]:
    """Runs a launcher on tensors without values.

    Args:
        arguments: Every parameter of the op by name, with or without values.
        axes: As the contract binds them from these.

    Returns:
        What it launched. Where it cannot go on without a device, what it had launched until then.

    Raises:
        HostAccessError: It reads values of a tensor, or writes what its op only reads; also where it catches what torch
            raises.
    """
    launches: list[Launch] = []

    def noting_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        launches.append(Launch(kernel, tuple(grid), dict(arguments), config))

    bare = without_values(arguments)
    outputs = variant.contract.allocate_outputs(axes, bare, _META)
    workspace = {
        name: torch.empty(buffer.shape, dtype=buffer.dtype, device=_META)
        for name, buffer in variant.workspace(axes, config, facts).items()
    }
    try:
        with refusing_host_access(variant.contract, bare):
            variant.run_launcher(Run(facts, axes, config, workspace, noting_door), outputs, bare)
    except HostAccessError:
        raise
    except Exception:  # compiling it ahead of time says so
        pass
    return launches


_READS = "reads a tensor's values on the host, for which a GPU is waited for and which no CUDA graph captures"
_NO_VALUES = re.compile(
    r"meta tensor|meta device type|'meta' device type|register_meta|data-dependent|cannot pack tensors on meta",
    re.IGNORECASE,
)
"""How torch says that it would need the values of a meta tensor."""


def _wants_values(error: Exception) -> bool:
    return bool(_NO_VALUES.search(str(error)))


@contextmanager
def refusing_host_access(contract: Contract, bare: Mapping[str, Any]) -> Iterator[None]:
    """While a launcher runs on tensors without values: it may neither read values nor write what its op only reads.

    Args:
        bare: Every parameter of the op by name, without values.

    Raises:
        HostAccessError: It does, also where it catches what torch raises. What else it raises goes on.
    """
    found: list[str] = []
    try:
        with _Reads(found), _Writes(contract, bare, found):
            yield
    except Exception as error:
        if not found and _wants_values(error):  # what torch raises without asking its modes, as a storage does
            raise HostAccessError(f"the launcher {_READS}, at {describe_site(raising_site(error))}: {error}") from error
        if not found:
            raise
    if found:
        raise HostAccessError(f"the launcher {found[0]}")


class _Reads(TorchFunctionMode):
    """Notes every function of torch that needs the values of a tensor that has none."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__repr__", "__format__") and args[0].is_meta:  # torch prints "..." for what is not there
            self._note(name)
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if _wants_values(error):
                self._note(name)
            raise

    def _note(self, name: str) -> None:
        self._found.append(f"{_READS}, by {name} at {describe_site(launcher_site())}")


class _Writes(TorchDispatchMode):
    """Notes every operation that writes to, or reshapes, an argument that the op only reads."""

    def __init__(self, contract: Contract, bare: Mapping[str, Any], found: list[str]) -> None:
        super().__init__()
        self._contract, self._found = contract, found
        written = {*contract.writes, *contract.consumes}
        tensors = [(name, tensor) for name, value in bare.items() for tensor in tensors_in({name: value})]
        self._callers = {id(tensor): name for name, tensor in tensors}
        self._storages: dict[int, list[tuple[str, bool, torch.Tensor]]] = {}
        for name, tensor in tensors:
            self._storages.setdefault(tensor.untyped_storage()._cdata, []).append((name, name in written, tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation would import torch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            # Of a view that it made itself a launcher may change the shape.
            reshapes = torch.Tag.inplace_view in func.tags
            name = self._callers.get(id(tensor)) if reshapes else self._read_only(tensor)
            if name is not None:
                words = f"{func.overloadpacket.__name__} writes {name!r}, which {self._contract.name} only reads"
                self._found.append(f"writes on the host: {words}, at {describe_site(launcher_site())}")
        return func(*args, **kwargs)

    def _read_only(self, tensor: torch.Tensor) -> str | None:
        """The argument that holds an element of this tensor and is not written; None where there is none."""
        sharing = self._storages.get(tensor.untyped_storage()._cdata, [])
        if tensor.numel() == 0 or all(is_written for _, is_written, _ in sharing):
            return None
        return sharing[0][0] if len(sharing) == 1 else self._overlapping(tensor, sharing)

    def _overlapping(self, tensor: torch.Tensor, sharing: list[tuple[str, bool, torch.Tensor]]) -> str | None:
        """The first of the arguments that are not written and share a byte with the tensor."""
        mine = _bytes_of(tensor)
        return next(
            (name for name, written, one in sharing if not written and bool((mine & _bytes_of(one)).any())), None
        )


def written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes, by what its schema says."""
    schema = getattr(func, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (one for one in (value if isinstance(value, list | tuple) else [value]) if one is not None)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """bool [bytes of its storage]: which belong to the tensor's elements."""
    width = tensor.element_size()
    marks = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.bool)
    strides = (*(stride * width for stride in tensor.stride()), 1)
    marks.as_strided((*tensor.shape, width), strides, int(tensor.storage_offset()) * width).fill_(True)
    return marks
