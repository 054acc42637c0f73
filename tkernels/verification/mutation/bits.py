"""Whether a mutant is its original, bit for bit: the proof that a declared equivalent has to give."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import device_facts
from tkernels.inputs import clone_inputs, poison
from tkernels.launch import Kernel
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.addresses import default_door


class Original(NamedTuple):
    """A case and what the variant as it is makes of it: every output and the whole storage of every written argument,
    as bytes.
    """

    case: Case
    config: Config
    written: list[torch.Tensor]


def _written(variant: Variant, case: Case, config: Config) -> list[torch.Tensor]:
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


def originals(variant: Variant, drawn: Iterable[tuple[Case, Config | None]]) -> list[Original]:
    """Runs the variant as it is: once for all of its mutants, which are compared with the same bits."""
    return [Original(case, config, _written(variant, case, config)) for case, config in drawn if config is not None]


def difference(variant: Variant, wanted: Iterable[Original], before_case: Callable[[], None]) -> str:
    """Runs the variant, in which a fault has been planted meanwhile, on the same cases. The first case where a bit
    differs, or where it raises; "" where there is none.
    """
    for case, config, written in wanted:
        before_case()
        try:
            got = _written(variant, case, config)
        except Exception as error:
            return f"{type(error).__name__}: {error} at {dict(case.axes)}"
        if not all(torch.equal(one, other) for one, other in zip(written, got, strict=True)):
            return f"at {dict(case.axes)}, seed {case.seed}"
    return ""
