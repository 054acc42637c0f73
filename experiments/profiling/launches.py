"""One call of one variant, as a profiler of single kernels wants it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.document import ExperimentError
from experiments.planning.plan import Plan
from experiments.planning.points import Point, points_of
from tkernels import Config, Kernel, Tuning
from tkernels.device import device_facts
from tkernels.measurement import prepare
from tsched.torch_free import suggest_name

_NAME = re.compile(r"(?P<op>\w+)\.(?P<variant>\w+)(?:\[(?P<pins>[^\]]*)\])?")


@dataclass(frozen=True)
class Launch:
    """A kernel of the registry at the experiment's first point of its op, and the names of what a call launches."""

    kernel: Kernel
    point: Point
    inputs: Mapping[str, Any]
    launched: tuple[str, ...]


def find_launch(plan: Plan, name: str) -> Launch:
    """The launch that `name` means: "paged_decode.split_kv", or with pins "paged_decode.split_kv[num_splits=4]".

    Raises ExperimentError for a name that is none, an op that the experiment does not call, or a variant that launches
    no kernels of its own.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ExperimentError([f"--ncu {name}: is not OP.VARIANT, as in paged_decode.split_kv"])
    op, points = match["op"], points_of(plan)
    if op not in points:
        raise ExperimentError([f"--ncu {name}: this experiment does not call {op!r}; it calls {', '.join(points)}"])
    variants = plan.ops[op].variants
    if match["variant"] not in variants:
        there_is = f"there is {', '.join(variants)}{suggest_name(match['variant'], variants)}"
        raise ExperimentError([f"--ncu {name}: unknown {op} variant {match['variant']!r}: {there_is}"])
    variant = variants[match["variant"]]
    if variant.launch is None:
        own = ", ".join(f"{op}.{name}" for name, other in variants.items() if other.launch is not None) or "none"
        raise ExperimentError([f"--ncu {name}: launches no kernels of its own that could be named; {op} has {own}"])
    point = points[op][0]
    case = variant.contract.case(point.axes, plan.experiment.seed, plan.device)
    launched: list[str] = []

    def noting_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        launched.append(str(kernel.fn.__name__))

    try:
        variant.check_supported(*variant.contract.bind_axes(variant.contract.bind_arguments((), case.inputs)))
        arguments = prepare(variant, case).arguments
        axes, device = variant.contract.bind_axes(arguments)
        kernel = Kernel(variant, Tuning(plan.experiment.tuning), _pins(match["pins"] or ""))
        config = kernel.config(axes, device)
        outputs = variant.contract.allocate_outputs(axes, arguments, device)
        noting = Kernel(variant, kernel.tuning, kernel.pins, noting_door)
        noting.launch_into(outputs, arguments, axes, device, device_facts(device), config)
    except ValueError as error:
        raise ExperimentError([f"--ncu {name}: {error}"]) from None
    return Launch(kernel, point, arguments, tuple(launched))


def _pins(text: str) -> dict[str, int]:
    pairs = [pin.partition("=") for pin in text.split(",") if pin]
    for key, _, value in pairs:
        if not value.strip().isdecimal():
            raise ValueError(f"{key}={value} is no whole number")
    keys = [key.strip() for key, _, _ in pairs]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ValueError(f"{', '.join(twice)} is pinned more than once")
    return {key.strip(): int(value) for key, _, value in pairs}
