"""The public entry checks structure, early, by name; constraints are evaluated; draws are constructive."""

from dataclasses import replace

import pytest
import torch

from tkernels import OPS, Constraint, ContractError, Tensor
from tkernels.contract import Value
from tkernels.dims import Dim
from tkernels.inputs import clone_inputs
from tkernels.verification.draws import chooser


def norm(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    return OPS["rms_norm"].variants["torch"](x, weight, *rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 8), torch.ones(9), 1e-6), "rms_norm: argument 'weight' gives H = 9, but H = 8"),
        ((torch.ones(8), torch.ones(8), 1e-6), r"argument 'x' must have shape \[T H\], got \[8\]"),
        ((torch.ones(2, 8), torch.ones(8).half(), 1e-6), "argument 'weight' gives activation = float16"),
        ((torch.ones(2, 16)[:, ::2], torch.ones(8), 1e-6), "argument 'x' needs unit stride"),
        (
            (torch.ones(2, 8), torch.ones(8, device="meta"), 1e-6),
            "argument 'weight' is on meta, the first tensor is on",
        ),
        ((torch.ones(2, 8).int(), torch.ones(8).int(), 1e-6), "activation = int32, but activation in"),
        ((torch.ones(2, 8), [1.0] * 8, 1e-6), "argument 'weight' must be a tensor"),
        ((torch.ones(2, 8), torch.ones(8), "small"), "argument 'eps' must be float"),
        ((torch.ones(2, 8), torch.ones(8), -1.0), "argument 'eps' must be at least 0"),
        ((torch.ones(2, 8), torch.ones(8)), "missing a required argument: 'eps'"),
        ((torch.ones(2, 8), torch.ones(8), 1e-6, 3), "too many positional arguments"),
    ],
)
def test_a_broken_call_names_op_argument_and_rule(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        norm(*arguments)  # type: ignore[arg-type]


def test_keywords_twice_or_unknown_are_refused() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    variant = OPS["rms_norm"].variants["torch"]
    with pytest.raises(ContractError, match="multiple values for argument 'x'"):
        variant(x, weight, x=x, eps=1e-6)
    with pytest.raises(ContractError, match="unexpected keyword argument 'epsilon'"):
        variant(x, weight, 1e-6, epsilon=1.0)


@pytest.mark.parametrize(
    ("text", "size", "value"),
    [("T", 5, 5), ("2*I", 6, 3), ("2*I", 5, None), ("R/2", 4, 8), ("B+1", 4, 3), ("B+1", 0, None)],
)
def test_a_dim_is_solved_and_sized(text: str, size: int, value: int | None) -> None:
    dim = Dim.parse(text)
    assert dim.solve(size) == value
    if value is not None:
        assert dim.name is not None
        assert dim.size({dim.name: value}) == size


def test_a_dim_that_is_rounded_up_agrees_with_what_is_known_or_does_not() -> None:
    dim = Dim.parse("ceil(N/128)")
    assert [dim.size({"N": size}) for size in (1, 128, 129, 256)] == [1, 1, 2, 2]
    assert dim.solve(2) is None
    rule = Tensor("ceil(N/128) K", "float32")
    for known in ({"N": 128}, {"N": 257}, {}):
        with pytest.raises(ContractError, match=r"has shape \[2, 3\], where \[ceil\(N/128\) K\] is needed"):
            rule.bind("op", "scale", torch.ones(2, 3), dict(known), None)
    axes: dict[str, Value] = {"N": 130}
    rule.bind("op", "scale", torch.ones(2, 3), axes, None)
    assert axes == {"N": 130, "K": 3}


def test_a_computed_dim_is_of_all_its_axes() -> None:
    dim = Dim.parse("(T*K+min(T*K,E)*15)//16")
    assert dim.names == {"T", "K", "E"}
    assert [dim.size({"T": tokens, "K": 2, "E": 4}) for tokens in (0, 1, 2, 16)] == [0, 2, 4, 5]
    assert Dim.parse("T*K").solve(4) is None


@pytest.mark.parametrize("op", list(OPS))
def test_every_draw_is_within_the_constraints_and_repeats_from_its_seed(op: str) -> None:
    contract = OPS[op].contract
    for seed in range(100):
        axes = contract.draw_axes(chooser(seed))
        contract.check_axes(axes)
        assert axes == contract.draw_axes(chooser(seed))


@pytest.mark.parametrize("op", list(OPS))
def test_every_value_of_every_axis_can_be_drawn(op: str) -> None:
    contract = OPS[op].contract
    drawn: dict[str, set[object]] = {axis.name: set() for axis in contract.axes}
    for seed in range(3000):
        for name, value in contract.draw_axes(chooser(seed)).items():
            drawn[name].add(value)
    assert {axis.name: set(axis.draws) for axis in contract.axes} == drawn


@pytest.mark.parametrize("op", list(OPS))
def test_inputs_bind_to_the_axes_they_were_made_from(op: str) -> None:
    contract = OPS[op].contract
    for seed in range(20):
        axes = contract.draw_axes(chooser(seed))
        bound, _ = contract.bind_axes(contract.bind_arguments((), contract.case(axes, seed).inputs))
        shared = {name: value for name, value in axes.items() if name in bound}
        assert {name: bound[name] for name in shared} == shared


@pytest.mark.parametrize("op", list(OPS))
def test_every_op_counts_its_bytes_and_flops_at_its_benchmark_points(op: str) -> None:
    contract = OPS[op].contract
    assert contract.benchmarks
    for point in contract.benchmarks.values():
        assert set(point) <= set(contract.axis_by_name)
    axes = contract.draw_axes(lambda name, candidates: candidates[-1])
    case = contract.case(axes, 0)
    assert case.bytes_moved > 0
    assert case.flops >= 0


@pytest.mark.parametrize("op", list(OPS))
def test_every_public_docstring_names_every_argument(op: str) -> None:
    contract = OPS[op].contract
    documentation = contract.reference.__doc__ or ""
    assert not [name for name in contract.arguments if name not in documentation]


def test_a_fixed_axis_outside_its_range_or_unknown_is_refused() -> None:
    contract = OPS["rms_norm"].contract
    with pytest.raises(ContractError, match=r"H = 0, but 1 <= H"):
        contract.draw_axes(chooser(0), {"H": 0})
    with pytest.raises(ContractError, match=r"no axis \['Q'\]; it has T, H"):
        contract.draw_axes(chooser(0), {"Q": 1})


@pytest.mark.parametrize("field", ["benchmarks", "corners", "inspected"])
def test_a_named_point_with_a_strange_axis_is_refused(field: str) -> None:
    with pytest.raises(ContractError, match=r"rms_norm: point 'large' names no axis of it: \['Q'\]"):
        replace(OPS["rms_norm"].contract, **{field: {"large": {"T": 1, "Q": 2}}})  # type: ignore[arg-type]


def test_constraints_are_evaluated_without_builtins() -> None:
    assert Constraint("Hq % Hkv == 0").holds({"Hq": 4, "Hkv": 2})
    assert not Constraint("Hq % Hkv == 0").holds({"Hq": 4, "Hkv": 3})
    with pytest.raises(NameError):
        Constraint("open('x')").holds({})


def test_clones_keep_strides_poison_and_shared_storage() -> None:
    whole = torch.arange(12.0).view(2, 6)
    copies = clone_inputs({"a": whole[:, :2], "b": whole[:, 2:4]})
    assert copies["a"].stride() == (6, 1)
    assert copies["a"].untyped_storage().data_ptr() == copies["b"].untyped_storage().data_ptr()
    copies["a"].zero_()
    assert whole[0, 1] == 1
    assert copies["b"][0, 0] == 2
