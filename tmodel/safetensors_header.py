"""The header of a safetensors file: which tensors the file holds and where, checked by the format's own rule.

Layout: 8 bytes, the header's length, little-endian; the header, JSON; then the tensors' bytes, which follow each other
from the first byte to the end of the file. Whatever breaks the rule is refused before any tensor is read.

Source: the format's description and its reference library, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tkernels.errors import TKernelsError
from tmodel.json_files import count_bytes, cut_message, parse_json

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {
    **FLOATS,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,  # of no weight: masks that old checkpoints carry
    "F8_E4M3": torch.float8_e4m3fn,
}
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
_MAX_COUNT = 2**63 - 1  # the most elements that torch counts


class WeightError(TKernelsError, ValueError):
    """A checkpoint cannot be loaded; the message names the file and, where there is one, the tensor."""

    def __init__(self, message: str) -> None:
        super().__init__(cut_message(message))


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, according to its file's header; it begins at byte `start` of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


@dataclass(frozen=True)
class _Stored:
    """A tensor as the header gives it; its bytes go from `start` to `end` of the data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


def read_header(file: Path) -> dict[str, Entry]:
    """Reads the header of a safetensors file.

    Returns:
        The tensors by name, in the header's order.

    Raises:
        WeightError: The file is cut short or no safetensors, or its header breaks the format's rule.
    """
    try:
        file_bytes = count_bytes(file)
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or header_bytes > file_bytes - 8:
                raise WeightError(f"{file}: truncated or not safetensors: {file_bytes} bytes cannot hold its header")
            if header_bytes > MAX_HEADER_BYTES:
                raise WeightError(f"{file}: its header has {header_bytes} bytes; the most are {MAX_HEADER_BYTES}")
            header = parse_json(stream.read(header_bytes))
    except WeightError:
        raise
    except (OSError, ValueError) as error:
        raise WeightError(f"{file}: its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise WeightError(f"{file}: its header is not a JSON object")
    _check_metadata(file, header.pop(_METADATA, None))
    stored = {name: _parse_entry(file, name, info) for name, info in header.items()}
    _check_places(file, stored, file_bytes - 8 - header_bytes)
    return {name: Entry(file, one.shape, one.dtype, 8 + header_bytes + one.start) for name, one in stored.items()}


def _check_metadata(file: Path, metadata: Any) -> None:
    """Texts by name, for people and tools; none of them changes what a tensor is."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise WeightError(f"{file}: {_METADATA} of its header must map names to texts; got {reprlib.repr(metadata)}")


def _parse_entry(file: Path, name: str, info: Any) -> _Stored:
    damaged = f"{file}: tensor {name!r} has a damaged header entry"
    if not isinstance(info, dict) or info.keys() != _FIELDS:
        raise WeightError(f"{damaged}: it must be an object of {', '.join(sorted(_FIELDS))}; got {reprlib.repr(info)}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if type(dtype) is not str or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise WeightError(
            f"{damaged}: dtype must be a name, shape and the two data_offsets whole numbers from 0 to {_MAX_COUNT}; "
            f"got {reprlib.repr(info)}"
        )
    if dtype not in DTYPES:
        raise WeightError(f"{file}: tensor {name!r} is stored as {dtype}; supported are {', '.join(DTYPES)}")
    counted = 1  # as if no size were 0, which would not make up for the others
    for size in shape:
        counted *= max(size, 1)
        if counted > _MAX_COUNT:
            raise WeightError(
                f"{file}: tensor {name!r} has shape {reprlib.repr(shape)}, more than {_MAX_COUNT} elements"
            )
    start, end = offsets
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise WeightError(
            f"{file}: tensor {name!r} spans {end - start} bytes, its shape {reprlib.repr(shape)} as {dtype} does not"
        )
    return _Stored(tuple(shape), DTYPES[dtype], start, end)


def _are_counts(numbers: Any) -> bool:
    # `type`, not isinstance: JSON's true is no number.
    return type(numbers) is list and all(type(number) is int and 0 <= number <= _MAX_COUNT for number in numbers)


def _check_places(file: Path, stored: Mapping[str, _Stored], data_bytes: int) -> None:
    """Checks that the tensors share the data out: a tensor could else be read from another's bytes."""
    place = 0
    for name, one in sorted(stored.items(), key=lambda item: (item[1].start, item[1].end)):
        if one.start != place:
            raise WeightError(
                f"{file}: tensor {name!r} begins at byte {one.start} of the data, where byte {place} is expected: "
                "tensors must follow each other without a gap or an overlap"
            )
        if one.end > data_bytes:
            raise WeightError(
                f"{file}: truncated: tensor {name!r} ends at byte {one.end} of the data, the file holds {data_bytes}"
            )
        place = one.end
    if place != data_bytes:
        raise WeightError(
            f"{file}: {data_bytes - place} bytes follow its last tensor; the header knows nothing of them"
        )
