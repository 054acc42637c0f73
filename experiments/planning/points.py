"""Where each op is checked and timed: the shapes that the workload gives it, and those that the YAML asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.planning.arms import Pick
from experiments.planning.plan import Plan
from experiments.schema import SyntheticWorkload, TraceWorkload
from experiments.workloads import traced_lengths
from tkernels.check import count_programs
from tkernels.contract import Contract, Int, Value
from tkernels.selection import ways
from tkernels.variant import AxisRanges, Variant

# An interpreted program takes 1 to 25 ms: a point of this many is checked in a few seconds.
MOST_INTERPRETED_PROGRAMS = 192

# A workload of texts has no lengths before a tokenizer is there; function headers are about this long.
_TEXT_TOKENS = 32

# What the engine's own calls look like, where a contract's first draw is a nastier one.
_AS_SERVED: Mapping[str, Value] = {"lengths": "full", "bound": "exact", "order": "interleaved"}
_DTYPE_ROLES = ("activation", "kv", "weight", "out")


@dataclass(frozen=True)
class Point:
    """Every axis of an op's contract, and a name for people: "decode", "prefill", or its sizes."""

    name: str
    axes: Mapping[str, Value]


def points_of(plan: Plan) -> dict[str, list[Point]]:
    """op -> its points, each complete and within the contract's constraints.

    Raises ContractError where a point of the YAML's `shapes` breaks a constraint.
    """
    return {op: _points(plan, op) for op in plan.ranges}


def _points(plan: Plan, op: str) -> list[Point]:
    contract = plan.ops[op].contract
    asked = [dict(point) for point in plan.experiment.shapes.get(op, ())]
    variants = [(plan.ops[op].variants[pick.variant], pick) for pick in plan.picks[op]]
    points = []
    if plan.model is not None:
        # A swept page size is another shape to every op that sees pages.
        pages = list(dict.fromkeys(arm.scheduler.get("block_size") for arm in plan.arms))
        for page in pages if "S" in contract.axis_by_name else pages[:1]:
            for way, (swept, typical) in product(ways(plan.ranges[op]), _typical(plan).items()):
                for name, axes in _workload_points(contract, way, page, typical):
                    label = f"{name} S={page}" if page != pages[0] else name
                    label += _way_label(way, ways(plan.ranges[op])) + swept
                    points.append(Point(label, _fitting(plan, contract, axes, variants)))
    elif not asked and plan.device.type == "cpu":
        points.append(Point("drawn", _complete(plan, contract, {})))  # a benchmark's sizes are a GPU's
    elif not asked:
        for name, benchmark in contract.benchmarks.items():
            # The experiment's dtype, or its default, stands above the benchmark's.
            sizes = {axis: value for axis, value in benchmark.items() if axis not in _DTYPE_ROLES}
            points.append(Point(name, _complete(plan, contract, sizes)))
    for name, asked_axes in _named(asked).items():
        points.append(Point(name, _complete(plan, contract, _as_served(contract, asked_axes))))
    return list({point.name: point for point in points}.values())


def _named(asked: Sequence[Mapping[str, Value]]) -> dict[str, Mapping[str, Value]]:
    """The points of `shapes` by name: of one all that it says, of several what tells them apart."""
    if len(asked) == 1:
        return {",".join(f"{axis}={value}" for axis, value in asked[0].items()): asked[0]}
    telling: list[str] = []
    for axis in dict.fromkeys(axis for axes in asked for axis in axes):
        apart = [{tuple(axes.get(name) for name in names) for axes in asked} for names in (telling, [*telling, axis])]
        telling += [axis] if len(apart[1]) > len(apart[0]) else []
    return {",".join(f"{axis}={axes[axis]}" for axis in telling if axis in axes): axes for axes in asked}


def _as_served(contract: Contract, axes: Mapping[str, Value]) -> dict[str, Value]:
    """The point of `shapes` with what it leaves open as an engine's calls have it, and no more pages than it uses."""
    given = {axis: value for axis, value in _AS_SERVED.items() if axis in contract.axis_by_name}
    given |= axes
    if "P" in contract.axis_by_name and "P" not in axes and ({"B", "N"} <= axes.keys() or {"T", "S"} <= axes.keys()):
        given["P"] = max(1, _used_pages(axes))
    return given


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
    if contract.name == "paged_decode" or "T" not in contract.axis_by_name:
        steps = {"decode": steps["decode"]}
    elif contract.name == "paged_prefill":
        steps = {"prefill": steps["prefill"]}
    points = []
    for name, step in steps.items():
        axes = {axis: value for axis, value in _AS_SERVED.items() if axis in contract.axis_by_name}
        for axis, bounds in ranges.items():
            low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
            if axis not in contract.axis_by_name:
                continue
            axes[axis] = min(max(step[axis], int(low)), int(high)) if axis in step else high
        points.append((name, axes))
    return points


def _typical(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """What tells a point of the first workload from its first, " input_len=512" -> (requests at once, prompt tokens,
    tokens of a context halfway through the outputs), those that differ.
    """
    if not plan.workloads:
        return {"": (4, _TEXT_TOKENS, 2 * _TEXT_TOKENS)}
    found: dict[str, tuple[int, int, int]] = {}
    first = plan.workloads[0]
    for served in plan.workloads:
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
        if served.name == first.name and sizes not in found.values():
            differing = {key: value for key, value in served.settings.items() if value != first.settings.get(key)}
            found["".join(f" {key.removeprefix('workload.')}={value}" for key, value in differing.items())] = sizes
    return found


def _plain(contract: Contract) -> Any:
    """Draws what an op is mostly called with: the first of an enum (values are ordinary there), the largest size."""

    def choose(name: str, candidates: Sequence[Value]) -> Value:
        return max(candidates) if isinstance(contract.axis_by_name[name], Int) else candidates[0]

    return choose


def _complete(plan: Plan, contract: Contract, axes: Mapping[str, Value]) -> dict[str, Value]:
    """The point with every axis given: the plan's dtype, and plain draws of the rest."""
    dtype = axes.get("activation", plan.dtype_name)
    roles = {role: dtype for role in _DTYPE_ROLES if role in contract.axis_by_name}
    return contract.draw_axes(_plain(contract), {**roles, **axes})


def _fitting(
    plan: Plan, contract: Contract, axes: dict[str, Value], variants: list[tuple[Variant, Pick]]
) -> dict[str, Value]:
    """The point with every axis given; a batch that the interpreter would take minutes for is halved until it fits."""
    interpreted = [(v, p) for v, p in variants if v.kind == "triton"] if plan.device.type == "cpu" else []
    batch = [axis.name for axis in contract.axes if isinstance(axis, Int) and axis.batch and axis.name in axes]
    pool = int(axes.get("P", 1))
    while True:
        if "P" in axes:
            # The pages that the point uses: an engine's whole pool can be gigabytes of nothing but poison.
            axes["P"] = max(1, min(_used_pages(axes), pool))
        point = _complete(plan, contract, axes)
        if all(int(axes[name]) <= 1 for name in batch) or _programs(point, interpreted) <= MOST_INTERPRETED_PROGRAMS:
            return point
        for name in batch:
            axes[name] = max(1, int(axes[name]) // 2)


def _used_pages(axes: Mapping[str, Value]) -> int:
    if "pairs" in axes:  # one page is copied to all the others
        return int(axes["pairs"]) + 1
    return int(axes["B"]) * int(axes["N"]) if "B" in axes else -(-int(axes["T"]) // int(axes["S"]))


def _programs(point: Mapping[str, Value], variants: list[tuple[Variant, Pick]]) -> int:
    counts = [0]
    for variant, pick in variants:
        try:
            config = variant.default_config("interpreter").pinned(dict(pick.pins))
            counts.append(count_programs(variant, variant.contract.case(point, 0), config))
        except Exception:  # a launcher may be anyone's and raise anything: the check stage reports it
            continue
    return max(counts)
