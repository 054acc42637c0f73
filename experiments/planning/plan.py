"""From a document to what will run: registry, arms, model, device, dtype; every name is checked, nothing is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

import tkernels
from experiments.document import Document, ExperimentError, in_order
from experiments.peers import with_peers
from experiments.planning.arms import Arm, Pick, ServedWorkload
from experiments.planning.engine_options import engine_problems, kernel_ranges
from experiments.planning.live_checks import live_problems
from experiments.planning.models import ModelPlan, check_headers, plan_model
from experiments.planning.structure import Part, parts_of
from experiments.quantization.models import quantization_problems
from experiments.schema import AnyWorkload, Experiment, SyntheticWorkload, TraceWorkload
from experiments.workloads import traced_lengths
from tkernels import Registry, SelectionError, VariantError
from tkernels.selection import OpAxes, with_parts
from tkernels.variant import AxisRanges

# Such a model is there to be measured on a GPU; on a CPU a workload made for that would take hours.
_MOST_RANDOM_ON_CPU = 100_000_000


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
        served = [one for arm in self.arms for one in arm.workloads]
        distinct = [one for index, one in enumerate(served) if one not in served[:index]]
        places = {id(workload): place for place, workload in enumerate(self.experiment.workload)}
        return tuple(sorted(distinct, key=lambda one: places[id(one.workload)]))

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
    problems: list[str] = []
    try:
        parts_of(document)
    except ExperimentError as error:
        problems += error.problems
    ops = _registry(document, problems)
    device = _device(document, problems)
    for some in (document, document.full):
        problems += live_problems(some, ops) if some is not None else []
    if device is None or problems:
        raise ExperimentError(in_order(problems))
    is_full = document.full is not None and (device.type == "cuda" if full is None else full)
    if is_full and document.full is not None:
        document = document.full
    plans = []
    for part in parts_of(document):
        try:
            plans.append(_plan(part, ops, device))
        except ExperimentError as error:
            problems += error.problems
    if problems:
        raise ExperimentError(in_order(problems))
    return Sweep(document, tuple(plans), is_full)


def _plan(part: Part, ops: Registry, device: torch.device) -> Plan:
    document, experiment, arms = part.document, part.experiment, part.arms
    problems: list[str] = []
    model: ModelPlan | None = None
    if experiment.model is not None:
        try:
            model = plan_model(experiment.model, document.folder)
            if experiment.workload and experiment.model.path is not None:
                check_headers(model.directory())
        except ValueError as error:
            problems.append(document.problem(("model",), str(error)))
    if model is not None:
        problems += quantization_problems(document, experiment, model)
    if problems:
        raise ExperimentError(problems)
    dtype = getattr(torch, experiment.dtype) if experiment.dtype else (model.config.dtype if model else torch.float32)
    unsupported: dict[int, str] = {}
    if model is not None:
        if device.type == "cpu" and model.random_weights > _MOST_RANDOM_ON_CPU:
            raise ExperimentError([document.problem(("model",), _needs_gpu(model))])
        problems = _model_problems(part, model, arms, ops, device)
        problems += engine_problems(document, model, arms, ops, dtype, device)
        if problems:
            raise ExperimentError(problems)
        for index, arm in enumerate(arms):
            try:
                axes = kernel_ranges(model, arm.scheduler, dtype)
                tkernels.select(arm.choices, device=device, dtype=dtype, axes=axes, ops=ops)
            except SelectionError as error:
                unsupported[index] = str(error)
    folders = tuple((document.folder / folder).resolve() for folder in experiment.variants_from)
    return Plan(experiment, document.folder, ops, folders, arms, model, device, dtype, unsupported)


def _needs_gpu(model: ModelPlan) -> str:
    return (
        f"{model.name} is {model.random_weights / 1e9:.1f} billion random weights, to be measured on a GPU; on a CPU, "
        "which is the device here, that would take hours. --set model.preset=tiny, with a workload that fits it, tries "
        "the same small"
    )


def _registry(document: Document, problems: list[str]) -> Registry:
    """The house's ops with the peers' and the outside folders' variants; what is wrong with a folder is a problem."""
    ops = with_peers(tkernels.OPS)
    folders = document.data.get("variants_from")
    for index, folder in enumerate(folders if isinstance(folders, list) else ()):
        if isinstance(folder, str) and (document.folder / folder).is_dir():
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


def _longest(workload: AnyWorkload) -> int:
    """The most tokens, in and out, of a request whose lengths are known before there is a tokenizer; else 0."""
    if isinstance(workload, TraceWorkload):
        return max(sum(lengths) for lengths in traced_lengths(workload))
    return workload.longest if isinstance(workload, SyntheticWorkload) else 0


def _model_problems(
    part: Part, model: ModelPlan, arms: Sequence[Arm], ops: Registry, device: torch.device
) -> list[str]:
    document, experiment = part.document, part.experiment
    problems = []
    axes = kernel_ranges(model, arms[0].scheduler, torch.float32)
    used = with_parts(axes, {}, ops, device)
    called = {op for arm in arms for op in with_parts(axes, arm.choices, ops, device)}
    for section in ("kernels", "shapes"):
        for op in getattr(experiment, section):
            if op not in used:
                message = f"this model does not use that op; it uses {', '.join(sorted(used))}"
                problems.append(document.problem((section, op), message))
            elif op not in called:
                whole = next(name for name in axes if op in with_parts({name: axes[name]}, {}, ops, device))
                message = (
                    f"no arm calls it, for it is a part of {whole}, of which another variant than composed is chosen"
                )
                problems.append(document.problem((section, op), message))
    longest = model.config.max_position_embeddings
    for length in (length for options in experiment.scheduler for length in options.max_model_len or ()):
        if length > longest:
            message = f"{length} is longer than what the model was made for, {longest}"
            problems.append(document.problem(("scheduler", "max_model_len"), message))
        longest = min(longest, length)
    for index, workload in enumerate(experiment.workload):
        if (most := _longest(workload)) > longest:
            message = f"input_len + output_len reach {most} tokens, the model's length is {longest}"
            problems.append(document.problem(("workload", index), message))
    return problems
