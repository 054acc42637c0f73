"""Round two: what only the registry, a model's configuration and the engine tell of a document that is sound."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from experiments.document import Document, PathParts, entries
from experiments.planning.layout import Layout, Part, Shape
from experiments.planning.models import ModelPlan
from experiments.planning.requests import traced_lengths
from experiments.planning.shape_points import asked_point
from experiments.quantization.models import find_quantization_faults
from experiments.schema import AnyWorkload, SyntheticWorkload, TraceWorkload, VariantChoice
from tkernels import ContractError, Registry
from tkernels.config import OPTIONS
from tkernels.contract import Contract, Int
from tkernels.selection import OpAxes, with_parts
from tkernels.variant import Op
from tsched.execution.placement import check_random_weights, find_block_size, fit_options, unit_sizes
from tsched.options import BYTES_END, OptionError, read_options
from tsched.resolved_options import ResolvedOptions, resolve_options
from tsched.scheduling.scheduler import Scheduler
from tsched.torch_free import suggest_name


def kernel_ranges(model: ModelPlan, options: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> OpAxes:
    """The axes that LLM will select kernels for under these scheduler options, before the weights are there.

    Without kv_cache_bytes the number of blocks follows from the memory that is free after loading: it is taken at what
    all sequences could fill, its upper bound.
    """
    given = read_options(options)
    block_size = find_block_size(given.block_size, device)
    resolved = resolve_options(
        given,
        max_position_embeddings=model.config.max_position_embeddings,
        block_size=block_size,
        sizes=unit_sizes(model.config, block_size, dtype),
        cache_bytes=given.kv_cache_bytes or BYTES_END,
    )
    return resolved.kernel_axes(model.config)


def registry_problems(layout: Layout, ops: Registry) -> Iterator[str]:
    """Ops and variants whose files are broken, config values that no config has, and shapes off their axes.

    What a broken folder of variants keeps out of the registry is passed over.
    """
    for section, op in _named_ops(layout):
        if op in ops.unavailable:
            yield layout.document.problem((section, op), f"op {op!r} is not available: {ops.unavailable[op]}")
    for op, choices in layout.experiment.kernels.items():
        for index, choice in enumerate(choices if op in ops else ()):
            for inside, message in _choice_faults(ops[op], choice):
                yield layout.document.problem(("kernels", op, index, *inside), message)
    yield from _axis_problems(layout, ops)


def _axis_problems(layout: Layout, ops: Registry) -> Iterator[str]:
    for op, shapes in layout.shapes.items():
        for shape in shapes if op in ops else ():
            for axis, message in _axis_faults(ops[op].contract, shape).items():
                yield layout.document.problem(("shapes", op, shape.entry, axis, shape.places[axis]), message)


def _named_ops(layout: Layout) -> list[tuple[str, str]]:
    """Each op that is named, with the section that names it."""
    return [("kernels", op) for op in layout.experiment.kernels] + [("shapes", op) for op in layout.shapes]


def _choice_faults(op: Op, choice: VariantChoice) -> Iterator[tuple[PathParts, str]]:
    """Where a choice is wrong, below its own path, and why."""
    name = choice.variant
    if name in op.variants.unavailable:
        yield (), f"{op.name} variant {name!r} is not available: {op.variants.unavailable[name]}"
    if name not in op.variants or not choice.pins:
        return
    if op.variants[name].launch is None:
        yield (), f"variant {name!r} has no config to pin"
        return
    known = [*op.variants[name].default_config(""), *OPTIONS]
    for pin in (one for one in choice.pins if one not in known):
        yield (name, pin), f"unknown config value {pin!r}: there is {', '.join(known)}{suggest_name(pin, known)}"


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
            yield from _engine_problems(document, model, options, ops, dtype, device)
    if dtype is not None:
        yield from _constraint_problems(layout, ops, dtype)


def _unused_ops(layout: Layout, part: Part, model: ModelPlan, ops: Registry, device: torch.device) -> Iterator[str]:
    """Ops that the model does not use, and parts of fusions that no arm composes."""
    all_share = bool(part.arms) and all(arm.scheduler.get("shared_prefixes") is True for arm in part.arms)
    axes, sharing = (
        kernel_ranges(model, {"shared_prefixes": shares}, device, model.config.dtype) for shares in (all_share, True)
    )
    used = with_parts(axes, {}, ops, device)
    choices = {repr(arm.choices): arm.choices for arm in part.arms}
    called = {op for some in choices.values() for op in with_parts(axes, some, ops, device)}
    for section, op in _named_ops(layout):
        if op not in ops or op in called:
            continue
        message = f"this model does not use that op; it uses {', '.join(sorted(used))}"
        if op in used:
            whole = next(name for name in axes if op in with_parts({name: axes[name]}, {}, ops, device))
            message = f"no arm calls it, for it is a part of {whole}, of which another variant than composed is chosen"
        elif op in with_parts(sharing, {}, ops, device):
            message = "this model calls it with scheduler.shared_prefixes: true, which not every arm has"
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
            if _axis_faults(ops[op].contract, shape):
                continue
            try:
                asked_point(ops[op].contract, shape.values, str(dtype).removeprefix("torch."))
            except ContractError as error:
                broken.setdefault(shape.entry, []).append(str(error).removeprefix(f"{op}: "))
        for entry, reasons in broken.items():
            more = len(reasons) - 1
            others = f"; {more} more of its points break{'s' * (more == 1)} a constraint" if more else ""
            yield layout.document.problem(("shapes", op, entry), reasons[0] + others)


def _engine_problems(
    document: Document,
    model: ModelPlan,
    options: Mapping[str, Any],
    ops: Registry,
    dtype: torch.dtype,
    device: torch.device,
) -> list[str]:
    """What an engine says against an arm's scheduler options before it has a model: pages that no op takes, and options
    that do not go together, or with the model, or with this machine.
    """
    problems = list(_page_problems(document, model, options, ops, device))
    given = dict(options)
    while True:
        try:
            fitted = fit_options(read_options(given), model.config, model.weights, device=device, dtype=dtype)
            return problems or _scheduler_problems(document, fitted)
        except OptionError as error:
            value = given.pop(error.option, None)  # without it, what is wrong with others is said too
            problems.append(document.problem(_written_at(document, error.option, value), str(error)))
            if value is None:
                return problems


def _page_problems(
    document: Document, model: ModelPlan, options: Mapping[str, Any], ops: Registry, device: torch.device
) -> Iterator[str]:
    """The first op of the model that takes no pages of this size."""
    size = find_block_size(options.get("block_size"), device)
    paged = [op for op, ranges in kernel_ranges(model, {}, device, model.config.dtype).items() if "S" in ranges]
    for op in paged:
        axis = ops[op].contract.axis_by_name["S"]
        if isinstance(axis, Int) and not axis.allows(size):
            place = _written_at(document, "block_size", size)
            yield document.problem(place, f"{size} tokens a page, but {op} takes {axis.low} to {axis.high}")
            return


def _written_at(document: Document, option: str, value: Any) -> PathParts:
    """Where a scheduler option has a value."""
    for index, options in enumerate(entries(document.data.get("scheduler"))):
        written = entries(options.get(option))
        if value in written:
            return ("scheduler", index, option, written.index(value))
    return ("scheduler", option)


def _scheduler_problems(document: Document, fitted: ResolvedOptions) -> list[str]:
    """What a scheduler of these sizes says."""
    try:
        Scheduler(fitted)
    except ValueError as error:
        return [document.problem(("scheduler",), str(error))]
    except MemoryError:
        sizes = f"{fitted.options.max_num_seqs:,} sequences of {fitted.max_model_len:,} tokens"
        blocks = f"{fitted.num_blocks:,} blocks, {fitted.num_host_blocks:,} swapped"
        message = f"{sizes}, {blocks}: the tables of these do not fit this machine's memory"
        return [document.problem(("scheduler",), message)]
    return []
