"""Reading a checkpoint: safetensors, one file or sharded, straight into the tensors that the model keeps.

A model asks for each tensor by name and shape and receives it in the model's dtype, on its device, in memory of its
own. Tensors that are used as one (query, key and value; gate and up) are written into one allocation part by part. The
bytes go straight from the file to where they stay. Where the dtype or the device differs they pass through a buffer of
BUFFER_BYTES, so the host holds the model and that buffer at most, and never a mapping of the file. Headers are checked
before any data is read: a file cut short is refused by name of the first tensor it lost.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
_HEAD = "lm_head."
BUFFER_BYTES = 2**25
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {
    **_FLOATS,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Computed = TypeVar("Computed")


class WeightError(ValueError):
    """A checkpoint cannot be loaded; the message names the file and, where there is one, the tensor."""


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies, according to its file's header; it begins at byte `start` of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


class Checkpoint:
    """The tensors of a directory, read one at a time; use it as a context manager.

    `tensor`, `fused` and `raw` record what the model reads, and `refuse_unused` refuses what it did not read: a weight
    that the model ignores means that another model was saved.

    Args:
        directory: With model.safetensors, or an index and its shards.
        device: Where tensors go.
        dtype: Of `tensor`, `fused` and `transposed`.
        prefix: What the names of all tensors but the head's are to begin with. Where none does, the model was saved
            without its head, and all names get it.

    Raises:
        WeightError: There are no safetensors, a file is damaged or cut short, or a tensor is in two files.
    """

    def __init__(self, directory: Path, *, device: torch.device | str, dtype: torch.dtype, prefix: str = "") -> None:
        self.directory = directory
        self.device = torch.device(device)
        self.dtype = dtype
        self._entries: dict[str, _Entry] = {}
        self._taken: set[str] = set()
        self._open: dict[Path, FileIO] = {}
        self._computed: dict[Hashable, Any] = {}
        listed = _list_files(directory)
        for file, expected in listed.items():
            entries = _read_header(file)
            for name in expected or ():
                if name not in entries:
                    raise WeightError(f"{file}: tensor {name!r} is missing; {_INDEX} says that it is there")
            for name, entry in entries.items():
                if name in self._entries:
                    raise WeightError(f"{file}: tensor {name!r} is also in {self._entries[name].file.name}")
                self._entries[name] = entry
        if not any(name.startswith(prefix) for name in self._entries):
            self._entries = {
                name if name.startswith(_HEAD) else f"{prefix}{name}": entry for name, entry in self._entries.items()
            }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._open.values():
            stream.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Reads a tensor.

        Args:
            name: Of the tensor.
            shape: That it must have.

        Returns:
            The tensor as `self.dtype` on `self.device`.

        Raises:
            WeightError: It is missing, has another shape, holds no floats, or has values beyond the dtype's range.
        """
        return self.fused([name], [shape])

    def fused(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> torch.Tensor:
        """Reads tensors into one allocation, stacked along their first dim.

        Args:
            names: Of the tensors.
            shapes: Theirs, which differ in the first dim alone.

        Returns:
            [sum of shapes[i][0], ...] as `self.dtype` on `self.device`.

        Raises:
            WeightError: As `tensor`.
        """
        for name, shape in zip(names, shapes, strict=True):
            self._check_entry(name, tuple(shape), "config.json asks for {}", _FLOATS.values())
        rows = [shape[0] for shape in shapes]
        fused = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, fused.split(rows), strict=True):
            self._read_into(name, part)
            narrowed = self._entry(name).dtype.itemsize > self.dtype.itemsize
            if (narrowed or self.dtype == torch.float16) and not _is_finite(part):
                raise self.error(name, f"has values beyond {str(self.dtype).removeprefix('torch.')}'s range")
            self._taken.add(name)
        return fused

    def transposed(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Reads a matrix that is stored with inputs as rows, as GPT-2's are; one matrix is in memory twice meanwhile.

        Args:
            name: Of the tensor.
            shape: [N, K], of the result.

        Returns:
            [N, K] as `self.dtype` on `self.device`, contiguous.

        Raises:
            WeightError: As `tensor`.
        """
        return self.tensor(name, tuple(reversed(shape))).t().contiguous()

    def raw(
        self, name: str, shape: Sequence[int], dtypes: Collection[torch.dtype], layout: str = "config.json asks for {}"
    ) -> torch.Tensor:
        """Reads a tensor in its stored dtype.

        Args:
            name: Of the tensor.
            shape: That it must have.
            dtypes: One of which it must be stored in.
            layout: Explains `shape` in the message, "a weight of 4 bits has [K/8, N] = {}".

        Returns:
            The tensor on `self.device`.

        Raises:
            WeightError: It is missing, or has another shape or dtype.
        """
        self._check_entry(name, tuple(shape), layout, dtypes)
        tensor = self.peek(name)
        self._taken.add(name)
        return tensor

    def peek(self, name: str) -> torch.Tensor:
        """Reads a tensor in its stored dtype and shape; `refuse_unused` still takes it for unread."""
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
        self._read_into(name, tensor)
        return tensor

    def compute_once(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """What `compute` returns of the checkpoint as a whole; it is called for the first `key` of its kind alone."""
        if key not in self._computed:
            self._computed[key] = compute()
        computed: Computed = self._computed[key]
        return computed

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`.

        Raises:
            WeightError: It is missing.
        """
        return self._entry(name).shape

    def count_bytes_as(self, dtype: torch.dtype) -> int:
        """Bytes of all tensors with the floating ones cast to `dtype`."""
        return sum(
            math.prod(entry.shape) * (dtype if entry.dtype in _FLOATS.values() else entry.dtype).itemsize
            for entry in self._entries.values()
        )

    def error(self, name: str, rule: str) -> WeightError:
        """The error for tensor `name`, which breaks `rule`."""
        return WeightError(f"{self._entry(name).file}: tensor {name!r} {rule}")

    def require_finite(self, name: str, values: torch.Tensor) -> None:
        """Checks the values of tensor `name`.

        Raises:
            WeightError: One of them is not finite.
        """
        if not _is_finite(values):
            place = (~torch.isfinite(values)).nonzero()[0].tolist()
            kind = "a NaN" if bool(torch.isnan(values[tuple(place)])) else "an infinity"
            raise self.error(name, f"has {kind} at {place}; every value of it must be finite")

    def require_equal(self, name: str, expected: torch.Tensor) -> None:
        """Reads tensor `name` where the checkpoint has it, and compares.

        Raises:
            WeightError: It is not `expected`.
        """
        if name in self and not torch.equal(self.tensor(name, expected.shape), expected):
            raise WeightError(
                f"{self._entries[name].file}: tensor {name!r} differs from the embedding, "
                "but config.json says that the two are tied (tie_word_embeddings)"
            )

    def ignore(self, names: Iterable[str]) -> None:
        """Accepts tensors that the model does not read: buffers of older checkpoints, which it computes itself."""
        self._taken.update(name for name in names if name in self._entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def refuse_unused(self) -> None:
        """Checks that the model has read every tensor.

        Raises:
            WeightError: It has not; the message names some of the others.
        """
        unused = sorted(self._entries.keys() - self._taken)
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise WeightError(
                f"{self._entries[unused[0]].file}: unexpected tensor {', '.join(map(repr, unused[:5]))}{more}; "
                "the architecture in config.json has no place for it"
            )

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            files = ", ".join(sorted({entry.file.name for entry in self._entries.values()}))
            raise WeightError(f"{self.directory}: tensor {name!r} is missing from {files}")
        return self._entries[name]

    def _check_entry(self, name: str, shape: tuple[int, ...], layout: str, dtypes: Collection[torch.dtype]) -> _Entry:
        entry = self._entry(name)
        if entry.dtype not in dtypes:
            supported = ", ".join(_NAMES[dtype] for dtype in dtypes)
            raise self.error(name, f"is stored as {_NAMES[entry.dtype]}; supported are {supported}")
        if entry.shape != shape:
            raise self.error(name, f"has shape {list(entry.shape)}, {layout.format(list(shape))}")
        return entry

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        """Reads a tensor into `out`, contiguous, of its shape."""
        entry, flat = self._entries[name], out.view(-1)
        direct = out.dtype is entry.dtype and out.device.type == "cpu"
        step = BUFFER_BYTES // entry.dtype.itemsize
        if not flat.numel():
            return
        buffer = torch.empty(0 if direct else min(step, flat.numel()), dtype=entry.dtype)
        for start, part in zip(range(0, flat.numel(), step), flat.split(step), strict=True):
            read = part if direct else buffer[: part.numel()]
            self._read_bytes(name, entry.start + start * entry.dtype.itemsize, read)
            if not direct:
                part.copy_(read)

    def _read_bytes(self, name: str, place: int, out: torch.Tensor) -> None:
        """Reads the file's bytes from `place` on into `out`, contiguous on the host."""
        file = self._entries[name].file
        try:
            if file not in self._open:
                self._open[file] = FileIO(file)
            stream, left = self._open[file], memoryview(out.view(torch.uint8).numpy().data)
            stream.seek(place)
            while left:  # one call reads 2 GiB at most
                count = stream.readinto(left)
                if not count:
                    raise OSError("the file has become shorter")
                left = left[count:]
        except OSError as error:
            raise self.error(name, f"cannot be read: {error}") from error


def _is_finite(tensor: torch.Tensor) -> bool:
    """Tests part by part: the answer for each element takes a byte."""
    return all(bool(torch.isfinite(part).all()) for part in tensor.view(-1).split(BUFFER_BYTES))


def _list_files(directory: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a directory -> the tensors that the index puts there (None without an index)."""
    if (directory / _SINGLE).exists():
        return {directory / _SINGLE: None}
    index = directory / _INDEX
    if not index.exists():
        raise WeightError(_explain_missing_weights(directory))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        promised: dict[Path, set[str] | None] = {}
        for tensor, name in weight_map.items():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise WeightError(f"{index}: tensor {tensor!r} is said to be in {name!r}, not a safetensors file here")
            tensors = promised.setdefault(directory / name, set())
            if tensors is not None:
                tensors.add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, WeightError):
            raise
        raise WeightError(f"{index}: not a safetensors index with a weight_map: {error!r}") from error
    for file, tensors in promised.items():
        if not file.exists():
            example = min(tensors) if tensors else "?"
            raise WeightError(f"{file}: no such file; {_INDEX} says that it holds tensor {example!r}")
    return promised


def _explain_missing_weights(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such directory"
    present = sorted(path.name for path in directory.iterdir())
    shards = [name for name in present if name.endswith(".safetensors")]
    if shards:
        return f"{directory}: has {', '.join(shards[:3])} but neither {_SINGLE} nor {_INDEX}"
    pickles = [name for name in present if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{directory}: only has {', '.join(pickles[:3])}, a Python pickle: loading one can run any code that its "
            "author put there, so none is read. Save the model again as safetensors (save_pretrained does)"
        )
    return f"{directory}: no weights here; expected {_SINGLE} or {_INDEX}"


def _read_header(file: Path) -> dict[str, _Entry]:
    """Reads the header of a safetensors file and checks it against the file's length.

    Layout: 8 bytes little-endian header length, the header as JSON, then the data that its offsets refer to.
    """
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise WeightError(f"{file}: truncated or not safetensors: {file_bytes} bytes cannot hold its header")
            header = json.loads(stream.read(header_bytes))
    except WeightError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise WeightError(f"{file}: its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise WeightError(f"{file}: its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _parse_entry(file, name, info, 8 + header_bytes, file_bytes) for name, info in header.items()}


def _parse_entry(file: Path, name: str, info: Any, data_start: int, file_bytes: int) -> _Entry:
    try:
        dtype, shape, (start, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightError(f"{file}: tensor {name!r} has a damaged header entry") from error
    # `type`, not isinstance: JSON's true is no number.
    if type(dtype) is not str or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise WeightError(
            f"{file}: tensor {name!r} has a damaged header entry: dtype must be a name, shape and data_offsets whole "
            f"numbers of at least 0; got {reprlib.repr(info)}"
        )
    if dtype not in _DTYPES:
        raise WeightError(f"{file}: tensor {name!r} is stored as {dtype}; supported are {', '.join(_DTYPES)}")
    data_bytes, item_bytes = file_bytes - data_start, _DTYPES[dtype].itemsize
    if end > data_bytes:
        raise WeightError(
            f"{file}: truncated: tensor {name!r} ends at byte {end} of the data, the file holds {data_bytes}"
        )
    if end - start != math.prod(shape) * item_bytes:
        raise WeightError(
            f"{file}: tensor {name!r} spans {end - start} bytes, its shape {list(shape)} as {dtype} does not"
        )
    return _Entry(file, shape, _DTYPES[dtype], data_start + start)
