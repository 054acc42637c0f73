"""What inspection says of a fault in host code: a tile that spills or does not fit, a lost instruction, a refusal.

Values do not show such a fault, and neither does another device than the one that it is for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tkernels.config import Config
from tkernels.device import TARGETS, DeviceFacts
from tkernels.launch import Kernel
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.inspection import expected, gates
from tkernels.verification.inspection.compile import compile_point
from tkernels.verification.inspection.points import Point, point

_POINTS = ("engine", "fp8", "fp32")
_ALL_CONFIGS = "sm_90"
"""The architecture for which tuning's configs are compiled too, and not the default alone."""

Asked = Mapping[tuple[str, Config], str]
"""Point and config -> what is launched, in words."""


def inspected_points(variant: Variant) -> list[Point]:
    """The points that inspection compiles a variant for, at aligned strides. They are made once: some are large."""
    names = (*_POINTS, *variant.contract.inspected)
    found = (point(variant, name, TARGETS[_ALL_CONFIGS]) for name in names)
    return [one for one in found if one is not None]


def asked_for(variant: Variant, points: Sequence[Point], arch: str) -> Asked:
    """What a variant would have compiled for an architecture, without compiling it."""
    default = variant.default_config(arch)
    configs = dict.fromkeys((default, *((variant.configs or ()) if arch == _ALL_CONFIGS else ())))
    return {
        (here.name, config): "\n".join(_launches(variant, here, TARGETS[arch], config))
        for config in configs
        for here in points
    }


def _launches(variant: Variant, here: Point, facts: DeviceFacts, config: Config) -> Iterator[str]:
    meta = torch.device("meta")
    if variant.unsupported_reason(here.axes, meta, facts) is not None:
        yield "refused"
        return
    found: list[str] = []

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        given = {
            name: str(value.dtype) if isinstance(value, torch.Tensor) else str(value)
            for name, value in sorted(arguments.items())
        }
        found.append(f"{kernel.__name__} {given} {config}")

    try:
        outputs = variant.contract.allocate_outputs(here.axes, here.arguments, meta)
        Kernel(variant, NEAREST, {}, door).launch_into(outputs, here.arguments, here.axes, meta, facts, config)
    except Exception as error:  # which compiling says again
        found.append(f"{type(error).__name__}: {error}")
    yield from found


def worse_compiled(original: Variant, mutant: Variant, before: Asked, points: Sequence[Point], arch: str) -> str | None:
    """The first thing that inspection has against a mutant and not against its original; None where there is none.

    In a process that compiles for `arch`.

    Args:
        before: `asked_for` of the original. What is no other for the mutant is not compiled.
    """
    now = asked_for(mutant, points, arch)
    for name, config in (key for key in now if before.get(key) not in (None, now[key])):
        was, rows = (compile_point(one, arch, name, config=config) for one in (original, mutant))
        for one, other in zip(was, rows, strict=False):
            known = gates.failures(one)
            found = [*expected.regressions(one, other), *(gate for gate in gates.failures(other) if gate not in known)]
            if found:
                return f"{other.name}: {'; '.join(found)}"
    return None
