"""Fills Triton's cache from several processes at once, so that the steps after it find everything compiled."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import torch

from experiments.gpu_report.correctness import cases, signatures
from experiments.gpu_report.marks import MARKS
from experiments.gpu_report.steps import SIGNATURES, report_points, triton_variants
from tkernels.config import Config
from tkernels.device import device_facts
from tkernels.inputs import map_tensors
from tkernels.isolation import Prepare, Server, ServerError, Tell, Work
from tkernels.launch import Kernel
from tkernels.measurement import cut_axes, prepare
from tkernels.registry import Registry, builtin_ops
from tkernels.tuning import NEAREST, candidates
from tkernels.variant import Variant
from tkernels.verification.check import check_case

MOST_PROCESSES = 16

# Sizes of the batch at which candidates are compiled: a multiple of every alignment that Triton specializes on.
_BATCH = 64


def processes() -> int:
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1))


def in_parallel(device: torch.device, seconds: float) -> list[str]:
    """Compiles one share of the work in each process, and returns why some did not come to their end: that loses
    nothing but time.
    """
    count = processes()
    with ThreadPoolExecutor(count) as threads:
        found = threads.map(lambda index: _compile_elsewhere(device, index, count, max(seconds, 1.0)), range(count))
        return [problem for problem in found if problem is not None]


def _compile_elsewhere(device: torch.device, index: int, count: int, seconds: float) -> str | None:
    """Compiles a share in a process of its own; says why where that did not come to its end."""
    try:
        with Server({"TRITON_INTERPRET": "0"}) as server:
            server.load("experiments.gpu_report.precompile:prepare_shares", str(device))
            return server.run([index, count], lambda message: None, seconds).death
    except ServerError as error:
        return f"its server {error}"


def prepare_shares(name: str) -> Prepare:
    """In a server that compiles: a task is the number of a share, and how many there are: every such piece of the work.
    What does not compile is for its own step to report.
    """

    def prepare(share: Sequence[int]) -> Work:
        index, count = share

        def work(tell: Tell) -> None:
            device = torch.device(name)
            torch.cuda.set_device(device)
            for variant, compile_piece in islice(_pieces(builtin_ops(), device), index, None, count):
                try:
                    compile_piece()
                except Exception as error:
                    print(f"{variant.contract.name}.{variant.name}: {error}", file=sys.stderr)

        return work

    return prepare


def _pieces(ops: Registry, device: torch.device) -> Iterator[tuple[Variant, Callable[[], None]]]:
    """Every variant at its signatures, and with its candidate configs at the marks' points."""
    for variant in triton_variants(ops):
        for place in range(SIGNATURES):
            yield variant, partial(_compile_signature, variant, place, device)
    for variant in triton_variants(ops):
        points = report_points(variant.contract)
        for name in dict.fromkeys(mark.point for mark in MARKS if mark.op == variant.contract.name):
            for config in candidates(variant, device_facts(device).arch):
                yield variant, partial(_compile_config, variant, points[name], config, device)


def _compile_signature(variant: Variant, place: int, device: torch.device) -> None:
    found = signatures(variant, device, place + 1)
    if len(found) > place:
        for case in cases(variant, found[place], 1, device):
            check_case(variant, case, found[place].config)


def _compile_config(variant: Variant, axes: Mapping[str, Any], config: Config, device: torch.device) -> None:
    """Compiles what the launcher would launch at a small batch of the point, without running it."""
    contract, facts = variant.contract, device_facts(device)
    small = cut_axes(contract, axes, _BATCH, only_batch=True) or axes
    case = prepare(variant, contract.case(small, 0, device)).case
    arguments = contract.bind_arguments((), case.inputs)
    bound, _ = contract.bind_axes(arguments)
    meta = torch.device("meta")

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta)

    def compiling(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        kernel.warmup(grid=grid, **arguments, num_warps=config.num_warps, num_stages=config.num_stages)

    shapes = map_tensors(arguments, to_meta)
    outputs = contract.allocate_outputs(bound, shapes, meta)
    Kernel(variant, NEAREST, {}, compiling).launch_into(outputs, shapes, bound, meta, facts, config)
