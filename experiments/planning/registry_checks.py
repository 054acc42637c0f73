"""Round two: what only the registry, a model's configuration and the engine tell of a document that is sound."""

from collections.abc import Iterator

import torch

from experiments.document import Document
from experiments.planning.engine_options import engine_problems, kernel_ranges
from experiments.planning.layout import Layout, Part, Shape
from experiments.planning.models import ModelPlan
from experiments.planning.requests import traced_lengths
from experiments.planning.shape_points import asked_point
from experiments.quantization.models import find_quantization_faults
from experiments.schema import AnyWorkload, SyntheticWorkload, TraceWorkload
from tkernels import ContractError, Registry
from tkernels.contract import Contract
from tkernels.selection import with_parts
from tsched.execution.placement import check_random_weights
from tsched.torch_free import suggest_name


def registry_problems(layout: Layout, ops: Registry) -> Iterator[str]:
    """Config values that no config has, pins of a variant without one, and shapes off their axes.

    What a broken folder of variants keeps out of the registry is passed over.
    """
    yield from _unavailable_problems(layout, ops)
    yield from _pin_problems(layout, ops)
    document = layout.document
    for op, shapes in layout.shapes.items():
        for shape in shapes if op in ops else ():
            for axis, message in _axis_faults(ops[op].contract, shape).items():
                inside = (axis, shape.places[axis]) if axis in shape.places else (axis,)
                yield document.problem(("shapes", op, shape.entry, *inside), message)


def _unavailable_problems(layout: Layout, ops: Registry) -> Iterator[str]:
    """Ops and variants that are named, and whose files are broken."""
    for section in (layout.experiment.kernels, layout.shapes):
        for op in section:
            if op in ops.unavailable:
                place = "kernels" if section is layout.experiment.kernels else "shapes"
                yield layout.document.problem((place, op), f"op {op!r} is not available: {ops.unavailable[op]}")
    for op, choices in layout.experiment.kernels.items():
        unavailable = ops[op].variants.unavailable if op in ops else {}
        for index, choice in enumerate(choices):
            if choice.variant in unavailable:
                message = f"{op} variant {choice.variant!r} is not available: {unavailable[choice.variant]}"
                yield layout.document.problem(("kernels", op, index), message)


def _pin_problems(layout: Layout, ops: Registry) -> Iterator[str]:
    document = layout.document
    for op, choices in layout.experiment.kernels.items():
        for index, choice in enumerate(choices):
            if op not in ops or choice.variant not in ops[op].variants or not choice.pins:
                continue
            variant, path = ops[op].variants[choice.variant], ("kernels", op, index)
            if variant.launch is None:
                yield document.problem(path, f"variant {choice.variant!r} has no config to pin")
                continue
            known = variant.default_config("").as_dict()
            for pin in (one for one in choice.pins if one not in known):
                message = f"unknown config value {pin!r}: there is {', '.join(known)}{suggest_name(pin, known)}"
                yield document.problem((*path, choice.variant, pin), message)


def _axis_faults(contract: Contract, shape: Shape) -> dict[str, str]:
    """Axis -> what is wrong with its value in itself."""
    known = contract.axis_by_name
    faults = {}
    for axis, value in shape.values.items():
        if axis not in known:
            faults[axis] = f"unknown axis {axis!r}: there is {', '.join(known)}{suggest_name(axis, known)}"
        elif not known[axis].allows(value):
            faults[axis] = f"{axis} = {value}, but {known[axis].rule}"
    return faults


def part_problems(
    layout: Layout, part: Part, model: ModelPlan | None, ops: Registry, dtype: torch.dtype | None, device: torch.device
) -> Iterator[str]:
    """What is wrong with what one model runs in one dtype.

    Args:
        model: None where there is none, or its configuration cannot be read.
        dtype: None where it is that model's.
    """
    document = layout.document
    config = model.config if model is not None else None
    yield from find_quantization_faults(document, layout.experiment, config, part.model_place)
    if model is not None and dtype is not None:
        try:
            check_random_weights(model, device, dtype)
        except ValueError as error:
            yield document.problem(part.model_place, str(error))
        yield from _unused_ops(layout, part, model, ops, device)
        yield from _length_problems(document, part, model)
        for options in {repr(sorted(arm.scheduler.items())): arm.scheduler for arm in part.arms}.values():
            yield from engine_problems(document, model, options, ops, dtype, device)
    if dtype is not None:
        yield from _constraint_problems(layout, ops, dtype)


def _unused_ops(layout: Layout, part: Part, model: ModelPlan, ops: Registry, device: torch.device) -> Iterator[str]:
    """Ops that the model does not use, and parts of fusions that no arm composes."""
    axes = kernel_ranges(model, {}, model.config.dtype)
    used = with_parts(axes, {}, ops, device)
    choices = {repr(arm.choices): arm.choices for arm in part.arms}
    called = {op for some in choices.values() for op in with_parts(axes, some, ops, device)}
    asked = [("kernels", op) for op in layout.experiment.kernels] + [("shapes", op) for op in layout.shapes]
    for section, op in asked:
        if op not in ops or op in called:
            continue
        message = f"this model does not use that op; it uses {', '.join(sorted(used))}"
        if op in used:
            whole = next(name for name in axes if op in with_parts({name: axes[name]}, {}, ops, device))
            message = f"no arm calls it, for it is a part of {whole}, of which another variant than composed is chosen"
        yield layout.document.problem((section, op), message)


def _length_problems(document: Document, part: Part, model: ModelPlan) -> Iterator[str]:
    longest = model.config.max_position_embeddings
    reached = {id(one.workload): _longest_request(one.workload) for arm in part.arms for one in arm.workloads}
    for arm in part.arms:
        asked = arm.scheduler.get("max_model_len") or longest
        what = "max_model_len" if asked < longest else "the model's length"
        for served in arm.workloads:
            if (most := reached[id(served.workload)]) > min(asked, longest):
                message = f"input_len + output_len reach {most} tokens, {what} is {min(asked, longest)}"
                yield document.problem(("workload", served.entry), message)


def _longest_request(workload: AnyWorkload) -> int:
    """The most tokens, in and out, of a request whose lengths are known before there is a tokenizer; else 0."""
    if isinstance(workload, TraceWorkload):
        return max(sum(lengths) for lengths in traced_lengths(workload))
    return workload.longest if isinstance(workload, SyntheticWorkload) else 0


def _constraint_problems(layout: Layout, ops: Registry, dtype: torch.dtype) -> Iterator[str]:
    """Points of `shapes` whose sizes do not go together, the first of each entry."""
    for op, shapes in layout.shapes.items():
        broken: dict[int, list[str]] = {}
        for shape in shapes if op in ops else ():
            if reason := _broken_constraint(ops[op].contract, shape, dtype):
                broken.setdefault(shape.entry, []).append(reason)
        for entry, reasons in broken.items():
            more = len(reasons) - 1
            others = f"; {more} more of its points break{'s' * (more == 1)} a constraint" if more else ""
            yield layout.document.problem(("shapes", op, entry), reasons[0] + others)


def _broken_constraint(contract: Contract, shape: Shape, dtype: torch.dtype) -> str | None:
    """Why a point cannot be; None where it can, or one of its values is wrong in itself."""
    if _axis_faults(contract, shape):
        return None
    try:
        asked_point(contract, shape.values, str(dtype).removeprefix("torch."))
    except ContractError as error:
        return str(error).removeprefix(f"{contract.name}: ")
    return None
