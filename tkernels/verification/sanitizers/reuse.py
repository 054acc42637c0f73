"""A second call in the same storages, with other values: what an engine does in every step.

The inputs are overwritten in place by another case of the same shapes; outputs and workspace are as the first call left
them. A launcher that remembers by address what it made of its arguments, or a flag in scratch memory that equals what
the last launch left there, is wrong in the second call alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.inputs import clone_inputs, poison, tensors_in
from tkernels.preparation import prepared_case
from tkernels.variant import Variant
from tkernels.verification.accuracy import LUCK
from tkernels.verification.calls import Place, bits, call, first_difference
from tkernels.verification.check import judge_results
from tkernels.verification.sanitizers.base import Sanitizer

_TRIES = 20
_APART = 7919


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    storages = clone_inputs(case.inputs)
    other = _alike_case(case)
    assert other is not None, "a case without another of its shapes is not taken"
    other = prepared_case(variant, other)
    # The other case in fresh storages, which live on: nothing else may come to lie where they are.
    fresh = _overwritten(clone_inputs(storages), other.inputs)
    before = {**clone_inputs(fresh), **_overwritten(clone_inputs(case.loaded), other.loaded)}
    expected = call(variant, fresh, config)
    # Nothing runs the launcher between these two calls: what it keeps of its last one alone is still there.
    first = call(variant, storages, config, place=keep, watch_host=False)
    if wrong := _fault(variant, before, expected) or _fault(variant, {**case.inputs, **case.loaded}, first):
        return f"after a call with other values of the same shapes: {wrong}"
    inputs = _overwritten(storages, other.inputs)
    second = call(variant, inputs, config, place=_taking(iter(kept)))
    second = {name: _with_poison(result, expected[name]) for name, result in second.items()}
    wrong = (first_difference(expected, second) if variant.deterministic else None) or _fault(variant, before, second)
    return f"the second call in the same storages is not as in fresh ones: {wrong}" if wrong else None


def _fault(variant: Variant, inputs: Mapping[str, Any], results: Mapping[str, torch.Tensor]) -> str | None:
    arguments = variant.contract.bind_arguments((), inputs)
    axes, _ = variant.contract.bind_axes(arguments)
    verdicts, reason = judge_results(variant, arguments, axes, results, LUCK)
    return reason or next((f"{name}: {verdict.reason}" for name, verdict in verdicts.items() if not verdict.ok), None)


def _taking(kept: Iterator[torch.Tensor]) -> Place:
    """Gives out what the first call used, in its order, with what it left there."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        one = next(kept)
        assert _alike(one, tensor), "the same axes and config ask for the same memory"
        return one

    return take


def _alike_case(case: Case) -> Case | None:
    """Another case at the same axes whose plain tensors have the same shapes; None where none is drawn.

    Of an odd seed one whose numbers are equal too, if there is any: what is remembered by address and number is wrong
    there alone. A remembered number is wrong where they are not.
    """
    found: Case | None = None
    device = tensors_in(case.inputs)[0].device
    for attempt in range(1, _TRIES + 1):
        other = case.contract.case(case.axes, case.seed + attempt * _APART, device)
        plain = [name for name, value in case.inputs.items() if isinstance(value, torch.Tensor)]
        if all(_alike(case.inputs[name], other.inputs[name]) for name in plain):
            found = found or other
            if case.seed % 2 == 0 or _has_same_numbers(case, other):
                return other
    return found


def _has_same_numbers(case: Case, other: Case) -> bool:
    """Whether the arguments without tensors are equal."""
    return all(value == other.inputs[name] for name, value in case.inputs.items() if not tensors_in({name: value}))


def _overwritten(inputs: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """These tensors with another case's values, and its other arguments.

    A weight whose tensors have other shapes, as outliers are of another number, keeps its values.
    """
    return {name: _copied(value, others[name]) for name, value in inputs.items()}


def _copied(value: Any, other: Any) -> Any:
    """The tensors of one argument with another's values; an argument without tensors is the other."""
    mine, new = (tensors_in({"": argument}) for argument in (value, other))
    if len(mine) == len(new) and all(map(_alike, mine, new)):
        for tensor, values in zip(mine, new, strict=True):
            tensor.data.copy_(values)  # as a kernel writes: torch's count of a tensor's versions stays where it is
    return value if mine else other


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _with_poison(result: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """The result, poisoned where the fresh one is: what the op leaves untouched holds what the first call left."""
    value = poison(fresh.dtype)
    untouched = fresh.float().isnan() if fresh.is_floating_point() else fresh == value
    return torch.where(untouched, bits(fresh), bits(result)).view(result.dtype)


SANITIZER = Sanitizer(
    "reuse",
    "results of a second call in the same storages that depend on the first",
    _run,
    takes=lambda case: _alike_case(case) is not None,
    interpreted=False,
)
