"""A call that breaks a contract is a ValueError that names op, argument and rule, before any launch, for every op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tkernels
from tkernels.contract import Tensor
from tkernels.launch import Kernel
from tkernels.overlap import overlap_each_other, overlaps_itself
from tkernels.tuning import NEAREST
from tkernels.verification.draws import drawn_cases


def two_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of two in the last dim."""
    return torch.stack((tensor, tensor), dim=-1).flatten(-2)[..., ::2]


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex64 if tensor.is_floating_point() else torch.int16)


# What is done to one tensor, and the rule that the message must state.
BROKEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (other_dtype, r"must be|in \(|from the arguments before"),
    "dims": (lambda tensor: tensor.unsqueeze(0), "must have shape"),
    "size": (lambda tensor: torch.cat((tensor, tensor[:1])), r"from the arguments before|is needed|does not hold"),
    "device": (lambda tensor: tensor.to("meta"), "the first tensor is on|must be on cpu or cuda"),
    "stride": (two_apart, "needs unit stride in its last dim"),
    "layout": (lambda tensor: tensor.float().to_sparse(), "must be a strided tensor, got layout torch.sparse_coo"),
    "type": (lambda tensor: tensor.tolist(), "must be a tensor"),
}


def tensor_arguments(op: str) -> list[str]:
    return [name for name, rule in tkernels.OPS[op].contract.arguments.items() if isinstance(rule, Tensor)]


def is_shared(op: str, name: str) -> bool:
    """Whether an argument that is always given has the axis of this one's first dim: else any size of it is right."""
    rules = tkernels.OPS[op].contract.arguments
    given = [rule for other, rule in rules.items() if other != name and not getattr(rule, "optional", False)]
    parts = [part for rule in given for part in getattr(rule, "parts", {"": rule}).values()]
    dims = [dim for part in parts if isinstance(part, Tensor) for dim in part.shape]
    return rules[name].shape[0].name in {dim.name for dim in dims}


def has_one_element(op: str, name: str) -> bool:
    """Whether an argument's last dim is 1 whatever the sizes are, so that it has no stride."""
    last = tkernels.OPS[op].contract.arguments[name].shape[-1]
    return last.name is None and last.plus == 1


CALLS = [
    (op, name, rule)
    for op in tkernels.OPS
    for name in tensor_arguments(op)
    for rule in BROKEN
    if (rule != "size" or is_shared(op, name)) and (rule != "stride" or not has_one_element(op, name))
]


def launched(*arguments: Any) -> None:
    raise AssertionError("a launch was made")


def inputs_with(op: str, name: str) -> dict[str, Any]:
    """A right call in which the tensor is given and has two elements along its last dim, where that may be."""
    contract = tkernels.OPS[op].contract
    for case, _ in drawn_cases(tkernels.OPS[op].variants["torch"], 400):
        tensor = case.inputs[name]
        if tensor is not None and tensor.numel() and (tensor.shape[-1] > 1 or has_one_element(op, name)):
            return contract.bind_arguments((), case.inputs)
    raise AssertionError(f"no draw of {op} gives {name}")


@pytest.mark.parametrize(("op", "name", "rule"), CALLS)
def test_a_broken_argument_is_named_with_its_rule_before_any_launch(op: str, name: str, rule: str) -> None:
    contract = tkernels.OPS[op].contract
    inputs = inputs_with(op, name)
    break_it, message = BROKEN[rule]
    first, broken = next(iter(contract.arguments)), {**inputs, name: break_it(inputs[name])}
    for variant in tkernels.OPS[op].variants.values():
        if variant.launch is None and variant.name != "torch":
            continue
        with pytest.raises(tkernels.ContractError, match=message) as caught:
            Kernel(variant, NEAREST, {}, door=launched)(**broken)
        assert str(caught.value).startswith(f"{op}: ")
        # Where the first tensor is on another device or has another size, the next one is found to disagree with it.
        assert f"'{name}" in str(caught.value) or name == first or rule in ("size", "dtype")


@pytest.mark.parametrize("op", tkernels.OPS)
def test_a_call_of_the_wrong_form_is_a_value_error_with_the_signature(op: str) -> None:
    variant = tkernels.OPS[op].variants["torch"]
    with pytest.raises(ValueError, match=f"^{op}: missing a required argument: .*; the signature is {op}"):
        variant()
    with pytest.raises(ValueError, match="unexpected keyword argument 'surprise'"):
        variant(surprise=1, **inputs_with(op, next(iter(tensor_arguments(op)))))


def scalar_arguments(op: str) -> list[str]:
    return [n for n, rule in tkernels.OPS[op].contract.arguments.items() if isinstance(rule, tkernels.contract.Scalar)]


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in tkernels.OPS for name in scalar_arguments(op)])
def test_a_scalar_of_another_type_is_refused(op: str, name: str) -> None:
    variant = tkernels.OPS[op].variants["torch"]
    with pytest.raises(ValueError, match=f"^{op}: argument '{name}' must be "):
        variant(**{**inputs_with(op, tensor_arguments(op)[0]), name: "many"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in tkernels.OPS for name in scalar_arguments(op)])
def test_a_scalar_that_is_not_finite_is_refused(op: str, name: str, value: float) -> None:
    kind = tkernels.OPS[op].contract.arguments[name].kind
    variant = tkernels.OPS[op].variants["torch"]
    with pytest.raises(ValueError, match=f"argument '{name}' must be {'finite' if kind is float else kind.__name__}"):
        variant(**{**inputs_with(op, tensor_arguments(op)[0]), name: value})


WRITTEN = [(op.name, name) for op in tkernels.OPS.values() for name in (*op.contract.writes, *op.contract.consumes)]


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_a_written_tensor_whose_elements_share_memory_is_refused(op: str, name: str) -> None:
    contract = tkernels.OPS[op].contract
    cases = (case for case, _ in drawn_cases(tkernels.OPS[op].variants["torch"], 100))
    inputs = next(c.inputs for c in cases if c.inputs[name].numel() and c.inputs[name].shape[0] > 1)
    inputs = contract.bind_arguments((), inputs)
    broken = {**inputs, name: inputs[name][:1].expand(inputs[name].shape)}
    for variant in tkernels.OPS[op].variants.values():
        with pytest.raises(tkernels.ContractError, match=f"^{op}: argument '{name}' is written, so no two of its elem"):
            Kernel(variant, NEAREST, {}, door=launched)(**broken)


def norm_and_rotation(memory: torch.Tensor, k_begins: int) -> dict[str, Any]:
    """qk_norm_rope of q [3, 4, 32] at the beginning of some memory, and of k [3, 4, 32] there."""
    q, k = memory[:384].view(3, 4, 32), memory[k_begins : k_begins + 384].view(3, 4, 32)
    table = torch.zeros(10, 16)
    names = ("q", "k", "cos", "sin", "positions", "eps")
    return dict(zip(names, (q, k, table, table, torch.arange(3), 1e-6), strict=True))


def test_written_tensors_that_share_memory_are_refused_though_a_call_of_that_form_was_right() -> None:
    op = tkernels.OPS["qk_norm_rope"]
    kernel = Kernel(op.variants["torch"], NEAREST, {})
    defaults = {"q_weight": torch.ones(32), "k_weight": torch.ones(32)}
    memory = torch.randn(1000)
    for _ in range(2):
        kernel(**norm_and_rotation(memory, 400), **defaults)
        with pytest.raises(tkernels.ContractError, match="'q' is written, so it may not share memory with"):
            kernel(**norm_and_rotation(memory, 368), **defaults)


def test_views_side_by_side_in_one_row_or_one_page_share_nothing() -> None:
    q, k, v = torch.zeros(5, 8, 64, dtype=torch.bfloat16).split([4, 2, 2], dim=1)
    for one, other in ((q, k), (k, v), (v, q), (q[:0], q)):
        assert not overlap_each_other(one, other)
    joint = torch.zeros(3, 2, 16, 2, 8).to(torch.float8_e4m3fn)
    assert not overlap_each_other(*joint.unbind(1))
    assert not overlap_each_other(*joint.transpose(1, 3).unbind(3))
    assert overlap_each_other(q, torch.as_strided(q, (5, 2), (512, 1), 255))
    assert not overlap_each_other(q, torch.as_strided(q, (5, 2), (512, 1), 256))


@pytest.mark.parametrize(
    ("shape", "strides", "shared"),
    [
        ((3, 4), (4, 1), False),
        ((4, 3), (1, 4), False),
        ((3, 4), (3, 1), True),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((0, 4), (0, 1), False),
        ((2, 3), (3, 2), False),  # they interleave: 0 2 4 and 3 5 7
        ((3, 4), (3, 2), True),  # 6 is 2 * 3 and 3 * 2
        ((2**10, 2**10), (3, 2), True),
    ],
)
def test_a_tensor_shares_memory_with_itself(shape: tuple[int, int], strides: tuple[int, int], shared: bool) -> None:
    assert overlaps_itself(torch.empty(6000).as_strided(shape, strides)) == shared
