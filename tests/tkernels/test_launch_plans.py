"""A repeated call is launched by a plan as its launcher would launch it, and what has no plan keeps its launcher.

Kernels are launched here as in a process that compiles, onto a stub of the driver: see `stub_driver`.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from triton import knobs

from tests.tkernels.outside import write_variant
from tests.tkernels.stub_driver import StubDriver, as_the_driver_sees_it, compiling, jit_function
from tkernels import OPS
from tkernels.call_structure import read_structure, tensors_of
from tkernels.contract import unpack
from tkernels.device import INTERPRETER
from tkernels.launch import Kernel, Run
from tkernels.launch_plan import LaunchPlan
from tkernels.preparation import prepared_case
from tkernels.recording import Recording
from tkernels.tuning import NEAREST
from tkernels.variant import UnsupportedError, Variant

CPU = torch.device("cpu")
TRITON = [(op.name, v.name) for op in OPS.values() for v in op.variants.values() if v.launch is not None]

WITHOUT_PLAN = {("dequant_gemm", "dequantize_then_matmul")}
"""Launchers that compute on the host too: this one multiplies by torch."""


@pytest.fixture
def stub() -> Iterator[StubDriver]:
    with compiling() as made:
        yield made


def kernel_of(op: str, variant: str) -> Kernel:
    return Kernel(OPS[op].variants[variant], NEAREST, {})


def plan_of(kernel: Kernel, *args: Any, **kwargs: Any) -> LaunchPlan | None:
    structure, _ = read_structure(args, kwargs, kernel._writes)
    return kernel._known[structure].plan  # type: ignore[index]


def drawn_calls(variant: Variant, wanted: int) -> Iterator[list[dict[str, Any]]]:
    """Calls of one structure on tensors of their own, at points that the variant supports."""
    contract, left = variant.contract, wanted
    off = {
        axis: value
        for option in variant.left_out
        for axis, value in contract.options[option].items()
        if axis in contract.axis_by_name
    }
    for seed in range(120):
        choices = random.Random(seed)
        axes = contract.draw_axes(lambda name, values: choices.choice(list(values)), off)  # noqa: B023
        calls: list[dict[str, Any]] = []
        try:
            for other in (seed, seed + 1000, seed + 2000):
                call = contract.bind_arguments((), prepared_case(variant, contract.case(axes, other)).inputs)
                if variant.refusal(contract.bind_axes(call)[0], INTERPRETER) is None:
                    calls.append(call)
        except UnsupportedError:
            continue
        places = bool(contract.writes or contract.consumes)
        alike = [
            call for call in calls if read_structure((), call, places)[0] == read_structure((), calls[0], places)[0]
        ]
        if len(alike) > 1:
            yield alike
            left -= 1
        if not left:
            return


@pytest.mark.parametrize(("op", "name"), TRITON)
def test_a_plan_gives_kernels_what_the_launcher_gives_them(op: str, name: str, stub: StubDriver) -> None:
    variant, num_compared = OPS[op].variants[name], 0
    for first, *others in drawn_calls(variant, wanted=5):
        kernel = Kernel(variant, NEAREST, {})
        kernel(**first)
        plan = plan_of(kernel, **first)
        assert (plan is None) == ((op, name) in WITHOUT_PLAN)
        for call in others if plan is not None else ():
            assert plan is not None
            launched, addresses = launches_of(variant, call)
            assert [(one.grid, one.arguments.at(addresses)) for one in plan.launches] == launched
            num_compared += len(launched)
    assert num_compared >= 3 or (op, name) in WITHOUT_PLAN


class Ends:
    """An address, or a descriptor's, compared by what the driver would see."""

    def __init__(self, value: Any) -> None:
        self.seen = as_the_driver_sees_it(value)

    def __eq__(self, other: object) -> bool:
        return self.seen == as_the_driver_sees_it(other)


def launches_of(variant: Variant, call: Mapping[str, Any]) -> tuple[list[tuple[Any, list[Any]]], list[int]]:
    """(grid, arguments by the kernel's parameters) of each launch of the launcher, and the addresses of its tensors."""
    axes, device = variant.contract.bind_axes(call)
    config = NEAREST.resolve(variant, axes, INTERPRETER)
    buffers = variant.workspace(axes, config, INTERPRETER)
    workspace = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in buffers.items()}
    outputs = variant.contract.allocate_outputs(axes, call, device)
    launched: list[tuple[Any, list[Any]]] = []

    def door(kernel: Any, grid: tuple[int, ...], given: Mapping[str, Any], config: Any) -> None:
        parameters = jit_function(kernel).signature.parameters
        values = [Ends(given.get(name, parameter.default)) for name, parameter in parameters.items()]
        launched.append(((*grid, 1, 1)[:3], values))

    variant.run_launcher(Run(INTERPRETER, axes, config, workspace, door), outputs, call)
    fresh = [workspace[name] for name, one in buffers.items() if not one.zeroed]
    zeroed = [workspace[name] for name, one in buffers.items() if one.zeroed]
    made = [one for one in outputs.values() if one is not None] + fresh + zeroed
    return launched, [one.data_ptr() for one in (*tensors_of((), call), *made)]


def rows(tokens: int = 3, hidden: int = 64, **form: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    return torch.ones(tokens, hidden, **form), torch.ones(hidden, **form), 1e-6


def ready(op: str = "rms_norm", variant: str = "row_per_program") -> Kernel:
    """A kernel that has planned what `rows` calls."""
    kernel = kernel_of(op, variant)
    kernel(*rows())
    assert plan_of(kernel, *rows()) is not None
    return kernel


@contextmanager
def no_launcher() -> Iterator[None]:
    with mock.patch.object(Variant, "run_launcher", side_effect=AssertionError("its launcher runs")):
        yield


def launches_by_a_plan(kernel: Kernel, *args: Any, **kwargs: Any) -> bool:
    try:
        with no_launcher():
            kernel(*args, **kwargs)
    except AssertionError:
        return False
    return True


def test_the_second_call_is_launched_by_the_plan_like_the_first_on_its_own_tensors_and_stream(stub: StubDriver) -> None:
    kernel = kernel_of("add_rms_norm", "row_per_program")
    calls = [(rows()[0], *rows()) for _ in range(4)]
    results = []
    for number, call in enumerate(calls):
        stub.stream = number
        with no_launcher() if number else nullcontext():
            results.append(kernel(*call))
    assert stub.started is not None
    for number, (call, result, started) in enumerate(zip(calls, results, stub.started, strict=True)):
        assert started.stream == number
        assert started.grid == (3, 1, 1)
        assert started.arguments[:5] == [one.data_ptr() for one in (*result, *call[:3])]
        assert started.arguments[5:] == stub.started[0].arguments[5:]
    forms = [[(one.shape, one.stride(), one.dtype) for one in result] for result in results]
    assert forms == forms[:1] * 4


@pytest.mark.parametrize(
    "other",
    [
        rows(tokens=4),
        rows(hidden=65),
        rows(dtype=torch.float16),
        (torch.ones(3, 65)[:, :64], *rows()[1:]),
        (torch.ones(3 * 64 + 1)[1:].view(3, 64), *rows()[1:]),
        (*rows()[:2], 1e-5),
    ],
    ids=["shape", "width", "dtype", "strides", "alignment", "number"],
)
def test_a_call_of_another_structure_has_another_plan(other: tuple[Any, ...], stub: StubDriver) -> None:
    kernel = ready()
    assert launches_by_a_plan(kernel, *rows())
    assert not launches_by_a_plan(kernel, *other)
    kernel(*other)
    assert launches_by_a_plan(kernel, *other)
    assert launches_by_a_plan(kernel, *rows())
    assert stub.started is not None
    planned, of_other = stub.started[-1].arguments[2:], stub.started[-2].arguments[2:]
    assert of_other == stub.started[-3].arguments[2:] or planned == of_other


def test_plus_and_minus_zero_are_two_numbers() -> None:
    assert read_structure((torch.ones(1), 0.0), {}, False)[0] != read_structure((torch.ones(1), -0.0), {}, False)[0]


def test_tensors_elsewhere_have_another_structure() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert read_structure((here,), {}, False)[0] != read_structure((there,), {}, False)[0]


def test_where_memory_is_shared_is_part_of_the_structure_of_an_op_that_writes() -> None:
    whole = torch.zeros(2, 8)
    shared, apart = (whole[:, :4], whole[:, 4:]), (whole[:, :4], torch.zeros(2, 8)[:, 4:])
    assert read_structure(shared, {}, True)[0] != read_structure(apart, {}, True)[0]
    assert read_structure(shared, {}, False)[0] == read_structure(apart, {}, False)[0]
    nearer = (whole[:, :4], whole[:, 2:6])
    assert read_structure(shared, {}, True)[0] != read_structure(nearer, {}, True)[0]


def test_a_tensor_that_is_given_twice_is_planned_for_no_other_call(stub: StubDriver) -> None:
    kernel = kernel_of("add_rms_norm", "row_per_program")
    x, weight, eps = rows()
    for _ in range(3):
        kernel(x, x, weight, eps)
    assert plan_of(kernel, x, x, weight, eps) is None
    other = torch.ones_like(x)
    kernel(x, other, weight, eps)
    assert stub.started is not None
    assert stub.started[-1].arguments[2:4] == [x.data_ptr(), other.data_ptr()]


def test_a_plan_keeps_none_of_a_calls_tensors(stub: StubDriver) -> None:
    kernel = kernel_of("paged_decode", "last_arriver")
    first, second, *_ = next(drawn_calls(kernel.variant, wanted=1))
    kernel(**first)
    out = kernel(**second)
    assert plan_of(kernel, **second) is not None
    assert stub.started is not None
    stub.started.clear()
    watched = [weakref.ref(one) for one in (*tensors_of((), second), *unpack(out))]
    del first, second, out
    gc.collect()
    assert [one() for one in watched] == [None] * len(watched)


def test_a_workspace_is_new_in_each_call_and_a_zeroed_one_is_kept_and_cleared_after_a_launch_that_fails(
    stub: StubDriver,
) -> None:
    kernel = kernel_of("paged_decode", "last_arriver")
    (call, *_) = next(drawn_calls(kernel.variant, wanted=1))
    kernel(**call)
    made: list[torch.Tensor] = []
    empty_strided = torch.empty_strided

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(empty_strided(*args, **kwargs))
        return made[-1]

    with mock.patch("torch.empty_strided", noting), no_launcher():
        for _ in range(2):
            kernel(**call)
    assert stub.started is not None
    places = [started.named for started in stub.started]
    assert len({place["arrived_ptr"] for place in places}) == 1
    scratch = [one for one in made if one.dtype is torch.uint8]
    for one, place in zip(scratch, places[-2:], strict=True):
        parts = [place[name] - one.data_ptr() for name in ("acc_ptr", "m_ptr", "l_ptr")]
        assert parts == sorted({0, *parts})
        assert parts[-1] < one.nbytes
    # Tests before this one may have launched on the meta device.
    kept = next(one for one in kernel.variant.zeroed._kept.values() if one.device == scratch[0].device)
    kept.fill_(1)
    interrupted = mock.patch("tkernels.launch_plan.PlannedLaunch.start", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        kernel(**call)
    assert not kept.any()


def test_hooks_of_a_launch_hear_of_every_planned_one(stub: StubDriver) -> None:
    kernel, heard = ready(), []
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    with mock.patch.object(enter, "calls", [lambda metadata: heard.append(("enter", metadata.get()["name"]))]):
        assert launches_by_a_plan(kernel, *rows())
    with mock.patch.object(leave, "calls", [lambda metadata: heard.append(("leave", metadata.get()["name"]))]):
        assert launches_by_a_plan(kernel, *rows())
    assert launches_by_a_plan(kernel, *rows())
    name = "rms_norm_row_per_program"
    assert heard == [("enter", name), ("leave", name)]


def test_what_triton_would_compile_again_or_run_before_a_launch_ends_the_plan(stub: StubDriver) -> None:
    kernel = ready()
    for knob, name in ((knobs.runtime, "debug"), (knobs.compilation, "instrumentation_mode")):
        with mock.patch.dict(vars(knob), {name: True}):
            assert not launches_by_a_plan(kernel, *rows())
        assert launches_by_a_plan(kernel, *rows())
    plan = plan_of(kernel, *rows())
    assert plan is not None
    (launch,) = plan.launches
    with mock.patch.object(launch.kernel, "pre_run_hooks", [print]):
        assert not plan.holds()
    read = {"SIZE": 4}
    assert replace(launch, constants=((read, "SIZE", read["SIZE"]),)).holds()
    assert not replace(launch, constants=((read, "SIZE", 5),)).holds()


HOST_WORK = {
    "a write on the host": ("    tokens, width", "    out.zero_()\n    tokens, width"),
    "a tensor of its own": ("gate_up_ptr=gate_up,", "gate_up_ptr=torch.ones(99),"),
    "an address as a number": ("width=width,", "width=gate_up.data_ptr(),"),
    "no number": ("FACTOR=1,", "FACTOR=(1,),"),
}


@pytest.mark.parametrize("change", HOST_WORK.values(), ids=HOST_WORK)
def test_a_launcher_whose_launches_do_not_follow_from_the_structure_is_run_each_time(
    change: tuple[str, str], stub: StubDriver, tmp_path: Path
) -> None:
    variant = OPS.with_variants_from(write_variant(tmp_path, change))["swiglu"].variants["doubled"]
    kernel, x = Kernel(variant, NEAREST, {}), torch.ones(2, 32)
    for _ in range(3):
        kernel(x)
    assert plan_of(kernel, x) is None
    assert not launches_by_a_plan(kernel, x)


def test_a_view_that_a_launcher_makes_is_found_in_another_call(stub: StubDriver, tmp_path: Path) -> None:
    change = ("gate_up_ptr=gate_up,", "gate_up_ptr=gate_up.view(torch.int32)[:, 4:],")
    variant = OPS.with_variants_from(write_variant(tmp_path, change))["swiglu"].variants["doubled"]
    kernel, inputs = Kernel(variant, NEAREST, {}), [torch.ones(2, 32) for _ in range(3)]
    for x in inputs:
        kernel(x)
    assert plan_of(kernel, inputs[0]) is not None
    assert stub.started is not None
    assert [one.arguments[1] for one in stub.started] == [x.data_ptr() + 16 for x in inputs]


def test_only_tritons_own_launch_is_planned() -> None:
    kernel, heard = replace(kernel_of("rms_norm", "row_per_program"), door=lambda *launch: heard.append(launch)), []
    with compiling():
        for _ in range(4):
            kernel(*rows())
    assert len(heard) == 4
    interpreted = kernel_of("rms_norm", "row_per_program")
    for _ in range(3):
        interpreted(*rows())
    assert plan_of(interpreted, *rows()) is None


def test_a_plan_launches_in_the_sections_that_its_launcher_entered(stub: StubDriver) -> None:
    recording = Recording("cpu")
    variant = OPS["moe_mlp"].variants["padded_tiles"]
    kernel = Kernel(variant, NEAREST, {}, ranges=recording)
    x, experts, weights = torch.ones(3, 32), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    call = (x, experts, weights, torch.ones(4, 32, 32), torch.ones(4, 32, 16))
    names: list[list[str]] = []
    for _ in range(2):
        recording.clear()
        kernel(*call)
        names.append([span.name for span in recording.spans()])
    assert names == [["moe_mlp.padded_tiles", "moe_mlp sort", "moe_mlp up", "moe_mlp down"]] * 2
    plan = plan_of(kernel, *call)
    assert plan is not None
    launched = [[one.kernel.fn.__name__ for one in launches] for _, launches in plan.sections]
    assert launched == [
        ["sort_by_expert_one_program"], ["moe_mlp_padded_tiles"],
        ["grouped_matmul_padded_tiles", "grouped_matmul_combine"],
    ]  # fmt: skip
    silent = kernel_of("moe_mlp", "padded_tiles")
    silent(*call)
    plan = plan_of(silent, *call)
    assert plan is not None
    assert len(plan.sections) == 1  # nobody listens


def test_a_call_that_has_an_empty_grid_launches_nothing(stub: StubDriver) -> None:
    kernel = kernel_of("rms_norm", "row_per_program")
    for _ in range(3):
        assert kernel(*rows(tokens=0)).shape == (0, 64)
    assert stub.started == []


def test_another_device_than_the_current_one_is_made_current_for_a_planned_launch(stub: StubDriver) -> None:
    kernel = ready()
    (structure,) = kernel._known
    kernel._known[structure] = replace(kernel._known[structure], index=1)
    entered = mock.MagicMock()
    with mock.patch("torch.cuda.current_device", return_value=0), mock.patch("torch.cuda.device", entered):
        assert launches_by_a_plan(kernel, *rows())
    entered.assert_called_once_with(CPU)
