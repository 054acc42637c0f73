"""From a document to what will run: registry, arms, model, device, dtype; every name is checked, nothing is built."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

import tkernels
from experiments.document import Document, ExperimentError, in_order
from experiments.peers import with_peers
from experiments.planning.arms import Arm, Pick, ServedWorkload
from experiments.planning.engine_options import kernel_ranges
from experiments.planning.live_checks import live_problems
from experiments.planning.model_checks import LookedAt, found_in, look_at
from experiments.planning.models import ModelPlan
from experiments.planning.structure import Part, layouts_of
from experiments.schema import Experiment
from tkernels import Registry, SelectionError, VariantError
from tkernels.selection import OpAxes, with_parts
from tkernels.variant import AxisRanges


@dataclass(frozen=True)
class Plan:
    """An experiment whose every name is known. `folder`: where its paths start. `unsupported` says why an arm cannot
    run here, by its index.
    """

    experiment: Experiment
    folder: Path
    ops: Registry
    variant_folders: tuple[Path, ...]
    arms: tuple[Arm, ...]
    model: ModelPlan | None
    device: torch.device
    dtype: torch.dtype
    unsupported: Mapping[int, str]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def ranges(self) -> OpAxes:
        """op -> axis -> what the arms will use, under the first one's options; without a model, the ops alone."""
        ranges: dict[str, AxisRanges | Sequence[AxisRanges]] = {}
        for arm in self.arms:
            ranges |= {op: axes for op, axes in self._ranges_of(arm).items() if op not in ranges}
        return ranges

    def _ranges_of(self, arm: Arm) -> OpAxes:
        if self.model is None:
            return {op: {} for op in self.experiment.kernels}
        axes = kernel_ranges(self.model, self.arms[0].scheduler, self.dtype)
        return with_parts(axes, arm.choices, self.ops, self.device)

    @cached_property
    def workloads(self) -> tuple[ServedWorkload, ...]:
        """What some arm serves, each once, in the YAML's order."""
        distinct = {(one.name, repr(one.settings)): one for arm in reversed(self.arms) for one in arm.workloads}
        places = {id(workload): place for place, workload in enumerate(self.experiment.workload)}
        return tuple(sorted(distinct.values(), key=lambda one: places[id(one.workload)]))

    def running(self, arm: Arm) -> dict[str, Pick]:
        """op -> the variant that an arm calls, the default where none was named. The parts of a fusion are among them
        where the arm composes it, and only there.
        """
        default = {op: Pick(self.ops[op].default_on(self.device)) for op in self.ranges}
        return {op: arm.picks.get(op, default[op]) for op in self._ranges_of(arm)}

    @cached_property
    def picks(self) -> dict[str, list[Pick]]:
        """op -> the distinct variants that some arm calls."""
        calls = [self.running(arm) for arm in self.arms]
        return {op: list(dict.fromkeys(picks[op] for picks in calls if op in picks)) for op in self.ranges}


@dataclass(frozen=True)
class Sweep:
    """The plans of an experiment: one for every model and dtype that it sweeps, in order.

    document: as it was read, with the full sizes where they were chosen.
    """

    document: Document
    plans: tuple[Plan, ...]
    is_full: bool

    @property
    def experiment(self) -> Experiment:
        """The first plan's; whatever is no axis is the same in all."""
        return self.plans[0].experiment

    @property
    def num_arms(self) -> int:
        """Engines, each counted once for every point of a swept workload that it serves."""
        return sum(max(1, len(arm.workloads)) for plan in self.plans for arm in plan.arms)

    @property
    def num_shapes(self) -> int:
        """Points of `shapes`, each counted once for every variant that is checked and timed there."""
        called = ((plan, op, len(picks)) for plan in self.plans for op, picks in plan.picks.items())
        return sum(len(plan.experiment.shapes.get(op, ())) * count for plan, op, count in called)

    @property
    def extent(self) -> str:
        """ "12 arms, at most 31 tasks": checks, and timings, engines and peers in every replicate."""
        variants = sum(len(picks) for plan in self.plans for picks in plan.picks.values())
        peers = sum(len(plan.experiment.peers) * len(plan.experiment.workload) for plan in self.plans)
        served = self.num_arms if self.experiment.workload else 0
        tasks = variants + (variants + served + peers) * self.experiment.replicates
        return f"{self.num_arms:,} arm{'s' if self.num_arms > 1 else ''}, at most {tasks:,} tasks"


def make_sweep(document: Document, *, full: bool | None = None) -> Sweep:
    """Resolves a document; raises ExperimentError with everything that is wrong. Loads and builds no weights.

    full: whether the sizes of its section `full` are meant; None is where the device is CUDA.
    """
    layouts = layouts_of(document)
    problems = [problem for layout in layouts for problem in layout.problems]
    asked = document.full if full and document.full is not None else document
    ops = _registry(asked, problems)
    device = _device(asked, problems)
    problems += [problem for layout in layouts for problem in live_problems(layout.document, ops)]
    is_full = len(layouts) > 1 and (device is not None and device.type == "cuda" if full is None else full)
    layout = layouts[1 if is_full else 0]
    looked_at = [look_at(layout, part, ops, device) for part in layout.parts]
    problems += found_in([one.problems for one in looked_at], layout.is_ruled)
    if problems or device is None:
        raise ExperimentError(in_order(problems))
    plans = (_plan(part, one, ops, device) for part, one in zip(layout.parts, looked_at, strict=True))
    return Sweep(layout.document, tuple(plans), is_full)


def _plan(part: Part, about: LookedAt, ops: Registry, device: torch.device) -> Plan:
    """The plan of a part that nothing is wrong with."""
    model, dtype = about.model, about.dtype
    assert dtype is not None
    unsupported: dict[int, str] = {}
    if model is not None:
        for index, arm in enumerate(part.arms):
            try:
                axes = kernel_ranges(model, arm.scheduler, dtype)
                tkernels.select(arm.choices, device=device, dtype=dtype, axes=axes, ops=ops)
            except SelectionError as error:
                unsupported[index] = str(error)
    folder = part.document.folder
    folders = tuple((folder / one).resolve() for one in part.experiment.variants_from)
    return Plan(part.experiment, folder, ops, folders, part.arms, model, device, dtype, unsupported)


def _registry(document: Document, problems: list[str]) -> Registry:
    """The house's ops with the peers' and the outside folders' variants; what is wrong with a folder is a problem."""
    ops = with_peers(tkernels.OPS)
    folders = document.data.get("variants_from")
    for index, folder in enumerate(folders if isinstance(folders, list) else ()):
        if isinstance(folder, str) and os.path.isdir(document.folder / folder):
            try:
                ops = ops.with_variants_from(document.folder / folder)
            except (VariantError, tkernels.ContractError) as error:
                problems.append(document.problem(("variants_from", index), str(error)))
    return ops


def _device(document: Document, problems: list[str]) -> torch.device | None:
    """The device that is named, or the best there is; None where it is not there, which is a problem."""
    name = document.data.get("device")
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not isinstance(name, str):
        return None  # the schema says so
    try:
        device = torch.device(name)
    except RuntimeError:
        return None  # and so do the names
    if device.type == "cuda" and not torch.cuda.is_available():
        problems.append(document.problem(("device",), f"{name!r} is not available here; there is cpu"))
        return None
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
