"""What kernels see of an engine's options, and what an engine refuses before it has a model."""

from collections.abc import Mapping
from typing import Any

import torch

from experiments.document import Document, PathParts, entries
from experiments.planning.models import ModelPlan
from tkernels import Registry
from tkernels.contract import Contract, Int
from tkernels.selection import OpAxes
from tsched.execution.placement import fit_options, unit_sizes
from tsched.options import BYTES_END, OptionError, read_options
from tsched.resolved_options import ResolvedOptions, resolve_options
from tsched.scheduling.scheduler import Scheduler


def kernel_ranges(model: ModelPlan, options: Mapping[str, Any], dtype: torch.dtype) -> OpAxes:
    """The axes that LLM will select kernels for under these scheduler options, before the weights are there.

    Without kv_cache_bytes the number of blocks follows from the memory that is free after loading: it is taken at what
    all sequences could fill, its upper bound.
    """
    given = read_options(options)
    resolved = resolve_options(
        given,
        max_position_embeddings=model.config.max_position_embeddings,
        sizes=unit_sizes(model.config, given.block_size, dtype),
        cache_bytes=given.kv_cache_bytes or BYTES_END,
    )
    return resolved.kernel_axes(model.config)


def engine_problems(
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
    problems = []
    size = read_options({}).block_size if options.get("block_size") is None else options["block_size"]
    paged = [op for op, ranges in kernel_ranges(model, {}, model.config.dtype).items() if "S" in ranges]
    if rules := [rule for op in paged if (rule := _page_rule(ops[op].contract, size))]:
        place = _written_at(document, "block_size", size)
        problems.append(document.problem(place, f"{size} tokens a page, but {rules[0]}"))
    given = dict(options)
    while True:
        try:
            fitted = fit_options(read_options(given), model.config, model.weights, device=device, dtype=dtype)
            break
        except OptionError as error:
            value = given.pop(error.option, None)  # without it, what is wrong with others is said too
            problems.append(document.problem(_written_at(document, error.option, value), str(error)))
            if value is None:
                return problems
    return problems or _scheduler_problems(document, fitted)


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


def _page_rule(contract: Contract, size: int) -> str | None:
    """What a contract says against a page size."""
    axis = contract.axis_by_name["S"]
    assert isinstance(axis, Int)
    return None if axis.allows(size) else f"{contract.name} takes {axis.low} to {axis.high}"
