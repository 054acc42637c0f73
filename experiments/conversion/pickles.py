"""What is in a pickle that torch.save wrote: tensors by name and, in some, plain numbers. Anything else is refused.

torch's loader for weights runs none of a pickle's code. It still follows a stranger's instructions, so it is called in
a process of its own, see `checkpoint`.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.document import ExperimentError
from tmodel.json_files import count_bytes
from tmodel.safetensors_header import DTYPES

SUFFIXES = (".pt", ".pth", ".bin")
Number = bool | int | float

_SUPPORTED = f"dense ones of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES.values())}"
_EXPECTED = "expected what torch.save writes of tensors since version 1.6"


def read_pickle(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Number]]:
    """Opens a pickle.

    Returns:
        Its tensors, mapped from the file, and its plain numbers.

    Raises:
        ExperimentError: It is damaged, or holds anything else; the message names what.
    """
    loaded = _load(file)
    if not isinstance(loaded, Mapping) or not all(isinstance(name, str) for name in loaded):
        raise ExperimentError([f"{file}: expected a mapping of names to tensors"])
    tensors = {name: value.detach() for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in loaded.items() if isinstance(value, Number)}
    strange = [
        f"{name!r} is of type {type(value).__name__}, no tensor and no plain number"
        for name, value in loaded.items()
        if name not in tensors and name not in numbers
    ]
    unsupported = [
        f"tensor {name!r} is {what}; supported are {_SUPPORTED}"
        for name, tensor in tensors.items()
        if (what := _describe_unsupported(tensor)) is not None
    ]
    if problems := strange or unsupported:
        raise ExperimentError([f"{file}: {problem}" for problem in problems[:5]])
    return tensors, numbers


def _load(file: Path) -> Any:
    # torch's own complaints about such files advise against what is done here: none is passed on.
    try:
        _check_archive(file)
        _refuse_code(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except ExperimentError:
        raise
    except pickle.UnpicklingError:
        raise ExperimentError([f"{file}: holds more than tensors, which could run code here: not opened"]) from None
    except Exception:  # of instructions that make no sense, whatever comes
        raise ExperimentError([f"{file}: a zip archive that is damaged or not torch.save's; {_EXPECTED}"]) from None


def _check_archive(file: Path) -> None:
    try:
        count_bytes(file)
    except OSError as error:
        raise ExperimentError([f"{file}: cannot be read: {error}"]) from None
    if not zipfile.is_zipfile(file):
        what = "empty, cut short, or a pickle of the old kind, which is not opened"
        raise ExperimentError([f"{file}: {what}; {_EXPECTED}"])
    with zipfile.ZipFile(file) as archive:
        # What torch.jit.save writes: it would be handed to a loader of code.
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise ExperimentError([f"{file}: a TorchScript archive, which holds code: not opened; {_EXPECTED}"])
        damaged = archive.testzip()
    if damaged is not None:
        raise ExperimentError([f"{file}: damaged: the bytes of {damaged!r} are not those of its checksum"])


def _refuse_code(file: Path) -> None:
    """Names what the pickle would call, from its instructions alone; none is followed."""
    unsafe = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if unsafe:
        more = f" and {len(unsafe) - 5} more" if len(unsafe) > 5 else ""
        what = f"holds more than tensors, which could run code here: {', '.join(unsafe[:5])}{more}; not opened"
        raise ExperimentError([f"{file}: {what}"])


def _describe_unsupported(tensor: torch.Tensor) -> str | None:
    """What keeps the tensor out of a safetensors file that is served; None where nothing does."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.device.type != "cpu":
        return f"without values (device {tensor.device.type})"
    return None if tensor.dtype in DTYPES.values() else str(tensor.dtype).removeprefix("torch.")
