"""From a document to what will run: registry, arms, model, device, dtype; every name is checked, nothing is built."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch

import tkernels
from experiments.arms import Arm, Pick, expand
from experiments.document import Document, ExperimentError, nearest
from experiments.models import ModelPlan, check_headers, plan_model
from experiments.peers import PEERS
from experiments.quantized_models import quantization_problems
from experiments.schema import Experiment, SyntheticWorkload, validate
from tkernels import Registry, SelectionError, VariantError
from tkernels.contract import Contract, Int
from tkernels.selection import OpAxes, with_parts
from tkernels.variant import AxisRanges
from tmodel import kv_bytes_per_block
from tsched import LLM
from tsched.cache_size import num_host_blocks, num_kv_blocks
from tsched.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES
from tsched.scheduler import Scheduler

_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "order": ORDERS,
    "preemption": PREEMPTIONS,
    "prefix_cache": PREFIX_CACHES,
}

# Such a model is there to be measured on a GPU; on a CPU a workload made for that would take hours.
_MOST_RANDOM_ON_CPU = 100_000_000


@dataclass(frozen=True)
class Plan:
    """An experiment whose every name is known. `folder`: where its paths start. `unsupported` says why an arm cannot
    run here, by its index. `source`: the YAML as it was written.
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
    source: str = ""

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


def make_plan(document: Document) -> Plan:
    """Resolves a document; raises ExperimentError with everything that is wrong. Loads and builds no weights."""
    experiment = validate(document)
    problems: list[str] = []
    ops = _registry(document, experiment)
    device = _device(document, experiment.device)
    model: ModelPlan | None = None
    if experiment.model is not None:
        try:
            model = plan_model(experiment.model, document.folder)
            if experiment.workload and experiment.model.path is not None:
                check_headers(model.directory())
        except ValueError as error:
            problems.append(document.problem(("model",), str(error)))
    problems += _kernel_problems(document, experiment, ops)
    problems += _shape_problems(document, experiment, ops)
    problems += _policy_problems(document, experiment)
    if model is not None:
        problems += quantization_problems(document, experiment, model)
    for index, peer in enumerate(experiment.peers):
        if peer not in PEERS:
            there_is = f"there is {', '.join(PEERS)}{nearest(peer, PEERS)}"
            problems.append(document.problem(("peers", index), f"unknown peer {peer!r}: {there_is}"))
    if problems:
        raise ExperimentError(problems)
    arms = expand(experiment)
    dtype = getattr(torch, experiment.dtype) if experiment.dtype else (model.config.dtype if model else torch.float32)
    unsupported: dict[int, str] = {}
    if model is not None:
        if device.type == "cpu" and model.random_weights > _MOST_RANDOM_ON_CPU:
            raise ExperimentError([document.problem(("model",), _needs_gpu(model))])
        problems = _model_problems(document, experiment, model, arms, ops, device)
        problems += _engine_problems(document, model, arms, ops, dtype, device)
        if problems:
            raise ExperimentError(problems)
        for index, arm in enumerate(arms):
            try:
                axes = kernel_ranges(model, arm.scheduler, dtype)
                tkernels.select(arm.choices, device=device, dtype=dtype, axes=axes, ops=ops)
            except SelectionError as error:
                unsupported[index] = str(error)
    folders = tuple((document.folder / folder).resolve() for folder in experiment.variants_from)
    return Plan(
        experiment, document.folder, ops, folders, tuple(arms), model, device, dtype, unsupported, document.text
    )


def kernel_ranges(model: ModelPlan, options: Mapping[str, Any], dtype: torch.dtype) -> OpAxes:
    """The axes that LLM will select kernels for under these scheduler options, before the weights are there.

    Without kv_cache_bytes the number of blocks follows from the memory that is free after loading: it is taken at what
    all sequences could fill, its upper bound.
    """
    given = engine_options(options)
    longest = given["max_model_len"] or model.config.max_position_embeddings
    blocks = given["max_num_seqs"] * -(-longest // given["block_size"])
    if given["kv_cache_bytes"] is not None:
        fitting = given["kv_cache_bytes"] // kv_bytes_per_block(model.config, given["block_size"], dtype)
        blocks = max(1, min(blocks, fitting))
    return model.config.kernel_axes(
        max_num_tokens=given["max_num_batched_tokens"],
        max_num_seqs=given["max_num_seqs"],
        max_model_len=longest,
        block_size=given["block_size"],
        num_blocks=blocks,
    )


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Scheduler options with LLM's own default for each that is not given."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(LLM).parameters.items()}
    return {**defaults, **options}


def _needs_gpu(model: ModelPlan) -> str:
    return (
        f"{model.name} is {model.random_weights / 1e9:.1f} billion random weights, to be measured on a GPU; on a CPU, "
        "which is the device here, that would take hours. --set model.preset=tiny, with a workload that fits it, tries "
        "the same small"
    )


def _registry(document: Document, experiment: Experiment) -> Registry:
    ops = tkernels.OPS
    for index, folder in enumerate(experiment.variants_from):
        try:
            ops = ops.with_variants_from(document.folder / folder)
        except (VariantError, tkernels.ContractError) as error:
            raise ExperimentError([document.problem(("variants_from", index), str(error))]) from None
    return ops


def _device(document: Document, name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ExperimentError(
            [document.problem(("device",), f"{name!r} is not a device; there is cpu, cuda")]
        ) from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        here = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise ExperimentError([document.problem(("device",), f"{name!r} is not available here; there is {here}")])
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _kernel_problems(document: Document, experiment: Experiment, ops: Registry) -> list[str]:
    problems = []
    for op_name, choices in experiment.kernels.items():
        if op_name not in ops:
            message = f"unknown op {op_name!r}: there is {', '.join(ops)}{nearest(op_name, ops)}"
            problems.append(document.problem(("kernels", op_name), message))
            continue
        op = ops[op_name]
        for index, choice in enumerate(choices):
            path = ("kernels", op_name, index)
            if choice.variant not in op.variants:
                there_is = f"there is {', '.join(op.variants)}{nearest(choice.variant, op.variants)}"
                problems.append(document.problem(path, f"unknown {op_name} variant {choice.variant!r}: {there_is}"))
                continue
            variant = op.variants[choice.variant]
            if choice.pins and variant.launch is None:
                problems.append(document.problem(path, f"variant {choice.variant!r} has no config to pin"))
                continue
            known = variant.default_config("").as_dict() if choice.pins else {}
            for pin in choice.pins:
                if pin not in known:
                    message = f"unknown config value {pin!r}: there is {', '.join(known)}{nearest(pin, known)}"
                    problems.append(document.problem((*path, choice.variant, pin), message))
    return problems


def _shape_problems(document: Document, experiment: Experiment, ops: Registry) -> list[str]:
    problems = []
    for op_name, points in experiment.shapes.items():
        if op_name not in ops:
            message = f"unknown op {op_name!r}: there is {', '.join(ops)}{nearest(op_name, ops)}"
            problems.append(document.problem(("shapes", op_name), message))
            continue
        contract = ops[op_name].contract
        for index, point in enumerate(points):
            for axis, value in point.items():
                path = ("shapes", op_name, index, axis)
                if axis not in contract.axis_by_name:
                    known = contract.axis_by_name
                    message = f"unknown axis {axis!r}: there is {', '.join(known)}{nearest(axis, known)}"
                    problems.append(document.problem(path, message))
                elif not contract.axis_by_name[axis].allows(value):
                    message = f"{axis} = {value}, but {contract.axis_by_name[axis].rule}"
                    problems.append(document.problem(path, message))
    return problems


def _policy_problems(document: Document, experiment: Experiment) -> list[str]:
    problems = []
    for (place, options), (kind, known) in product(enumerate(experiment.scheduler), _POLICIES.items()):
        for index, name in enumerate(getattr(options, kind) or ()):
            if name not in known:
                # Quoted: one of them is called 'none'.
                there_is = f"there is {', '.join(map(repr, known))}{nearest(name, known)}"
                path = ("scheduler", place, kind, index)
                problems.append(document.problem(path, f"unknown {kind} {name!r}: {there_is}"))
    return problems


def _engine_problems(
    document: Document, model: ModelPlan, arms: list[Arm], ops: Registry, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Page sizes that no op takes, caches in which not one page fits, and whatever else an engine says against its
    options before it has a model.
    """
    problems: dict[str, None] = {}
    for arm in arms:
        given = engine_options(arm.scheduler)
        size, available = given["block_size"], given["kv_cache_bytes"]
        paged = [op for op, ranges in kernel_ranges(model, arm.scheduler, dtype).items() if "S" in ranges]
        rules = [rule for op in paged if (rule := _page_rule(ops[op].contract, size))]
        block_bytes = kv_bytes_per_block(model.config, size, dtype)
        if rules:
            problems[document.problem(("scheduler", "block_size"), f"{size} tokens a page, but {rules[0]}")] = None
        elif available is not None and available < block_bytes:
            message = f"{available} bytes hold no page: one of {size} tokens takes {block_bytes}"
            problems[document.problem(("scheduler", "kv_cache_bytes"), message)] = None
        else:
            problems |= dict.fromkeys(_conflicts(document, model, given, dtype, device))
    return list(problems)


def _conflicts(
    document: Document, model: ModelPlan, given: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> list[str]:
    """What LLM would say against the scheduler's options, all of them given: the same calls, up to the weights."""
    longest = given["max_model_len"] or model.config.max_position_embeddings
    page_size = given["block_size"]
    limits = {name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens")}
    policies = {kind: given[kind] for kind in _POLICIES}
    key = "kv_cache_fraction"
    try:
        num_blocks = num_kv_blocks(
            model.weights, model.config, kv_cache_bytes=given["kv_cache_bytes"], kv_cache_fraction=given[key],
            block_size=page_size, dtype=dtype, device=device, max_tokens=given["max_num_seqs"] * longest,
        )  # fmt: skip
        key = "swap_bytes"
        swapped = num_host_blocks(
            model.config, given[key], preemption=given["preemption"], block_size=page_size, dtype=dtype
        )
        key = ""
        Scheduler(
            num_blocks=num_blocks, block_size=page_size, max_model_len=longest, num_host_blocks=swapped, **limits,
            decode_share=given["decode_share"], chunked_prefill=given["chunked_prefill"], **policies,
        )  # fmt: skip
    except ValueError as error:
        return [document.problem(("scheduler", key) if key else ("scheduler",), str(error))]
    except MemoryError:
        sizes = f"{given['max_num_seqs']:,} sequences of {longest:,} tokens, {num_blocks:,} blocks, {swapped:,} swapped"
        return [document.problem(("scheduler",), f"{sizes}: the tables of these do not fit this machine's memory")]
    return []


def _page_rule(contract: Contract, size: int) -> str | None:
    """What a contract says against a page size."""
    axis = contract.axis_by_name["S"]
    assert isinstance(axis, Int)
    if size & (size - 1):
        return "it must be a power of two"
    return None if axis.allows(size) else f"{contract.name} takes {axis.low} to {axis.high}"


def _model_problems(
    document: Document, experiment: Experiment, model: ModelPlan, arms: list[Arm], ops: Registry, device: torch.device
) -> list[str]:
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
        if isinstance(workload, SyntheticWorkload) and workload.longest > longest:
            message = f"input_len + output_len reach {workload.longest} tokens, the model's length is {longest}"
            problems.append(document.problem(("workload", index), message))
    return problems
