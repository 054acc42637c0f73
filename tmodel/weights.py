"""Reading a checkpoint: safetensors, one file or sharded, straight into the tensors that the model keeps.

A model asks for each tensor by name and shape and receives it in the model's dtype, on its device, in memory of its
own. Tensors that are used as one (query, key and value; gate and up) are written into one allocation part by part. The
bytes go straight from the file to where they stay. Where the dtype or the device differs they pass through a buffer of
BUFFER_BYTES, so the host holds the model and that buffer at most, and never a mapping of the file. Headers are checked
before any data is read: a file cut short is refused by name of the first tensor it lost.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from tmodel.json_files import count_bytes, parse_json
from tmodel.safetensors_header import DTYPES, FLOATS, MAX_HEADER_BYTES, Entry, WeightError, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_HEAD = "lm_head."
_ASKED = "config.json asks for {}"
BUFFER_BYTES = 2**23
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Computed = TypeVar("Computed")


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
        self._entries: dict[str, Entry] = {}
        self._taken: set[str] = set()
        self._open: dict[Path, FileIO] = {}
        self._computed: dict[Hashable, Any] = {}
        listed = _list_files(directory)
        for file, expected in listed.items():
            entries = read_header(file)
            for name in expected or ():
                if name not in entries:
                    raise WeightError(f"{file}: tensor {name!r} is missing; {INDEX} says that it is there")
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
            self._check_entry(name, tuple(shape), _ASKED, FLOATS.values())
        rows = [shape[0] for shape in shapes]
        fused = self._allocate(names[0], (sum(rows), *shapes[0][1:]), self.dtype)
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
        self, name: str, shape: Sequence[int], dtypes: Collection[torch.dtype], layout: str = _ASKED
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

    def check_headers(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Checks tensors that `tensor` will be asked for, name -> shape, by the files' headers alone.

        Raises:
            WeightError: One is missing, has another shape or holds no floats.
        """
        for name, shape in shapes.items():
            self._check_entry(name, tuple(shape), _ASKED, FLOATS.values())

    def peek(self, name: str) -> torch.Tensor:
        """Reads a tensor in its stored dtype and shape; `refuse_unused` still takes it for unread."""
        entry = self._entry(name)
        tensor = self._allocate(name, entry.shape, entry.dtype)
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
            math.prod(entry.shape) * (dtype if entry.dtype in FLOATS.values() else entry.dtype).itemsize
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

    @cached_property
    def coded_layers(self) -> frozenset[str]:
        """The layers that have other tensors than a weight and a bias, and no weight of floats: codes and scales."""
        parts = (name.rpartition(".") for name in self._entries)
        layers = {layer for layer, _, part in parts if part not in ("weight", "bias")}
        dense = {
            name.removesuffix(".weight") for name, entry in self._entries.items() if entry.dtype in FLOATS.values()
        }
        return frozenset(layers - dense)

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

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            files = ", ".join(sorted({entry.file.name for entry in self._entries.values()}))
            raise WeightError(f"{self.directory}: tensor {name!r} is missing from {files}")
        return self._entries[name]

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Room for tensor `name`, and for those that are joined to it."""
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            num_bytes = math.prod(shape) * dtype.itemsize
            raise self.error(name, f"takes {num_bytes} bytes of memory, which {self.device} has not") from error

    def _check_entry(self, name: str, shape: tuple[int, ...], layout: str, dtypes: Collection[torch.dtype]) -> Entry:
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
    """Asks the least and the largest value, of which both are NaN where any is.

    torch.isfinite takes copies. On the host they left holes in the heap among the weights, and a dense model peaked at
    1.04 to 1.32x, now at 1.02x.
    """
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))


def _list_files(directory: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a directory -> the tensors that the index puts there (None without an index)."""
    if (directory / SINGLE).exists():
        return {directory / SINGLE: None}
    if not (directory / INDEX).exists():
        raise WeightError(_explain_missing_weights(directory))
    promised: dict[Path, set[str] | None] = {}
    for name, tensors in read_index(directory / INDEX).items():
        if not (directory / name).exists():
            raise WeightError(f"{directory / name}: no such file; {INDEX} says that it holds tensor {min(tensors)!r}")
        promised[directory / name] = tensors
    return promised


def read_index(index: Path, suffix: str = ".safetensors") -> dict[str, set[str]]:
    """Reads the index of a sharded checkpoint.

    Args:
        index: model.safetensors.index.json, or another of its form.
        suffix: How the names of its shards end.

    Returns:
        The shards' file names, which lie beside the index -> the tensors in each.

    Raises:
        WeightError: It is damaged, or names a file of another kind or another directory.
    """
    try:
        if (num_bytes := count_bytes(index)) > MAX_HEADER_BYTES:
            raise WeightError(f"{index}: {num_bytes} bytes; an index has {MAX_HEADER_BYTES} at most")
        content = parse_json(index.read_bytes())
    except WeightError:
        raise
    except (OSError, ValueError) as error:
        raise WeightError(f"{index}: cannot be read as JSON: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise WeightError(
            f"{index}: weight_map must say of each tensor which {suffix[1:]} file it is in, got {reprlib.repr(files)}"
        )
    shards: dict[str, set[str]] = {}
    for tensor, name in files.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix):
            said = f"weight_map says that tensor {tensor!r} is in {reprlib.repr(name)}"
            raise WeightError(f"{index}: {said}, not a {suffix[1:]} file here")
        shards.setdefault(name, set()).add(tensor)
    return shards


def _explain_missing_weights(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such directory"
    present = sorted(path.name for path in directory.iterdir())
    shards = [name for name in present if name.endswith(".safetensors")]
    if shards:
        return f"{directory}: has {', '.join(shards[:3])} but neither {SINGLE} nor {INDEX}"
    pickles = [name for name in present if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{directory}: only has {', '.join(pickles[:3])}, a Python pickle: loading one can run any code that its "
            "author put there, so none is read. `tk convert` turns it into safetensors, as does save_pretrained"
        )
    return f"{directory}: no weights here; expected {SINGLE} or {INDEX}"
