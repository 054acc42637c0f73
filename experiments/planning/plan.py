"""Round two: from a sound document to what will run: registry, models, device, dtype. Nothing is built."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import tkernels
from experiments.document import Document, ExperimentError, sort_problems
from experiments.peers import with_peers
from experiments.planning.arms import Arm, Pick, ServedWorkload
from experiments.planning.layout import Layout, Part, lay_out
from experiments.planning.models import ModelPlan, check_headers, plan_model
from experiments.planning.plan_checks import kernel_ranges, part_problems, registry_problems
from experiments.schema import Experiment
from tkernels import Registry, SelectionError, VariantError
from tkernels.contract import Value
from tkernels.outside import broken_files
from tkernels.selection import OpAxes, with_parts
from tkernels.silence import silenced
from tkernels.variant import AxisRanges
from tmodel import Architectures, architectures_with, known_architectures
from tmodel.outside import why_broken
from tsched.execution.placement import find_device

Shapes = Mapping[str, Sequence[Mapping[str, Value]]]
"""Op -> points."""


@dataclass(frozen=True)
class Plan:
    """What one model of an experiment runs in one dtype.

    Attributes:
        folder: Where the experiment's paths start.
        shapes: Op -> the points of `shapes`.
        full_shapes: The same in full sizes, where these are not what runs.
    """

    experiment: Experiment
    folder: Path
    ops: Registry
    arms: tuple[Arm, ...]
    shapes: Shapes
    model: ModelPlan | None
    device: torch.device
    dtype: torch.dtype
    full_shapes: Shapes

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def variant_folders(self) -> tuple[Path, ...]:
        return tuple((self.folder / one).resolve() for one in self.experiment.variants_from)

    @property
    def architecture_folders(self) -> tuple[Path, ...]:
        return tuple((self.folder / one).resolve() for one in self.experiment.architectures_from)

    def engine_options(self, arm: Arm) -> dict[str, Any]:
        """The options of LLM that `arm` has; how configs are tuned is its runner's to say."""
        own = {"kernels": arm.choices, "dtype": self.dtype, "device": self.device, "ops": self.ops}
        return {**own, "architectures_from": self.architecture_folders, **arm.scheduler}

    @cached_property
    def unsupported(self) -> dict[int, str]:
        """Why an arm cannot run here, by its index."""
        found: dict[int, str] = {}
        if self.model is None:
            return found
        for index, arm in enumerate(self.arms):
            try:
                axes = kernel_ranges(self.model, arm.scheduler, self.device, self.dtype)
                tkernels.select(arm.choices, device=self.device, dtype=self.dtype, axes=axes, ops=self.ops)
            except SelectionError as error:
                found[index] = str(error)
        return found

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
        axes = kernel_ranges(self.model, self.arms[0].scheduler, self.device, self.dtype)
        return with_parts(axes, arm.choices, self.ops, self.device)

    @cached_property
    def workloads(self) -> tuple[ServedWorkload, ...]:
        """What some arm serves, each once, in the YAML's order."""
        return self._distinct(one for arm in reversed(self.arms) for one in arm.workloads)

    @cached_property
    def http_workloads(self) -> tuple[ServedWorkload, ...]:
        """What servers elsewhere serve, the same way."""
        return self._distinct(one for arm in reversed(self.arms) for one in arm.http_workloads)

    def _distinct(self, workloads: Iterable[ServedWorkload]) -> tuple[ServedWorkload, ...]:
        distinct = {(one.name, repr(one.settings)): one for one in workloads}
        places = {id(workload): place for place, workload in enumerate(self.experiment.workload)}
        return tuple(sorted(distinct.values(), key=lambda one: places[id(one.workload)]))

    def running(self, arm: Arm) -> dict[str, Pick]:
        """op -> the variant that an arm calls, the default where none was named. The parts of a fusion are among them
        where the arm composes it, and only there.
        """
        default = {op: Pick(self.ops[op].default_on(self.device, arm.choices)) for op in self.ranges}
        return {op: arm.picks.get(op, default[op]) for op in self._ranges_of(arm)}

    @cached_property
    def callers(self) -> dict[str, dict[Pick, list[int]]]:
        """op -> the distinct variants that some arm calls -> the indices of those arms."""
        found: dict[str, dict[Pick, list[int]]] = {op: {} for op in self.ranges}
        for index, arm in enumerate(self.arms):
            for op, pick in self.running(arm).items():
                found[op].setdefault(pick, []).append(index)
        return found

    @property
    def picks(self) -> dict[str, list[Pick]]:
        """op -> the distinct variants that some arm calls."""
        return {op: list(picks) for op, picks in self.callers.items()}


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
        """As it was written, the same in all plans."""
        return self.plans[0].experiment

    @property
    def num_arms(self) -> int:
        """Engines, each counted once for every point of a swept workload that it serves, and servers elsewhere."""
        engines = sum(len(arm.workloads) or not plan.http_workloads for plan in self.plans for arm in plan.arms)
        return engines + len(self.plans[0].http_workloads)

    @property
    def num_shapes(self) -> int:
        """Points of `shapes`, each counted once for every variant that is checked and timed there."""
        called = ((plan, op, len(picks)) for plan in self.plans for op, picks in plan.picks.items())
        return sum(len(plan.shapes.get(op, ())) * count for plan, op, count in called)

    @property
    def extent(self) -> str:
        """ "12 arms, at most 31 tasks": checks, and timings, engines and peers in every replicate."""
        variants = sum(len(picks) for plan in self.plans for picks in plan.picks.values())
        peers = sum(len(plan.experiment.peers) * len(plan.workloads) for plan in self.plans)
        served = self.num_arms if self.experiment.workload else 0
        tasks = variants + (variants + served + peers) * self.experiment.replicates
        return f"{self.num_arms:,} arm{'s' if self.num_arms > 1 else ''}, at most {tasks:,} tasks"


def make_sweep(document: Document, *, full: bool | None = None, broken: Mapping[Path, str] | None = None) -> Sweep:
    """Resolves a document; loads and builds no weights.

    Args:
        broken: The files of outside variants that are left out, each with its reason; None is to find out.
        full: Whether the sizes of its section `full` are meant; None is where the device is CUDA.

    Raises:
        ExperimentError: All faults of round one, which needs no torch; of a document that has none, all of round two.
    """
    layouts = lay_out(document)
    problems: list[str] = []
    asked = layouts[-1] if full else layouts[0]
    ops = _open_registry(asked, broken, problems)
    architectures = _open_architectures(asked, broken is None, problems)
    device = _find_device(asked, problems)
    is_full = len(layouts) > 1 and (device is not None and device.type == "cuda" if full is None else full)
    layout = layouts[1] if is_full else layouts[0]
    for one in layouts:
        problems += registry_problems(one, ops)
    full_shapes = _values(layouts[1]) if len(layouts) > 1 and not is_full else {}
    plans = [_make_plan(layout, part, ops, architectures, device, full_shapes, problems) for part in layout.parts]
    if problems:
        raise ExperimentError(sort_problems(problems))
    return Sweep(layout.document, tuple(filter(None, plans)), is_full)


def _values(layout: Layout) -> Shapes:
    """The points of its `shapes`."""
    return {op: [shape.values for shape in shapes] for op, shapes in layout.shapes.items()}


def _make_plan(
    layout: Layout,
    part: Part,
    ops: Registry,
    architectures: Architectures,
    device: torch.device | None,
    full_shapes: Shapes,
    problems: list[str],
) -> Plan | None:
    """The part's plan; None, and what is wrong, where there can be none."""
    model = _read_model(layout, part, architectures, problems)
    dtype = _find_dtype(part, model)
    problems += part_problems(layout, part, model, ops, dtype, device or torch.device("cpu"))
    if problems or device is None or dtype is None:
        return None
    return Plan(
        experiment=layout.experiment,
        folder=layout.document.folder,
        ops=ops,
        arms=part.arms,
        shapes=_values(layout),
        model=model,
        device=device,
        dtype=dtype,
        full_shapes=full_shapes,
    )


def _find_dtype(part: Part, model: ModelPlan | None) -> torch.dtype | None:
    """The dtype that is named, else the model's, which is None where it cannot be read; float32 without a model."""
    if part.dtype is not None:
        dtype: torch.dtype = getattr(torch, part.dtype)
        return dtype
    if part.model is None:
        return torch.float32
    return model.config.dtype if model is not None else None


def _read_model(layout: Layout, part: Part, architectures: Architectures, problems: list[str]) -> ModelPlan | None:
    """The part's model, with its configuration read; None where there is none, or it cannot be read."""
    if part.model is None:
        return None
    try:
        model = plan_model(part.model, layout.document.folder, architectures)
    except ValueError as error:
        problems.append(layout.document.problem(part.model_place, str(error)))
        return None
    try:
        if layout.experiment.workload and part.model.path is not None:
            check_headers(model.directory())
    except ValueError as error:
        problems.append(layout.document.problem(part.model_place, str(error)))
    return model


def _open_registry(layout: Layout, broken: Mapping[Path, str] | None, problems: list[str]) -> Registry:
    """The house's ops with the peers' and the outside folders' variants. What is wrong with a folder is a problem; a
    broken file is left out.
    """
    ops = with_peers(tkernels.OPS)
    folders = [layout.document.folder / folder for folder in layout.experiment.variants_from]
    broken = broken_files(folders) if broken is None else broken
    for index, folder in enumerate(folders):
        try:
            with silenced():
                ops = ops.with_variants_from(folder, broken)
        except (VariantError, tkernels.ContractError) as error:
            problems.append(layout.document.problem(("variants_from", index), str(error)))
    return ops


def _open_architectures(layout: Layout, is_first: bool, problems: list[str]) -> Architectures:
    """The house's and the outside folders' architectures; what is wrong with a folder is a problem.

    Args:
        layout: Of the document.
        is_first: Whether nobody has imported these files yet; they are then tried in a process of their own.
        problems: Gets what is wrong.
    """
    folders = [layout.document.folder / folder for folder in layout.experiment.architectures_from]
    if is_first and (reason := why_broken(folders)) is not None:
        problems.append(layout.document.problem(("architectures_from",), reason))
        return known_architectures()
    return architectures_with(folders)


def _find_device(layout: Layout, problems: list[str]) -> torch.device | None:
    """The device that is named, or the best there is; None where it is not there, which is a problem."""
    try:
        device = find_device(layout.experiment.device)
    except ValueError as error:
        problems.append(layout.document.problem(("device",), str(error)))
        return None
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
