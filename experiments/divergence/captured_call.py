"""A call of an op in a file: its arguments as they lay in memory, and the variant that got them.

The file is safetensors, so reading one runs no code. Tensors that shared memory share it again: each storage is kept
once, from the first byte that a tensor covers to the last, and a tensor is a view of it by shape, strides and offset.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from experiments.document import ExperimentError
from tkernels import Config
from tkernels.contract import Case
from tkernels.inputs import dtype_name, dtype_of, tensors_in, whole_storage
from tkernels.measurement import prepare
from tkernels.quantized.outliers import Outliers
from tkernels.quantized.scaled_weight import ScaledWeight
from tkernels.quantized.stacked import StackedWeight
from tkernels.quantized.stacked_scaled import StackedScaledWeight
from tkernels.quantized.weight import QuantizedWeight
from tkernels.variant import Variant
from tkernels.verification.check import CheckResult, check_case

MODEL_SLACK = 4.0
"""What the error rule's allowance is multiplied by for a call of a model. The check's own draws lie on a grid on which
fp32 sums are exact in any order; a model's values do not, and there one right order of summation has a few times the
error of another. A wrong mask or scale comes to thousands."""

_WEIGHTS = {
    kind.__name__: kind for kind in (QuantizedWeight, ScaledWeight, StackedWeight, StackedScaledWeight, Outliers)
}
_ALIGNMENT = 16  # bytes: what a launcher may ask an address about


@dataclass(frozen=True)
class CapturedCall:
    """A call, with its arguments as they were before it.

    Attributes:
        op: Of the call.
        variant: That was called.
        config: What it was launched with; None where it has none.
        arguments: Every parameter of the op by name.
    """

    op: str
    variant: str
    config: Config | None
    arguments: Mapping[str, Any]


def save_call(call: CapturedCall, file: Path) -> None:
    """Writes a call.

    Raises:
        ExperimentError: An argument is of a kind that has no place in the file: a variant's own kind of weight.
    """
    storages = _Storages(call.arguments)
    about = {
        "op": call.op,
        "variant": call.variant,
        "config": None if call.config is None else call.config.as_dict(),
        "arguments": {name: _describe(value, storages) for name, value in call.arguments.items()},
    }
    save_file(storages.contents(), file, metadata={"call": json.dumps(about)})


def load_call(file: Path, device: torch.device) -> CapturedCall:
    """Reads a call onto `device`.

    Raises:
        ExperimentError: The file is none of `save_call`'s.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})["call"])
            storages = [opened.get_tensor(f"storage {i}").clone().to(device) for i in range(len(opened.keys()))]
        arguments = {name: _restore(told, storages) for name, told in about["arguments"].items()}
        config = None if about["config"] is None else Config.of(about["config"])
        return CapturedCall(str(about["op"]), str(about["variant"]), config, arguments)
    except FileNotFoundError:
        raise ExperimentError([f"--call {file}: no such file"]) from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ExperimentError([f"--call {file}: is no call that tk diverge kept: {reason}"]) from None


def check_captured(variant: Variant, call: CapturedCall, file: Path) -> CheckResult:
    """Checks a variant on a captured call.

    The variant that was called gets the call's config and its weight as it is; another one prepares the weight for
    itself, as it does when a model is loaded.
    """
    axes, _ = variant.contract.bind_axes(call.arguments)
    case, config = Case(variant.contract, axes, 0, call.arguments), call.config
    if variant.name != call.variant:
        made = prepare(variant, case)
        case, variant, config = made.case, made.variant, None
    return replace(check_case(variant, case, config, slack=MODEL_SLACK, offsets=False), captured=file)


class _Storages:
    """The memory of some arguments: the bytes of each storage that their tensors cover."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._extents: dict[int, tuple[int, int]] = {}  # first byte, a multiple of _ALIGNMENT, and end
        for tensor in tensors_in(arguments):
            key = tensor.untyped_storage().data_ptr()
            first, end = _extent(tensor)
            known = self._extents.get(key, (first, end))
            self._tensors[key] = tensor
            self._extents[key] = (min(first, known[0]), max(end, known[1]))

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Which storage a tensor lies in, and at which of its elements it begins."""
        key = tensor.untyped_storage().data_ptr()
        begin = self._extents[key][0] // tensor.element_size()
        return list(self._extents).index(key), int(tensor.storage_offset()) - begin

    def contents(self) -> dict[str, torch.Tensor]:
        """Name -> [bytes] uint8 on the host, of each storage."""
        wholes = (whole_storage(self._tensors[key], torch.uint8)[slice(*self._extents[key])] for key in self._extents)
        return {f"storage {index}": whole.cpu().clone() for index, whole in enumerate(wholes)}


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in: the first, rounded down to _ALIGNMENT, and the end."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) + 1 if tensor.numel() else 0
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin // _ALIGNMENT * _ALIGNMENT, begin + last * tensor.element_size()


def _describe(value: Any, storages: _Storages) -> dict[str, Any]:
    """An argument as JSON."""
    if isinstance(value, torch.Tensor):
        storage, offset = storages.place(value)
        view = {"shape": list(value.shape), "stride": list(value.stride()), "offset": offset}
        return {"storage": storage, "dtype": dtype_name(value.dtype), **view}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if type(value) in _WEIGHTS.values():
        parts = {one.name: _describe(getattr(value, one.name), storages) for one in fields(value)}
        return {"weight": type(value).__name__, "parts": parts}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    known = ", ".join(_WEIGHTS)
    raise ExperimentError([f"a {type(value).__name__} cannot be kept in a file; of weights there is {known}"])


def _restore(told: Mapping[str, Any], storages: list[torch.Tensor]) -> Any:
    """The argument that `_describe` made this of."""
    if "storage" in told:
        typed = whole_storage(storages[told["storage"]], dtype_of(told["dtype"]))
        return typed.as_strided(told["shape"], told["stride"], told["offset"])
    if "dtype" in told:
        return dtype_of(told["dtype"])
    if "weight" in told:
        return _WEIGHTS[told["weight"]](**{name: _restore(part, storages) for name, part in told["parts"].items()})
    return told["value"]
