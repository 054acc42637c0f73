"""What nobody may read must not matter: with another poison in its place, the results have the same bits.

Outputs, workspace, tails, unused pages and padding hold NaN (integers: the largest) in the first call, and other
numbers in those that follow. NaN finds what is added or compared. What is multiplied by zero, or masked by a minimum
that NaN passes or that hides it, a large number of either sign finds. What is taken for a real value only where it
looks like one, as a flag, a count or a page, a small number finds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.inputs import clone_inputs, poison, replace_poison, tensors_in, whole_storage
from tkernels.interpreter.accesses import watch_accesses
from tkernels.launch import Door
from tkernels.mode import MODE
from tkernels.variant import Variant
from tkernels.verification.addresses import default_door
from tkernels.verification.calls import bits, call
from tkernels.verification.sanitizers.base import Sanitizer
from tkernels.verification.sites import describe_site, kernel_site

OfDtype = Callable[[torch.dtype], float | int]

Buffers = dict[str, list[torch.Tensor]]
"""What a buffer of a call is called -> the tensors in it."""

_LARGE = {torch.float16: 60000.0, torch.float8_e4m3fn: 448.0}


def finite_poison(dtype: torch.dtype) -> float | int:
    """Finite where `poison` is NaN, and a valid index."""
    return _LARGE.get(dtype, 1e30) if dtype.is_floating_point else 0


def negative_poison(dtype: torch.dtype) -> float | int:
    """The other sign; of integers without one, a flag that is set."""
    if dtype.is_floating_point:
        return -finite_poison(dtype)
    return -1 if torch.iinfo(dtype).min < 0 else 1


def small_poison(seed: int) -> OfDtype:
    """What a real value may be: one number for all floats and one for all integers, drawn from a seed."""
    generator = np.random.default_rng(seed)
    real, whole = round(float(generator.uniform(-4, 4)), 2), int(generator.integers(1, 9))
    return lambda dtype: real if dtype.is_floating_point else whole


@dataclass(frozen=True)
class _Trial:
    """A case whose poisons are exchanged: all of them, or that of one buffer."""

    variant: Variant
    case: Case
    config: Config | None

    def results(
        self, other: OfDtype = poison, only: str | None = None, door: Door | None = None, buffers: Buffers | None = None
    ) -> dict[str, torch.Tensor]:
        """One call.

        Args:
            other: The poison in the place of the usual one.
            only: The buffer that has it, by what it is called; None for all of them.
            door: Instead of the default one.
            buffers: What each buffer is called and lies in comes here.
        """
        inputs = self.case.inputs
        named = {f"argument {name!r}": name for name in inputs if tensors_in({name: inputs[name]})}
        replaced = inputs if only is None else {named[only]: inputs[named[only]]} if only in named else {}
        mine = {**clone_inputs(inputs), **replace_poison(replaced, other)}
        kept = buffers if buffers is not None else {}
        kept.update({title: tensors_in({name: mine[name]}) for title, name in named.items()})

        def fill(name: str, dtype: torch.dtype) -> float | int:
            title = f"{'output' if name in self.case.contract.outputs else 'workspace'} {name!r}"
            kept[title] = []
            return other(dtype) if only in (None, title) else poison(dtype)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            [*kept.values()][-1].append(tensor)
            return tensor

        return call(self.variant, mine, self.config, door=door, fill=fill, place=place)

    def culprit(self, usual: Mapping[str, torch.Tensor], other: OfDtype) -> str:
        """The buffer whose poison alone changes the results, and the line that first loads it; "" where none does."""
        buffers: Buffers = {}
        self.results(buffers=buffers)
        for title in buffers:
            if _difference(usual, self.results(other, title), other):
                return f"; it lies in {title}{self._first_load(title)}"
        return ""

    def _first_load(self, title: str) -> str:
        """Where an interpreted kernel first loads what a buffer held before the call; "" where it is not seen."""
        if MODE != "interpret" or self.variant.launch is None:
            return ""
        buffers: Buffers = {}
        sites: list[str] = []

        def check(addresses: np.ndarray, mask: np.ndarray, width: int, access: str) -> None:
            addresses, mask = np.broadcast_arrays(addresses, mask)
            if (
                access == "load"
                and not sites
                and any(
                    _holds_poison(tensor, addresses[mask.astype(bool)].astype(np.int64)) for tensor in buffers[title]
                )
            ):
                sites.append(f", first loaded at {describe_site(kernel_site())}")

        def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
            with watch_accesses(check):
                default_door()(kernel, grid, arguments, config)

        self.results(door=door, buffers=buffers)
        return "".join(sites)


def _holds_poison(tensor: torch.Tensor, addresses: np.ndarray) -> bool:
    """Whether one of these addresses lies in the tensor's storage and holds the usual poison now."""
    whole = whole_storage(tensor, tensor.dtype)
    index = (addresses - whole.data_ptr()) // tensor.element_size()
    inside = whole[torch.from_numpy(index[(index >= 0) & (index < len(whole))])]
    return bool(_is_usual(inside).any())


def _is_usual(values: torch.Tensor) -> torch.Tensor:
    return values.float().isnan() if values.is_floating_point() else values == poison(values.dtype)


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    trial = _Trial(variant, case, config)
    usual = trial.results()
    # Three calls: the large poison in every case, and each of the others in every other one.
    for other in (finite_poison, small_poison(case.seed) if case.seed % 2 else negative_poison):
        if difference := _difference(usual, trial.results(other), other):
            return difference + trial.culprit(usual, other)
    return None


def _difference(usual: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor], other: OfDtype) -> str | None:
    """Where results under the usual and another poison differ; an element that the op leaves untouched holds both."""
    for name, result in usual.items():
        second = torch.tensor(other(result.dtype), dtype=result.dtype, device=result.device)  # rounded as it was stored
        # Where one buffer alone has the other poison, an untouched element may still hold the usual one.
        untouched = _is_usual(result) & ((results[name].float() == second.float()) | _is_usual(results[name]))
        differ = (bits(result) != bits(results[name])) & ~untouched
        if differ.any():
            index = tuple(differ.nonzero()[0].tolist())
            return (
                f"{name}{list(index)} is {float(result[index]):.9g} where nobody may read "
                f"{'NaN' if result.is_floating_point() else poison(result.dtype)}, and "
                f"{float(results[name][index]):.9g} where that is {float(second):.9g}"
            )
    return None


SANITIZER = Sanitizer("poison", "results that depend on memory which nobody may read", _run, interpreted=False)
