"""The engine's own options: their defaults, what kernels see of them, and what an engine would refuse before it has a
model.
"""

from collections.abc import Mapping
from typing import Any

import torch

from experiments.document import Document, PathParts, entries
from experiments.planning.models import ModelPlan
from tkernels import Registry
from tkernels.contract import Contract, Int
from tkernels.selection import OpAxes
from tmodel import kv_bytes_per_block
from tsched.execution.placement import fit_options
from tsched.options import OPTIONS, OptionError, read_options
from tsched.scheduling.scheduler import Scheduler


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
    """Scheduler options with the default of each that is not given."""
    return {name: one.default for name, one in OPTIONS.items()} | dict(options)


def engine_problems(
    document: Document,
    model: ModelPlan,
    options: Mapping[str, Any],
    ops: Registry,
    dtype: torch.dtype,
    device: torch.device,
) -> list[str]:
    """Page sizes that no op takes, caches in which not one page fits, and whatever else an engine says against an arm's
    scheduler options before it has a model.
    """
    given = engine_options(options)
    size, available = given["block_size"], given["kv_cache_bytes"]
    paged = [op for op, ranges in kernel_ranges(model, {}, model.config.dtype).items() if "S" in ranges]
    rules = [rule for op in paged if (rule := _page_rule(ops[op].contract, size))]
    if rules:
        return [document.problem(place_of(document, "block_size", size), f"{size} tokens a page, but {rules[0]}")]
    block_bytes = kv_bytes_per_block(model.config, size, dtype)
    if available is not None and available < block_bytes:
        message = f"{available} bytes hold no page: one of {size} tokens takes {block_bytes}"
        return [document.problem(place_of(document, "kv_cache_bytes", available), message)]
    return _conflicts(document, model, given, dtype, device)


def place_of(document: Document, option: str, value: Any) -> PathParts:
    """Where a scheduler option has a value."""
    for index, options in enumerate(entries(document.data.get("scheduler"))):
        written = options.get(option) if isinstance(options, dict) else None
        if value in entries(written):
            inside = (entries(written).index(value),) if isinstance(written, list) else ()
            return ("scheduler", index, option, *inside)
    return ("scheduler", option)


def _conflicts(
    document: Document, model: ModelPlan, given: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> list[str]:
    """What LLM would say against the scheduler's options, all of them given: the same calls, up to the weights."""
    try:
        fitted = fit_options(read_options(given), model.config, model.weights, device=device, dtype=dtype)
    except OptionError as error:
        if error.option == "max_model_len":  # part_problems says it, beside the lengths of the workload
            return []
        return [document.problem(("scheduler", error.option), str(error))]
    try:
        Scheduler(**fitted.scheduler_arguments)
    except ValueError as error:
        return [document.problem(("scheduler",), str(error))]
    except MemoryError:
        sizes = f"{given['max_num_seqs']:,} sequences of {fitted.max_model_len:,} tokens, {fitted.num_blocks:,} blocks"
        message = f"{sizes}, {fitted.num_host_blocks:,} swapped: the tables of these do not fit this machine's memory"
        return [document.problem(("scheduler",), message)]
    return []


def _page_rule(contract: Contract, size: int) -> str | None:
    """What a contract says against a page size."""
    axis = contract.axis_by_name["S"]
    assert isinstance(axis, Int)
    if size & (size - 1):
        return "it must be a power of two"
    return None if axis.allows(size) else f"{contract.name} takes {axis.low} to {axis.high}"
