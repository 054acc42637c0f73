"""What kernels are compiled for: the engine's shapes and strides, on meta tensors, and one case without alignment.

Triton compiles for dtypes, for which integers are 1 or divisible by 16 and for which pointers are 16-byte aligned, not
for values. So a benchmark point of the contract, with the strides that the engine passes, stands for all its like.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tkernels.contract import Axes, Contract, ContractError, Value
from tkernels.device import DeviceFacts
from tkernels.inputs import map_tensors
from tkernels.preparation import prepare_weights
from tkernels.variant import Variant

OPTION_POINTS = {"early": "launch_pdl", "capped": "maxnreg"}
"""The engine's point again with the first of a variant's configs that sets an option of the launch, where one does."""

POINTS = ("engine", "fp8", "fp32", "unaligned", *OPTION_POINTS)
"""engine: the last of the contract's benchmark points that the variant supports. fp8: the same over an e4m3 cache with
scales or of e4m3 codes, where the contract has such. fp32: the same in fp32, which shows what is computed in less
(`precision`). unaligned: the same, strides odd, pointers on no more than an
element's boundary. early and capped: see OPTION_POINTS. Beside these a contract names its own: see
`Contract.inspected`."""

OUTSIDE_POINTS = ("fp16",)
"""The same in fp16, whose sums an outside kernel may have in fp16 too."""

_FP8 = "float8_e4m3fn"
_META = torch.device("meta")
_GROUP = 4  # query heads to a KV head, where an op sees only the keys' and values' part of the fused row: Qwen3-4B's


@dataclass(frozen=True)
class Point:
    """One call of a variant, in meta tensors. `axes` are those that the call binds; `drawn` those it was made from."""

    name: str
    drawn: Axes
    axes: Axes
    arguments: Mapping[str, Any]
    reason: str | None


@dataclass(frozen=True)
class UnalignedPointer:
    """What Triton sees of a tensor: a dtype, and an address one element past a 16-byte boundary."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.dtype.itemsize


def point(variant: Variant, name: str, facts: DeviceFacts, held: Axes | None = None) -> Point | None:
    """The named point of a variant; None where its contract has none of that name.

    Args:
        held: Axes to hold; then nothing is searched for and the rest is the last benchmark point's, where they agree.

    Returns:
        A point whose `reason` says why the variant does not support it, where it does not.
    """
    contract = variant.contract
    dtypes = _DTYPES[name](contract) if name in _DTYPES else {}
    if (name in _DTYPES and not dtypes) or name not in (*POINTS, *OUTSIDE_POINTS, *contract.inspected):
        return None
    wanted = contract.inspected.get(name, {})
    found: Point | None = None
    for axes in _candidates(contract, held or {}, wanted):
        if any(axes[axis] != value for axis, value in wanted.items()):
            continue
        here = _bound(variant, name, {**axes, **dtypes}, facts)
        if here.reason is None:
            return here
        found = found or here
    return found


def _in_fp8(contract: Contract) -> dict[str, Value]:
    """The axes that hold e4m3 where the contract allows it; none where it does not."""
    for name, more in (("kv", {"k_scale": True, "v_scale": True}), ("codes", {})):
        if name in contract.axis_by_name and contract.axis_by_name[name].allows(_FP8):
            return {name: _FP8, **more}
    return {}


def _in_dtype(dtype: str, contract: Contract) -> dict[str, Value]:
    """The dtypes of the computation that are this one where the contract allows it; none where it does not."""
    axes = (contract.axis_by_name.get(name) for name in ("activation", "kv", "weight", "out"))
    return {axis.name: dtype for axis in axes if axis is not None and axis.allows(dtype)}


_DTYPES: Mapping[str, Callable[[Contract], dict[str, Value]]] = {
    "fp8": _in_fp8,
    "fp32": partial(_in_dtype, "float32"),
    "fp16": partial(_in_dtype, "float16"),
}


def _candidates(contract: Contract, held: Axes, wanted: Axes) -> list[dict[str, Value]]:
    """The benchmark points, last first, with `held` over them; axes that they leave open are as `wanted`, or take
    their first draw.
    """
    usual: dict[str, Value] = {"activation": "bfloat16"} if "activation" in contract.axis_by_name else {}
    points = [*contract.benchmarks.values()][::-1] or [usual]
    if held:
        points = points[:1]
    completed = []
    for one in points:
        try:
            completed.append(contract.draw_axes(lambda name, candidates: candidates[0], {**wanted, **one, **held}))
        except ContractError:
            if not held:
                raise
            # What is held does not go with the benchmark's other sizes: those are drawn, the largest that fit.
            completed.append(contract.draw_axes(lambda name, candidates: candidates[-1], {**wanted, **usual, **held}))
    return completed


def _bound(variant: Variant, name: str, drawn: Axes, facts: DeviceFacts) -> Point:
    contract = variant.contract
    arguments = contract.bind_arguments((), contract.make_inputs(drawn, 0, _META))
    try:  # as loading a model does
        arguments = prepare_weights(variant, arguments)
    except Exception as error:  # a variant may be anyone's, and may read values, of which there are none here
        return Point(name, drawn, drawn, arguments, f"its prepare does not work on meta tensors: {error}")
    arguments = map_tensors(arguments, lambda tensor: tensor.to(_META))
    for which in ("q", "k", "v"):
        if isinstance(heads := arguments.get(which), torch.Tensor) and heads.dim() == 3:
            arguments[which] = _in_fused_row(heads, drawn)
    if name == "unaligned":
        arguments = map_tensors(arguments, _oddly_strided)
    axes, _ = contract.bind_axes(arguments)
    return Point(name, drawn, axes, arguments, variant.unsupported_reason(axes, _META, facts))


def _in_fused_row(heads: torch.Tensor, axes: Axes) -> torch.Tensor:
    """[T, heads, D] as the view that the engine passes: part of a row of all query, key and value heads."""
    kv_heads = int(axes["Hkv"])
    row = int(axes.get("Hq", _GROUP * kv_heads)) + 2 * kv_heads
    dim = heads.shape[-1]
    return torch.empty_strided(heads.shape, (row * dim, dim, 1), dtype=heads.dtype, device=_META)


def _oddly_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with every stride but the last's odd."""
    strides, step = [1], 1
    for size in reversed(tensor.shape[1:]):
        step = step * size + 1 - step * size % 2
        strides.append(step)
    shape_strides = tuple(reversed(strides)) if tensor.dim() else ()
    return torch.empty_strided(tensor.shape, shape_strides, dtype=tensor.dtype, device=_META)
