"""What only a model's configuration and the live registry tell of one part of an experiment: of each section what is
sound, although another is not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from experiments.document import Document, ExperimentError
from experiments.planning.engine_options import engine_problems, kernel_ranges, place_of
from experiments.planning.models import ModelPlan, check_headers, plan_model
from experiments.planning.shape_axes import Shape, expanded_shapes
from experiments.planning.shape_points import asked_point
from experiments.planning.structure import Layout, Part
from experiments.quantization.models import quantization_problems
from experiments.schema import AnyWorkload, SyntheticWorkload, TraceWorkload
from experiments.workloads import traced_lengths
from tkernels import ContractError, Registry
from tkernels.selection import with_parts
from tsched.execution.placement import check_random_weights


@dataclass(frozen=True)
class LookedAt:
    """A part with its model, and what is wrong. dtype: None where it is not known."""

    model: ModelPlan | None
    dtype: torch.dtype | None
    problems: tuple[str, ...]


def look_at(layout: Layout, part: Part, ops: Registry, device: torch.device | None) -> LookedAt:
    """Everything that can be said of the part. device: None where the one that is asked for is not there."""
    document, experiment = part.document, part.experiment
    model: ModelPlan | None = None
    dtype: torch.dtype | None = torch.float32
    problems: list[str] = []
    if experiment.model is not None:
        try:
            model = plan_model(experiment.model, document.folder)
            dtype = model.config.dtype
            if experiment.workload and experiment.model.path is not None:
                check_headers(model.directory())
        except ValueError as error:
            problems.append(document.problem(("model",), str(error)))
            dtype = dtype if model is not None else None
    dtype = getattr(torch, experiment.dtype) if experiment.dtype else dtype if part.is_typed else None
    problems += quantization_problems(document, experiment, model.config if model is not None else None)
    if model is not None:
        if device is not None and dtype is not None:
            try:
                check_random_weights(model, device, dtype)
            except ValueError as error:
                problems.append(document.problem(("model",), str(error)))
        problems += _model_problems(layout, part, model, ops, dtype, device or torch.device("cpu"))
    problems += _constraint_problems(layout.document, ops, dtype)
    return LookedAt(model, dtype, tuple(problems))


def found_in(several: Sequence[Sequence[str]], is_ruled: bool) -> list[str]:
    """What is wrong with any of several parts or arms; where it is not known which of them are left out, with all."""
    every = dict.fromkeys(problem for problems in several for problem in problems)
    return [problem for problem in every if is_ruled or all(problem in problems for problems in several)]


def _model_problems(
    layout: Layout, part: Part, model: ModelPlan, ops: Registry, dtype: torch.dtype | None, device: torch.device
) -> Iterator[str]:
    document = part.document
    yield from _unused_ops(part, model, ops, device)
    yield from found_in(list(_length_problems(part, model)), layout.is_ruled)
    engines: dict[Any, list[str]] = {}  # arms differ in kernels too
    for index, arm in enumerate(part.arms):
        known = None if index in part.partial else dtype
        key = (repr(sorted(arm.scheduler.items())), known)
        if key not in engines:
            engines[key] = engine_problems(document, model, arm, ops, known, device)
    yield from found_in(list(engines.values()), layout.is_ruled)


def _unused_ops(part: Part, model: ModelPlan, ops: Registry, device: torch.device) -> Iterator[str]:
    document, experiment = part.document, part.experiment
    axes = kernel_ranges(model, {}, model.config.dtype)
    used = with_parts(axes, {}, ops, device)
    choices = {repr(arm.choices): arm.choices for arm in part.arms}
    called = {op for some in choices.values() for op in with_parts(axes, some, ops, device)}
    for section in ("kernels", "shapes"):
        for op in getattr(experiment, section):
            if op in ops and op not in used:
                message = f"this model does not use that op; it uses {', '.join(sorted(used))}"
                yield document.problem((section, op), message)
            elif op in ops and op not in called:
                whole = next(name for name in axes if op in with_parts({name: axes[name]}, {}, ops, device))
                message = (
                    f"no arm calls it, for it is a part of {whole}, of which another variant than composed is chosen"
                )
                yield document.problem((section, op), message)


def _length_problems(part: Part, model: ModelPlan) -> Iterator[list[str]]:
    """Of each arm."""
    document, longest = part.document, model.config.max_position_embeddings
    some = zip(part.experiment.workload, part.workload_places, strict=True)
    lengths = {id(one): (place, _longest(one)) for one, place in some}
    for arm in part.arms:
        problems = []
        asked = arm.scheduler.get("max_model_len", longest)
        if asked > longest:
            message = f"{asked} is longer than what the model was made for, {longest}"
            problems.append(document.problem(place_of(document, "max_model_len", asked), message))
        what = "max_model_len" if asked < longest else "the model's length"
        for place, most in (lengths[id(served.workload)] for served in arm.workloads):
            if most > min(asked, longest):
                message = f"input_len + output_len reach {most} tokens, {what} is {min(asked, longest)}"
                problems.append(document.problem(("workload", place), message))
        yield problems


def _longest(workload: AnyWorkload) -> int:
    """The most tokens, in and out, of a request whose lengths are known before there is a tokenizer; else 0."""
    if isinstance(workload, TraceWorkload):
        try:
            return max(sum(lengths) for lengths in traced_lengths(workload))
        except (ExperimentError, OSError):  # the names say so
            return 0
    return workload.longest if isinstance(workload, SyntheticWorkload) else 0


def _constraint_problems(document: Document, ops: Registry, dtype: torch.dtype | None) -> Iterator[str]:
    """Points of `shapes` whose sizes do not go together, the first of each entry."""
    faults: list[str] = []
    shapes = expanded_shapes(document, faults)
    for op, some in shapes.items():
        if op not in ops:
            continue
        broken: dict[int, list[str]] = {}
        for shape in some:
            if reason := _broken(ops, op, shape, dtype):
                broken.setdefault(shape.entry, []).append(reason)
        if faults and sum(map(len, broken.values())) < len(some):
            continue  # what the rules would leave out is not known
        for entry, reasons in broken.items():
            more = len(reasons) - 1
            others = f"; {more} more of its points break{'s' * (more == 1)} a constraint" if more else ""
            yield document.problem(("shapes", op, entry), reasons[0] + others)


def _broken(ops: Registry, op: str, shape: Shape, dtype: torch.dtype | None) -> str | None:
    """Why a point cannot be; None where it can, or one of its values is wrong in itself."""
    known = ops[op].contract.axis_by_name
    values = shape.values.items()
    if not all(axis in known and isinstance(one, int | str) and known[axis].allows(one) for axis, one in values):
        return None
    try:
        if dtype is None:
            ops[op].contract.check_axes(shape.values)
        else:
            asked_point(ops[op].contract, shape.values, str(dtype).removeprefix("torch."))
    except ContractError as error:
        return str(error).removeprefix(f"{op}: ")
    return None
