"""One variant at one point: checked first, then timed, and placed on the roofline by the contract's own counts."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Contract, ContractError, Int, Value
from tkernels.device import DeviceFacts, device_facts
from tkernels.inputs import clone_inputs, tensors_in
from tkernels.launch import Kernel
from tkernels.nearest import Match
from tkernels.preparation import timed_preparation
from tkernels.roofline import Roofline, RooflineError, roofline
from tkernels.timing import Cache, Launch, Timing, time_calls
from tkernels.tuning import NEAREST, Tuning
from tkernels.variant import UnsupportedError, Variant, as_it_is
from tkernels.verification.check import check_case

Status = Literal["ok", "wrong", "failed", "unsupported", "void", "not measured"]

INTERPRETED = "interpreted on a CPU, where a Triton kernel's time means nothing"

CPU_SIZE = 1024
"""The largest size of a point on a CPU, whose contracts' own points are a GPU's."""

CPU_BYTES = 80 * 2**20
"""The most bytes that a point's inputs may take on a CPU. A check holds some forty times as much: copies of the inputs,
and float64 tensors of the oracle, the errors and the allowances."""

# One graph's calls pass this many bytes together: what a call writes may stay in the L2 cache when it ends (60 MB on an
# H200), and only over many calls in a row does all of it reach the memory that the roofline counts.
_BYTES_PER_SAMPLE = 2**30
_MOST_SETS = 64


@dataclass(frozen=True)
class Method:
    """How calls are timed; see `tkernels.timing.time_calls`."""

    launch: Launch = "eager"
    l2: Cache = "cold"
    samples: int = 20


@dataclass(frozen=True)
class Measurement:
    """What is known of one variant at one point; the status says whether there is a time, the reason why not.

    Attributes:
        status: "void" is a time that the hardware does not allow: it is not reported.
        config_source: How the config was found; None for a variant that has none.
        prepare_us, prepared_bytes: Making the variant's own weight, once, at load; None where it takes the weight as it
            is.
        limit: The share of the roofline.
    """

    op: str
    variant: str
    kind: str
    point: str
    axes: Axes
    status: Status
    reason: str | None = None
    config: Config | None = None
    config_source: Match | None = None
    bytes_moved: int | None = None
    flops: int | None = None
    timing: Timing | None = None
    limit: Roofline | None = None
    prepare_us: float | None = None
    prepared_bytes: int | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """Achieved bandwidth, by the contract's bytes."""
        return self.bytes_moved / self.timing.median_us * 1e6 if self.timing and self.bytes_moved is not None else None

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / self.timing.median_us * 1e6 if self.timing and self.flops is not None else None

    @property
    def dtype(self) -> str:
        """Of what the op computes on: its activation's, or its codes'; "" where it has neither."""
        return str(self.axes.get("activation", self.axes.get("codes", "")))

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: what is not known is null, with the reason beside it."""
        timing, limit = self.timing, self.limit
        row = {name: getattr(self, name) for name in ("op", "variant", "kind", "point", "status", "reason", "dtype")}
        row |= {"axes": dict(self.axes), "config": None if self.config is None else self.config.as_dict()}
        row |= {name: getattr(self, name) for name in ("config_source", "bytes_moved", "flops")}
        row |= {name: getattr(self, name) for name in ("bytes_per_s", "flops_per_s", "prepare_us", "prepared_bytes")}
        row |= {name: getattr(timing, name, None) for name in ("median_us", "iqr_us", "min_us", "max_us", "timer")}
        row |= {name: getattr(timing, name, None) for name in ("calls_per_sample", "first_call_us")}
        row["samples_us"] = list(timing.samples_us) if timing else None
        row["clocks"] = {"before": vars(timing.before), "after": vars(timing.after)} if timing else None
        row |= {f"roofline_{name}": getattr(limit, name, None) for name in ("fraction", "bound")}
        row["roofline_reason"] = limit.reason if limit else self.reason
        return row


def benchmark_points(
    contract: Contract, device: torch.device, variants: Iterable[Variant] = ()
) -> dict[str, dict[str, Value]]:
    """Name -> every axis of the contract's realistic points and of its variants' regions; on a CPU the contract's first
    two, all cut down to what it can check.
    """
    if device.type == "cuda":
        realistic = {name: complete_axes(contract, axes) for name, axes in contract.benchmarks.items()}
        return realistic | region_points(contract, variants)
    points: dict[str, dict[str, Value]] = {}
    for name, axes in contract.benchmarks.items():
        size, point = _cpu_point(contract, axes)
        if point is not None and point not in points.values():
            points[name if point == complete_axes(contract, axes) else f"{name} (sizes <= {size})"] = point
        if len(points) == 2:
            break
    for variant in variants:
        for name, axes in region_points(contract, (variant,)).items():
            size, point = _cpu_point(contract, axes, variant.region)
            if point is not None:
                points[f"{name} (other sizes <= {size})"] = point
    return points


def region_points(contract: Contract, variants: Iterable[Variant]) -> dict[str, dict[str, Value]]:
    """A point of every axis in the region of each variant, where no realistic point of the contract lies in it: the
    nearest to the first of these from which that goes.
    """
    realistic = [complete_axes(contract, axes) for axes in contract.benchmarks.values()]
    found: dict[str, dict[str, Value]] = {}
    for variant in variants:
        moved = [
            {axis: min(max(int(point[axis]), low), high) for axis, (low, high) in variant.region.items()}
            for point in realistic
        ]
        if any(own.items() <= point.items() for own, point in zip(moved, realistic, strict=True)):
            continue
        for axes, own in zip(contract.benchmarks.values(), moved, strict=True):
            try:
                name = ",".join(f"{axis}={size}" for axis, size in own.items())
                found[f"{name} for {variant.name}"] = complete_axes(contract, {**axes, **own})
                break
            except ContractError:
                continue
    return found


def realistic_point(contract: Contract, held: Axes, device: torch.device) -> dict[str, Value]:
    """Every axis of a call of which some are held: the others are those of the last realistic point that goes with
    these, of those that have most of the held dtypes, codings and options; on a CPU cut down to what it can check.
    Where none goes with them: as an op is mostly called.

    Raises:
        ContractError: What is held breaks a rule.
    """
    whole: dict[str, Value] = {}
    kinds = {name: value for name, value in held.items() if not isinstance(contract.axis_by_name[name], Int)}
    points: list[Axes] = [*[*contract.benchmarks.values()][::-1], {}]
    for axes in sorted(points, key=lambda axes: len(kinds.items() - axes.items())):
        try:
            point = complete_axes(contract, {**axes, **held})
        except ContractError as error:
            problem = error
            continue
        cut = _cpu_point(contract, point, held)[1] if device.type == "cpu" else point
        if cut is not None:
            return cut
        whole = whole or point
    if not whole:
        raise problem
    return whole


def _cpu_point(contract: Contract, axes: Axes, kept: Container[str] = ()) -> tuple[int, dict[str, Value] | None]:
    """(the largest size whose inputs stay within CPU_BYTES, the point cut to it, but for the axes that are kept; None
    where that breaks a rule).
    """
    size = CPU_SIZE
    while (point := cut_axes(contract, axes, size, kept=kept)) is not None:
        if storage_bytes(contract.case(point, 0, torch.device("meta")).inputs) <= CPU_BYTES:
            break
        size //= 2
        if size == 0:
            return size, None
    return size, point


def complete_axes(contract: Contract, axes: Axes) -> dict[str, Value]:
    """The point with every axis given: what is open as an op is mostly called, options that are numbers as they are by
    default, of an enum the first of its draws.
    """
    defaults = {name: value for bound in contract.options.values() for name, value in bound.items()}

    def choose(name: str, candidates: Any) -> Value:
        if not isinstance(contract.axis_by_name[name], Int):
            chosen: Value = candidates[0]
        else:
            chosen = defaults[name] if defaults.get(name) in candidates else max(candidates)
        return chosen

    return contract.draw_axes(choose, axes)


def cut_axes(
    contract: Contract, axes: Axes, size: int, *, only_batch: bool = False, kept: Container[str] = ()
) -> dict[str, Value] | None:
    """The point with larger sizes (or those of the batch alone) cut down to `size`, the axes that are kept aside; None
    where that breaks a rule.
    """
    cut = dict(axes)
    for axis in contract.axes:
        value = cut.get(axis.name)
        if (
            isinstance(axis, Int)
            and isinstance(value, int)
            and (axis.batch or not only_batch)
            and axis.name not in kept
        ):
            cut[axis.name] = min(value, size)
    try:
        return complete_axes(contract, cut)
    except ValueError:
        return None


@dataclass(frozen=True)
class Prepared:
    """A call with its weight as the variant wants it.

    Attributes:
        case: With that weight, or, where another project's object stands for it, with the contract's own.
        arguments: What is timed.
        variant: What is checked, as it is timed: with such an object in the place of the case's weight.
        microseconds, made_bytes: Of making the weight; None where it is taken as it is.
    """

    case: Case
    arguments: Mapping[str, Any]
    variant: Variant
    microseconds: float | None = None
    made_bytes: int | None = None


def prepare(variant: Variant, case: Case) -> Prepared:
    """Makes the weight that a variant keeps from the case's, as loading a model does."""
    given = case.contract.bind_arguments((), case.inputs)
    weights = {n: timed_preparation(variant, value) for n, value in given.items() if hasattr(value, "map_tensors")}
    made = {name: weight for name, (weight, _) in weights.items() if weight is not given[name]}
    arguments = {**given, **made}
    if not made:
        return Prepared(case, arguments, variant)
    spent_us = sum(seconds for _, seconds in weights.values()) * 1e6
    ours = all(isinstance(value, type(given[name])) for name, value in made.items())
    loaded = {name: given[name] for name in made}
    taken, checked = (
        (replace(case, inputs=arguments, loaded=loaded), variant) if ours else (case, _with_made_weight(variant, made))
    )
    return Prepared(taken, arguments, checked, spent_us, storage_bytes(made))


def prepare_supported(variant: Variant, case: Case) -> Prepared:
    """What `prepare` gives, where the variant takes the call: with the weight as it was loaded or as it prepares it.

    Raises:
        UnsupportedError: It takes neither.
    """
    facts = device_facts(_bind(case)[1])
    reason = variant.unsupported_reason(*_bind(case), facts)
    if reason is not None and variant.prepare is as_it_is:
        raise UnsupportedError(reason)
    try:
        ready = prepare(variant, case)
    except Exception:
        if reason is None:
            raise
        raise UnsupportedError(reason) from None
    if (reason := variant.unsupported_reason(*_bind(ready.case), facts)) is not None:
        raise UnsupportedError(reason)
    return ready


def _bind(case: Case) -> tuple[Axes, torch.device]:
    """What a case's call binds."""
    return case.contract.bind_axes(case.contract.bind_arguments((), case.inputs))


def _with_made_weight(variant: Variant, made: Mapping[str, Any]) -> Variant:
    """The variant whose function is called with what it made, whatever a check passes: a contract takes no other
    project's object.
    """
    function = variant.function
    if function is None:
        return variant

    def on_own(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **made})

    return replace(variant, function=on_own)


def measure(
    variant: Variant,
    point: str,
    axes: Axes,
    device: torch.device,
    *,
    method: Method = Method(),
    tuning: Tuning = NEAREST,
    pins: Mapping[str, int] | None = None,
    seed: int = 0,
    slack: float = 1.0,
) -> Measurement:
    """Checks a variant at a point, times it where it was right, and says what the figures are worth.

    Args:
        point: What people call it.
        axes: All of the contract's axes.
        pins: Config values to hold.
        slack: See `check_case`.

    Nothing is raised for what a variant does wrong: the status and the reason say it.
    """
    contract = variant.contract
    row = Measurement(contract.name, variant.name, variant.kind, point, dict(axes), "failed")
    facts = device_facts(device)
    try:
        case = contract.case(axes, seed, device)
        row = replace(row, bytes_moved=case.bytes_moved, flops=case.flops)
        ready = prepare_supported(variant, case)
        row = replace(row, prepare_us=ready.microseconds, prepared_bytes=ready.made_bytes)
        arguments = contract.bind_arguments((), ready.case.inputs)
        bound, where = contract.bind_axes(arguments)
        kernel = Kernel(variant, tuning, pins or {})
        if variant.kind == "triton":
            config = kernel.config(bound, where, arguments)
            row = replace(row, config=config, config_source=tuning.match(variant, bound, facts))
            if device.type == "cpu":
                return replace(row, status="not measured", reason=INTERPRETED)
        if wrong := _check(variant, ready, row.config, slack):
            return replace(row, status=wrong[0], reason=wrong[1])
        return _timed(row, kernel, ready.arguments, method, facts, device)
    except UnsupportedError as error:
        return replace(row, status="unsupported", reason=str(error))
    except (Exception, SystemExit) as error:  # a variant may be anyone's and raise anything
        return replace(row, status="failed", reason=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _check(variant: Variant, ready: Prepared, config: Config | None, slack: float) -> tuple[Status, str] | None:
    """Why this variant gets no time. Where float64 does not fit the device, a smaller batch is judged instead."""
    case = ready.case
    try:
        result = check_case(ready.variant, case, config, slack=slack)
    except torch.OutOfMemoryError:
        smaller = cut_axes(case.contract, case.axes, CPU_SIZE, only_batch=True)
        if smaller is None or smaller == dict(case.axes):
            raise
        where = next(value.device for value in case.inputs.values() if isinstance(value, torch.Tensor))
        cut = prepare(variant, case.contract.case(smaller, case.seed, where))
        result = check_case(cut.variant, cut.case, config, slack=slack)
    if result.status == "ok":
        return None
    if result.reason.startswith(UnsupportedError.__name__):
        return "unsupported", result.reason
    status: Status = "wrong" if result.status == "wrong" else "failed"
    return status, str(result)


def timed_call(kernel: Kernel, arguments: Mapping[str, Any]) -> Callable[[], object]:
    """What a time is of: one call on arguments as `prepare` gives them.

    A function is called as it is, so that a peer pays for no look of ours, and may have a weight of its own kind; one
    with parts gets them from the kernel.
    """
    function = kernel.variant.function
    if function is None or kernel.variant.parts:
        return partial(kernel, **arguments)
    return partial(function, **kernel.variant.taken_arguments(arguments))


def _timed(
    row: Measurement, kernel: Kernel, prepared: Mapping[str, Any], method: Method, facts: DeviceFacts,
    device: torch.device,
) -> Measurement:  # fmt: skip
    calls = [timed_call(kernel, mine) for mine in _sets_of_data(prepared, method)]
    timing = time_calls(calls, device, samples=method.samples, launch=method.launch, l2=method.l2)
    assert row.bytes_moved is not None
    assert row.flops is not None
    if device.type == "cuda" and method.l2 == "warm":
        unknown = Roofline(None, None, "warm L2: the bytes need not come from memory")
        return replace(row, status="ok", timing=timing, limit=unknown)
    try:
        limit = roofline(timing.median_us, row.bytes_moved, row.flops, row.dtype, facts)
    except RooflineError as error:
        return replace(row, status="void", reason=str(error))
    return replace(row, status="ok", timing=timing, limit=limit)


def _sets_of_data(prepared: Mapping[str, Any], method: Method) -> Iterator[dict[str, Any]]:
    """A call's arguments, copied; behind a cold cache, for as many calls as one graph is to hold."""
    wanted = 1
    if method.launch == "graph" and method.l2 == "cold":
        wanted = min(_MOST_SETS, max(1, -(-_BYTES_PER_SAMPLE // max(storage_bytes(prepared), 1))))
    for _ in range(wanted):
        yield {name: _copy_foreign_weight(value) for name, value in clone_inputs(prepared).items()}


def _copy_foreign_weight(value: Any) -> Any:
    """A copy of what `clone_inputs` passes on: another project's weight object, which must not be warm from the set
    before.
    """
    plain = isinstance(value, torch.Tensor | int | float | str | None) or hasattr(value, "map_tensors")
    return value if plain else deepcopy(value)


def storage_bytes(inputs: Mapping[str, Any]) -> int:
    """Of all tensors among the inputs together; storage that several of them view counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(inputs)]
    return sum({one._cdata: one.nbytes() for one in storages}.values())  # every meta tensor has the address 0
