"""Hears every call of a model's kernels: where in the model it is, what it got, and whether what it gave is right."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from experiments.divergence.captured_call import MODEL_SLACK
from tkernels import KernelSet
from tkernels.contract import unpack
from tkernels.inputs import clone_inputs
from tkernels.launch import Kernel
from tkernels.ranges import SILENCE, CapturedRanges, Category
from tkernels.verification.accuracy import Verdict
from tkernels.verification.calls import wanted_outputs
from tkernels.verification.check import judge_results

Arguments = Mapping[str, Any]
"""Every parameter of an op by name."""

Results = Mapping[str, torch.Tensor]
"""What a call returned and wrote, by name."""

Listener = Callable[[Kernel, Arguments, Results], None]
"""Hears of a call when it is over: its kernel, the arguments as they were before it, and the results."""


class EnteredRanges:
    """Ranges that know which of them are entered: a model's layers and parts name themselves by entering them."""

    listening = False

    def __init__(self) -> None:
        self.entered: list[EnteredRange] = []

    def named(self, name: str, category: Category, *, launches: bool = True) -> "EnteredRange":
        return EnteredRange(self, name, category)

    def captured(self) -> CapturedRanges:
        return SILENCE

    def innermost(self, category: Category) -> "EnteredRange | None":
        """The last range of a category that is entered; None where none is."""
        return next((one for one in reversed(self.entered) if one.category == category), None)


@dataclass(frozen=True, eq=False, slots=True)
class EnteredRange:
    """One name of EnteredRanges. Two layers of one name have a range each, which are not equal."""

    ranges: EnteredRanges
    name: str
    category: Category

    def __enter__(self) -> None:
        self.ranges.entered.append(self)

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self.ranges.entered.pop()

    def carrying(self, request_ids: Sequence[int]) -> "EnteredRange":
        return self


@dataclass(frozen=True)
class HeardKernel(Kernel):
    """A kernel that tells of its calls."""

    listener: Listener = field(default=lambda kernel, arguments, results: None, repr=False, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contract = self.variant.contract
        bound = contract.bind_arguments(args, kwargs)
        changing = {name: bound[name] for name in (*contract.writes, *contract.consumes)}
        before = {**bound, **clone_inputs(changing)}
        result = super().__call__(*args, **kwargs)
        outputs = dict(zip(wanted_outputs(contract, bound), unpack(result), strict=True))
        self.listener(self, before, outputs | {name: bound[name] for name in contract.writes})
        return result


def hear_kernel(kernel: Kernel, listener: Listener) -> HeardKernel:
    """The kernel, telling `listener` of its calls."""
    return HeardKernel(
        kernel.variant, kernel.tuning, kernel.pins, kernel.door, kernel.parts, kernel.ranges, listener=listener
    )


def hear_kernels(kernels: KernelSet, listener: Listener) -> KernelSet:
    """The set, each of its kernels telling `listener` of its calls."""
    heard = {op: hear_kernel(kernel, listener) for op, kernel in kernels.kernels.items()}
    return replace(kernels, kernels=heard)


@dataclass(frozen=True)
class WrongCall:
    """A call whose result is further from the float64 oracle on its own arguments than the error rule allows.

    Attributes:
        kernel: That was called; of a composed fusion, the part that is wrong, or itself where each part is right.
        arguments: As they were before the call.
        output: The result that is wrong, or the argument that was written wrongly.
        verdict: On it.
        reason: What is wrong with it.
    """

    kernel: Kernel
    arguments: Arguments
    output: str
    verdict: Verdict
    reason: str


def find_wrong(kernel: Kernel, arguments: Arguments, results: Results) -> WrongCall | None:
    """Judges a call by the error rule on its own arguments; None where it is right."""
    contract = kernel.variant.contract
    axes, _ = contract.bind_axes(arguments)
    verdicts, reason = judge_results(kernel.variant, arguments, axes, results, MODEL_SLACK)
    wrong = next(((name, one) for name, one in verdicts.items() if not one.ok), None)
    if wrong is None:
        return None
    whole = WrongCall(kernel, arguments, *wrong, reason or wrong[1].reason)
    return (_find_wrong_part(kernel, arguments) if kernel.parts else None) or whole


def _find_wrong_part(kernel: Kernel, arguments: Arguments) -> WrongCall | None:
    """Calls a composed fusion again, on copies, and judges each part on its own arguments: the first that is wrong."""
    found: list[WrongCall] = []

    def hear_part(part: Kernel, part_arguments: Arguments, results: Results) -> None:
        wrong = None if found else find_wrong(part, part_arguments, results)
        if wrong is not None:
            found.append(wrong)

    parts = tuple(hear_kernel(part, hear_part) for part in kernel.parts)
    assert kernel.variant.function is not None, "a variant with parts is a function that calls them"
    given = (*parts, *kernel.section_given)
    kernel.variant.function(*given, **kernel.variant.taken_arguments(clone_inputs(arguments)))
    return found[0] if found else None
