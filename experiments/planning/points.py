"""Where each op is checked and timed: the shapes that the workload gives it, and those that the YAML asks for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.planning.arms import Pick, ServedWorkload
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
from experiments.schema import RequestsWorkload, SyntheticWorkload, TraceWorkload
from tkernels.contract import Contract, ContractError, Int, Value
from tkernels.measurement import region_points
from tkernels.selection import ways
from tkernels.variant import AxisRanges, Variant
from tkernels.verification.draws import count_programs

# An interpreted program takes 1 to 25 ms: a point of this many is checked in a few seconds.
MOST_INTERPRETED_PROGRAMS = 192

# A workload of texts has no lengths before a tokenizer is there; function headers are about this long.
_TEXT_TOKENS = 32


@dataclass(frozen=True)
class Point:
    """Where an op is checked and timed.

    Attributes:
        name: For people: "decode", "prefill", or its sizes.
        axes: Every axis of the op's contract.
        serves: The workloads whose steps have these sizes, each with the settings that make them; none of a point that
            no workload asks for.
        arms: The indices of the arms whose steps have these sizes; None of a point that is every variant's.
    """

    name: str
    axes: Mapping[str, Value]
    serves: tuple[Mapping[str, Any], ...] = ()
    arms: frozenset[int] | None = None


Sizes = tuple[int, int, int]
"""Of a workload: requests at once, prompt tokens, and tokens of a context halfway through the outputs."""


@dataclass(frozen=True)
class _Load:
    """Workloads of the same sizes.

    Attributes:
        label: What tells them from the first, " input_len=512".
        serves: The workloads, of any name, by name and settings.
        arms: The indices of the arms that serve one of them.
    """

    label: str
    serves: list[Mapping[str, Any]]
    arms: set[int]


Typical = Mapping[Sizes, _Load]
"""The sizes of the first workload's points -> the workloads that have them."""


def points_of(plan: Plan) -> dict[str, list[Point]]:
    """op -> its points, each complete and within the contract's constraints.

    Raises:
        ContractError: A point of the YAML's `shapes` breaks a constraint.
    """
    typical = _typical_sizes(plan)
    return {op: _make_points(plan, op, typical) for op in plan.ranges}


def called_points(plan: Plan, op: str, pick: Pick, points: Sequence[Point]) -> Sequence[Point]:
    """The op's points at which some arm calls a variant; all of them where the arms that call it have none."""
    callers = set(plan.callers[op][pick])
    return [point for point in points if point.arms is None or point.arms & callers] or points


def _make_points(plan: Plan, op: str, typical: Typical) -> list[Point]:
    contract = plan.ops[op].contract
    asked = [dict(point) for point in plan.shapes.get(op, ())]
    points: list[Point] = []
    if plan.model is not None:
        points += _make_served_points(plan, op, typical)
    elif not asked:
        points += _make_default_points(plan, op)
    points += [Point(name, asked_point(contract, axes, plan.dtype_name)) for name, axes in name_points(asked).items()]
    return list({point.name: point for point in points}.values())


def full_points(plan: Plan, op: str) -> list[Point]:
    """The op's points of `shapes` in full sizes, where these are not what runs, less those that break a constraint: a
    run in full sizes is refused for them.
    """
    points = []
    for name, axes in name_points([dict(one) for one in plan.full_shapes.get(op, ())]).items():
        with suppress(ContractError):
            points.append(Point(name, asked_point(plan.ops[op].contract, axes, plan.dtype_name)))
    return points


def _make_default_points(plan: Plan, op: str) -> list[Point]:
    """Those of an op that neither a model nor `shapes` gives one: its benchmarks' and its variants' regions', on a CPU
    a draw.
    """
    contract, variants = plan.ops[op].contract, [plan.ops[op].variants[pick.variant] for pick in plan.picks[op]]
    if plan.device.type == "cpu":
        return [Point("drawn", complete_point(contract, {}, plan.dtype_name))]
    points = []
    for name, benchmark in {**contract.benchmarks, **region_points(contract, variants)}.items():
        # The experiment's dtype, or its default, stands above the benchmark's.
        sizes = {axis: value for axis, value in benchmark.items() if axis not in DTYPE_ROLES}
        points.append(Point(name, complete_point(contract, sizes, plan.dtype_name)))
    return points


def _make_served_points(plan: Plan, op: str, typical: Typical) -> Iterator[Point]:
    """The points that the workloads' steps give the op: for each of its page sizes, ways of calling it and lengths."""
    contract, all_ways = plan.ops[op].contract, ways(plan.ranges[op])
    interpreted = _interpreted_variants(plan, op)
    # A swept page size is another shape to every op that sees pages; None is LLM's default.
    pages = list(dict.fromkeys(arm.scheduler.get("block_size") for arm in plan.arms))
    is_paged = "S" in contract.axis_by_name
    for page, way, (sizes, load) in product(pages if is_paged else pages[:1], all_ways, typical.items()):
        own, fixed = ({"block_size": page}, {"S": page}) if is_paged and page is not None else ({}, {})
        arms = {index for index in load.arms if not is_paged or plan.arms[index].scheduler.get("block_size") == page}
        suffix = (f" S={page}" if page != pages[0] else "") + _way_label(way, all_ways) + load.label
        for step, axes in _step_axes(contract, {**way, **fixed}, sizes).items():
            axes = _fit_point(contract, axes, plan.dtype_name, interpreted)
            yield Point(step + suffix, axes, tuple({**one, **own} for one in load.serves), frozenset(arms))


def _way_label(way: AxisRanges, others: Sequence[AxisRanges]) -> str:
    """What tells this way of calling an op from its others: " K=2560 bits=4"."""
    differing = [axis for axis in way if any(other.get(axis) != way[axis] for other in others)]
    return "".join(f" {axis}={way[axis]}" for axis in differing if not isinstance(way[axis], tuple))


def _step_axes(contract: Contract, ranges: AxisRanges, sizes: Sizes) -> dict[str, dict[str, Value]]:
    """ "decode" or "prefill" -> the model's own sizes, with the batch of such a step."""
    steps = _batch_sizes(ranges, sizes)
    if contract.work in steps or "T" not in contract.axis_by_name:
        only = contract.work if contract.work in steps else "decode"
        steps = {only: steps[only]}
    served = {axis: value for axis, value in AS_SERVED.items() if axis in contract.axis_by_name}
    known = {axis: bounds for axis, bounds in ranges.items() if axis in contract.axis_by_name}
    return {
        name: served | {axis: _clip(step.get(axis), bounds) for axis, bounds in known.items()}
        for name, step in steps.items()
    }


def _batch_sizes(ranges: AxisRanges, sizes: Sizes) -> dict[str, dict[str, int]]:
    """ "decode" and "prefill" -> the sizes that such a step of a workload has."""
    requests, prompt, context = sizes
    page_size = ranges.get("S", 1)
    assert isinstance(page_size, int)
    pages = -(-context // page_size)
    if isinstance(pool := ranges.get("P"), int):  # a pool too small for all serves fewer at once
        pages = min(pages, pool)
        requests = max(1, min(requests, pool // pages))
    batch = {"B": requests, "N": pages, "pairs": requests}
    return {"decode": {**batch, "T": requests}, "prefill": {**batch, "T": requests * prompt}}


def _clip(size: int | None, bounds: Value | tuple[int, int]) -> Value:
    """The size within the bounds of its axis; the upper one where a step gives none."""
    low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
    return high if size is None else min(max(size, int(low)), int(high))


def _typical_sizes(plan: Plan) -> Typical:
    if not plan.workloads:
        return {(4, _TEXT_TOKENS, 2 * _TEXT_TOKENS): _Load("", [], set(range(len(plan.arms))))}
    found: dict[Sizes, _Load] = {}
    first = plan.workloads[0]
    # Of other names there are no points of their own: these come last, to those that there are.
    for served in sorted(plan.workloads, key=lambda one: one.name != first.name):
        sizes = _workload_sizes(served.requests)
        if served.name == first.name and sizes not in found:
            differing = {key: value for key, value in served.settings.items() if value != first.settings.get(key)}
            label = "".join(f" {key.removeprefix('workload.')}={value}" for key, value in differing.items())
            found[sizes] = _Load(label, [], set())
        if sizes in found:
            found[sizes].serves.append({"workload": served.name, **served.settings})
            found[sizes].arms.update(_find_arms(plan, served))
    return found


def _find_arms(plan: Plan, served: ServedWorkload) -> Iterator[int]:
    """The indices of the arms that serve a workload."""
    for index, arm in enumerate(plan.arms):
        if any((one.name, one.settings) == (served.name, served.settings) for one in arm.workloads):
            yield index


def _workload_sizes(workload: RequestsWorkload) -> Sizes:
    if isinstance(workload, TraceWorkload):
        lengths = traced_lengths(workload)
        prompt, outputs = (sum(column) // len(lengths) for column in zip(*lengths, strict=True))
        return len(lengths), prompt, prompt + outputs // 2
    if isinstance(workload, SyntheticWorkload):
        prompt = sum(workload.input_len.uniform) // 2
        return workload.num_requests, prompt, prompt + sum(workload.output_len.uniform) // 4
    return len(workload.prompts), _TEXT_TOKENS, _TEXT_TOKENS + workload.max_tokens // 2


def _interpreted_variants(plan: Plan, op: str) -> list[tuple[Variant, Pick]]:
    """The op's variants that Triton's interpreter runs here."""
    picked = [(plan.ops[op].variants[pick.variant], pick) for pick in plan.picks[op]]
    return [(variant, pick) for variant, pick in picked if variant.kind == "triton" and plan.device.type == "cpu"]


def _fit_point(
    contract: Contract, axes: dict[str, Value], dtype: str, interpreted: Sequence[tuple[Variant, Pick]]
) -> dict[str, Value]:
    """The point with every axis given; a batch that the interpreter would take minutes for is halved until it fits."""
    batch = [axis.name for axis in contract.axes if isinstance(axis, Int) and axis.batch and axis.name in axes]
    pool = int(axes.get("P", 1))
    while True:
        if "P" in axes:
            # The pages that the point uses: an engine's whole pool can be gigabytes of nothing but poison.
            axes["P"] = max(1, min(used_pages(axes), pool))
        point = complete_point(contract, axes, dtype)
        is_least = all(int(axes[name]) <= 1 for name in batch)
        if is_least or _count_most_programs(point, interpreted) <= MOST_INTERPRETED_PROGRAMS:
            return point
        axes |= {name: max(1, int(axes[name]) // 2) for name in batch}


def _count_most_programs(point: Mapping[str, Value], variants: Sequence[tuple[Variant, Pick]]) -> int:
    counts = [0]
    for variant, pick in variants:
        try:
            config = variant.default_config("interpreter").pinned(dict(pick.pins))
            counts.append(count_programs(variant, variant.contract.case(point, 0), config))
        except (Exception, SystemExit):  # a launcher may be anyone's and raise anything: the check stage reports it
            continue
    return max(counts)
