"""Whether a mutant is its original, bit for bit: the proof that a declared equivalent has to give."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tkernels.addresses import default_door
from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import device_facts
from tkernels.inputs import clone_inputs, poison
from tkernels.launch import Kernel
from tkernels.tuning import NEAREST
from tkernels.variant import Variant


def _run(variant: Variant, case: Case, config: Config) -> list[torch.Tensor]:
    """Every output and the whole storage of every written argument, as bytes."""
    contract = case.contract
    arguments = clone_inputs(contract.bind_arguments((), case.inputs))
    axes, device = contract.bind_axes(arguments)
    outputs = contract.allocate_outputs(axes, arguments, device)
    results = [tensor for tensor in outputs.values() if tensor is not None]
    for tensor in results:
        tensor.fill_(poison(tensor.dtype))
    kernel = Kernel(variant, NEAREST, {}, default_door())
    kernel.launch_into(outputs, arguments, axes, device, device_facts(device), config)
    results += [arguments[name] for name in contract.writes]
    return [torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone() for tensor in results]


def same_bits(
    variant: Variant,
    plant: Callable[[], None],
    drawn: Iterable[tuple[Case, Config | None]],
    before_case: Callable[[], None],
) -> dict[str, Any]:
    """Runs the original on every case, plants the fault, and runs all of them again.

    {"verdict": "same", "cases": n}, or "different" with the reason.
    """
    cases = [(case, config) for case, config in drawn if config is not None]
    expected = []
    for case, config in cases:
        before_case()
        expected.append(_run(variant, case, config))
    plant()
    for (case, config), wanted in zip(cases, expected, strict=True):
        before_case()
        try:
            got = _run(variant, case, config)
        except Exception as error:
            return {"verdict": "different", "reason": f"{type(error).__name__}: {error} at {dict(case.axes)}"}
        if not all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True)):
            return {"verdict": "different", "reason": f"at {dict(case.axes)}, seed {case.seed}"}
    return {"verdict": "same", "cases": len(cases)}
