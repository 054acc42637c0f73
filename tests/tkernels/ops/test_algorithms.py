"""The variants that run one of their op's others: which one at which call."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tkernels import OPS, Config, Run, Tuning
from tkernels.buckets import bucket
from tkernels.contract import Axes
from tkernels.device import INTERPRETER, TARGETS
from tkernels.launch import Kernel
from tkernels.lockfile import Entry, lockfile, record, tuning_key
from tkernels.ops.algorithms import Algorithms
from tkernels.tuning import NEAREST, candidates
from tkernels.verification.covering import chooser

AUTOS: dict[str, Algorithms] = {
    name: op.variants["auto"].module.ALGORITHMS  # type: ignore[union-attr]  # a built-in variant has its module
    for name, op in OPS.items()
    if "auto" in op.variants
}


def drawn_calls(op: str) -> list[tuple[dict[str, Any], Axes]]:
    """(arguments, the axes that they bind) of a few calls that an op's `auto` takes."""
    contract, found = OPS[op].contract, []
    for seed in range(30):
        fixed = {"values": "ordinary"} if "values" in contract.axis_by_name else {}
        case = contract.case(contract.draw_axes(chooser(seed), fixed), seed)
        axes, _ = contract.bind_axes(contract.bind_arguments((), case.inputs))
        if OPS[op].variants["auto"].supports(axes, INTERPRETER) is None:
            found.append((case.inputs, axes))
    return found


@pytest.mark.parametrize("op", AUTOS)
def test_auto_runs_the_variant_whose_region_a_call_is_in(op: str) -> None:
    variants, algorithms, met = OPS[op].variants, AUTOS[op], set()
    default = variants["auto"].default[""]
    for _, axes in drawn_calls(op):
        for name in algorithms.names:
            for axis, ends in variants[name].region.items():
                for end in ends:
                    at = {**axes, axis: end}
                    takers = [variants[one] for one in algorithms.names if variants[one].is_for(at)]
                    takers = [one for one in takers if one.supports(at, INTERPRETER) is None]
                    if variants[name] in takers:
                        assert algorithms.chosen(at, default, INTERPRETER) is takers[0], at
                        met |= {(name, end)} if takers[0] is variants[name] else set()
    assert met == {(name, end) for name in algorithms.names for ends in variants[name].region.values() for end in ends}


@pytest.mark.parametrize("op", AUTOS)
def test_a_launcher_is_told_the_axes_of_its_call(op: str) -> None:
    seen: list[Run] = []
    launched = {"launch": lambda run, *outputs, **arguments: seen.append(run), "chosen": None}
    listening = replace(OPS[op].variants["auto"], **launched)
    calls = drawn_calls(op)
    for arguments, _ in calls:
        Kernel(listening, NEAREST, {})(**arguments)
    assert [run.axes for run in seen] == [axes for _, axes in calls]


@pytest.mark.parametrize("op", AUTOS)
def test_auto_launches_its_parts_as_the_tuning_in_use_has_them(op: str, tmp_path: Path) -> None:
    auto, algorithms, contract = OPS[op].variants["auto"], AUTOS[op], OPS[op].contract
    arguments, axes = drawn_calls(op)[0]
    arguments, facts = contract.bind_arguments((), arguments), TARGETS["sm_90"]
    part = algorithms.chosen(axes, auto.default[""], facts)
    offered = candidates(part, facts.arch)
    slowest_first = tuple((config, 10.0 - index, "") for index, config in enumerate(offered[:9]))
    entry = Entry(*tuning_key(part, bucket(part, axes)), config=slowest_first[-1][0], timings=slowest_first)
    record(lockfile(part, facts, tmp_path), facts, entry)
    launched: list[Config] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: Any, config: Config) -> None:
        launched.append(config)

    device = torch.device("cpu")
    outputs = contract.allocate_outputs(axes, arguments, device)
    kernel = Kernel(auto, Tuning("nearest", tmp_path), {}, note)
    kernel.launch_into(outputs, arguments, axes, device, facts, auto.default[""])
    assert slowest_first[-1][0] != part.default_config(facts.arch)
    assert slowest_first[-1][0] in launched  # a mixture's first launches are its sort's
