"""Where each op is checked and timed: the shapes that the workload gives it, and those that the YAML asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.planning.arms import Pick
from experiments.planning.plan import Plan
from experiments.planning.requests import traced_lengths
from experiments.planning.shape_points import (
    AS_SERVED,
    DTYPE_ROLES,
    asked_point,
    complete_point,
    name_points,
    used_pages,
)
from experiments.schema import SyntheticWorkload, TraceWorkload
from tkernels.contract import Contract, Int, Value
from tkernels.selection import ways
from tkernels.variant import AxisRanges, Variant
from tkernels.verification.check import count_programs

# An interpreted program takes 1 to 25 ms: a point of this many is checked in a few seconds.
MOST_INTERPRETED_PROGRAMS = 192

# A workload of texts has no lengths before a tokenizer is there; function headers are about this long.
_TEXT_TOKENS = 32


@dataclass(frozen=True)
class Point:
    """Where an op is checked and timed.

    Attributes:
        name: for people: "decode", "prefill", or its sizes.
        axes: every axis of the op's contract.
        serves: the workloads whose steps have these sizes, each with the settings that make them; none of a point that
            no workload asks for.
    """

    name: str
    axes: Mapping[str, Value]
    serves: tuple[Mapping[str, Any], ...] = ()


def points_of(plan: Plan) -> dict[str, list[Point]]:
    """op -> its points, each complete and within the contract's constraints.

    Raises:
        ContractError: A point of the YAML's `shapes` breaks a constraint.
    """
    return {op: _make_points(plan, op) for op in plan.ranges}


def _make_points(plan: Plan, op: str) -> list[Point]:
    contract = plan.ops[op].contract
    asked = [dict(point) for point in plan.shapes.get(op, ())]
    variants = [(plan.ops[op].variants[pick.variant], pick) for pick in plan.picks[op]]
    points = []
    if plan.model is not None:
        # A swept page size is another shape to every op that sees pages.
        pages = list(dict.fromkeys(arm.scheduler.get("block_size") for arm in plan.arms))
        paged = "S" in contract.axis_by_name
        for page in pages if paged else pages[:1]:
            mine = {"block_size": page} if paged and page is not None else {}
            for way, (typical, (swept, served)) in product(ways(plan.ranges[op]), _typical_sizes(plan).items()):
                for name, axes in _workload_points(contract, way, page, typical):
                    label = f"{name} S={page}" if page != pages[0] else name
                    label += _way_label(way, ways(plan.ranges[op])) + swept
                    serves = tuple({**one, **mine} for one in served)
                    points.append(Point(label, _fit_point(plan, contract, axes, variants), serves))
    elif not asked and plan.device.type == "cpu":
        points.append(Point("drawn", complete_point(contract, {}, plan.dtype_name)))  # a benchmark's sizes are a GPU's
    elif not asked:
        for name, benchmark in contract.benchmarks.items():
            # The experiment's dtype, or its default, stands above the benchmark's.
            sizes = {axis: value for axis, value in benchmark.items() if axis not in DTYPE_ROLES}
            points.append(Point(name, complete_point(contract, sizes, plan.dtype_name)))
    for name, asked_axes in name_points(asked).items():
        points.append(Point(name, asked_point(contract, asked_axes, plan.dtype_name)))
    return list({point.name: point for point in points}.values())


def _way_label(way: AxisRanges, others: Sequence[AxisRanges]) -> str:
    """What tells this way of calling an op from its others: " K=2560 bits=4"."""
    differing = [axis for axis in way if any(other.get(axis) != way[axis] for other in others)]
    return "".join(f" {axis}={way[axis]}" for axis in differing if not isinstance(way[axis], tuple))


def _workload_points(
    contract: Contract, way: AxisRanges, page: int | None, typical: tuple[int, int, int]
) -> list[tuple[str, dict[str, Value]]]:
    """The model's own sizes, with the batch of a decode step and that of a prefill step. `page` None: LLM's default."""
    ranges = {**way}
    if page is not None and "S" in ranges:
        ranges["S"] = page
    requests, prompt, context = typical
    page_size = ranges.get("S", 1)
    assert isinstance(page_size, int)
    pages = -(-context // page_size)
    if isinstance(pool := ranges.get("P"), int):  # a pool too small for all serves fewer at once
        pages = min(pages, pool)
        requests = max(1, min(requests, pool // pages))
    sizes: dict[str, int] = {"B": requests, "N": pages, "pairs": requests}
    steps = {"decode": {**sizes, "T": requests}, "prefill": {**sizes, "T": requests * prompt}}
    if contract.work in steps:
        steps = {contract.work: steps[contract.work]}
    elif "T" not in contract.axis_by_name:
        steps = {"decode": steps["decode"]}
    points = []
    for name, step in steps.items():
        axes = {axis: value for axis, value in AS_SERVED.items() if axis in contract.axis_by_name}
        for axis, bounds in ranges.items():
            low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
            if axis not in contract.axis_by_name:
                continue
            axes[axis] = min(max(step[axis], int(low)), int(high)) if axis in step else high
        points.append((name, axes))
    return points


def _typical_sizes(plan: Plan) -> dict[tuple[int, int, int], tuple[str, list[Mapping[str, Any]]]]:
    """The sizes of the first workload's points (requests at once, prompt tokens, tokens of a context halfway through
    the outputs) -> what tells them from its first, " input_len=512", and the workloads that have them, by name and
    settings: of any name.
    """
    if not plan.workloads:
        return {(4, _TEXT_TOKENS, 2 * _TEXT_TOKENS): ("", [])}
    found: dict[tuple[int, int, int], tuple[str, list[Mapping[str, Any]]]] = {}
    first = plan.workloads[0]
    # Of other names there are no points of their own: these come last, to those that there are.
    for served in sorted(plan.workloads, key=lambda one: one.name != first.name):
        workload = served.workload
        if isinstance(workload, TraceWorkload):
            lengths = traced_lengths(workload)
            prompt, outputs = (sum(column) // len(lengths) for column in zip(*lengths, strict=True))
            sizes = (len(lengths), prompt, prompt + outputs // 2)
        elif isinstance(workload, SyntheticWorkload):
            prompt = sum(workload.input_len.uniform) // 2
            sizes = (workload.num_requests, prompt, prompt + sum(workload.output_len.uniform) // 4)
        else:
            sizes = (len(workload.prompts), _TEXT_TOKENS, _TEXT_TOKENS + workload.max_tokens // 2)
        if served.name == first.name and sizes not in found:
            differing = {key: value for key, value in served.settings.items() if value != first.settings.get(key)}
            label = "".join(f" {key.removeprefix('workload.')}={value}" for key, value in differing.items())
            found[sizes] = (label, [])
        if sizes in found:
            found[sizes][1].append({"workload": served.name, **served.settings})
    return found


def _fit_point(
    plan: Plan, contract: Contract, axes: dict[str, Value], variants: list[tuple[Variant, Pick]]
) -> dict[str, Value]:
    """The point with every axis given; a batch that the interpreter would take minutes for is halved until it fits."""
    interpreted = [(v, p) for v, p in variants if v.kind == "triton"] if plan.device.type == "cpu" else []
    batch = [axis.name for axis in contract.axes if isinstance(axis, Int) and axis.batch and axis.name in axes]
    pool = int(axes.get("P", 1))
    while True:
        if "P" in axes:
            # The pages that the point uses: an engine's whole pool can be gigabytes of nothing but poison.
            axes["P"] = max(1, min(used_pages(axes), pool))
        point = complete_point(contract, axes, plan.dtype_name)
        if (
            all(int(axes[name]) <= 1 for name in batch)
            or _count_most_programs(point, interpreted) <= MOST_INTERPRETED_PROGRAMS
        ):
            return point
        for name in batch:
            axes[name] = max(1, int(axes[name]) // 2)


def _count_most_programs(point: Mapping[str, Value], variants: list[tuple[Variant, Pick]]) -> int:
    counts = [0]
    for variant, pick in variants:
        try:
            config = variant.default_config("interpreter").pinned(dict(pick.pins))
            counts.append(count_programs(variant, variant.contract.case(point, 0), config))
        except Exception:  # a launcher may be anyone's and raise anything: the check stage reports it
            continue
    return max(counts)
