"""The variants that run one of their op's others: which one at which call."""

from dataclasses import replace
from typing import Any

import pytest

from tkernels import OPS, Run
from tkernels.contract import Axes
from tkernels.device import INTERPRETER
from tkernels.launch import Kernel
from tkernels.ops.algorithms import Algorithms
from tkernels.tuning import NEAREST
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
        case = contract.case(contract.draw_axes(chooser(seed), {"values": "ordinary"}), seed)
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
                    if variants[name].supports(at, INTERPRETER) is None:
                        assert algorithms.chosen(at, default, INTERPRETER).name == name, at
                        met.add((name, end))
    assert met == {(name, end) for name in algorithms.names for ends in variants[name].region.values() for end in ends}


@pytest.mark.parametrize("op", AUTOS)
def test_a_launcher_is_told_the_axes_of_its_call(op: str) -> None:
    seen: list[Run] = []
    listening = replace(OPS[op].variants["auto"], launch=lambda run, *outputs, **arguments: seen.append(run))
    calls = drawn_calls(op)
    for arguments, _ in calls:
        Kernel(listening, NEAREST, {})(**arguments)
    assert [run.axes for run in seen] == [axes for _, axes in calls]
