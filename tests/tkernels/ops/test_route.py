"""route: which experts come first is defined to the bit; weights where sums and differences vanish; rows at fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tkernels.outside import computes_wrong, write_copy
from tkernels import OPS, ContractError, UnsupportedError
from tkernels.device import INTERPRETER
from tkernels.inputs import widen_floats
from tkernels.verification.draws import chooser
from tkernels.verification.sanitizers.base import sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

OP = OPS["route"]
CONTRACT = OP.contract
EVERY = pytest.mark.parametrize("variant", list(OP.variants))
FORMS = pytest.mark.parametrize(
    "form",
    [{}, {"normalize": True}, {"sigmoid": True}, {"normalize": True, "sigmoid": True}],
    ids=["softmax", "softmax_of_the_chosen", "sigmoid", "normalized_sigmoid"],
)


def route(variant: str, logits: Any, top_k: int, **options: Any) -> tuple[list[Any], torch.Tensor]:
    """(experts, weights [T, K]) of rows [T, E]."""
    experts, weights = OP.variants[variant](torch.as_tensor(logits, dtype=torch.float32), top_k, **options)
    return experts.tolist(), weights


def choose(row: Sequence[float], bias: Sequence[float], top_k: int) -> list[int]:
    """The first experts by one comparison after the other."""
    ranked = [float(np.float32(one) + np.float32(more)) for one, more in zip(row, bias, strict=True)]
    if any(map(math.isnan, ranked)):
        return list(range(top_k))
    chosen: list[int] = []
    while len(chosen) < top_k:
        best = None
        for expert, value in enumerate(ranked):
            if expert not in chosen and (best is None or value > ranked[best]):
                best = expert
        assert best is not None
        chosen.append(best)
    return chosen


def weigh(row: Sequence[float], chosen: Sequence[int], inputs: dict[str, Any]) -> list[float]:
    """The chosen ones' weights in float64, as formulas in books have them; NaN where a logit is."""
    if any(map(math.isnan, row)):
        return [nan] * len(chosen)
    if inputs["sigmoid"]:
        shares = [1 / (1 + math.exp(-row[e])) if row[e] > -700 else 0.0 for e in chosen]
    else:
        total = sum(math.exp(one - max(row)) for one in row)
        shares = [math.exp(row[e] - max(row)) / total for e in chosen]
    total = sum(shares) if inputs["normalize"] else 1.0
    return [inputs["scale"] * share / total if total else nan for share in shares]


@EVERY
def test_the_choice_is_exact_in_200_of_200_draws(variant: str) -> None:
    met = set()
    for seed in range(200):
        case = CONTRACT.case(CONTRACT.draw_axes(chooser(seed), {"T": seed % 3}), seed)
        inputs = dict(case.inputs)
        experts, weights = OP.variants[variant](**inputs)
        rows = inputs["logits"].double().tolist()
        bias = [0.0] * int(case.axes["E"]) if inputs["bias"] is None else inputs["bias"].tolist()
        expected = [choose(row, bias, inputs["top_k"]) for row in rows]
        assert experts.tolist() == expected, case.axes
        assert weights.shape == experts.shape
        if rows:
            met.add((case.axes["values"], inputs["bias"] is None))
    assert len(met) == 18  # all kinds of values, with a bias and without


def test_the_definition_is_the_books() -> None:
    compared = 0
    for seed in range(100):
        case = CONTRACT.case(CONTRACT.draw_axes(chooser(seed), {"T": 1, "activation": "float32"}), seed)
        inputs = widen_floats(case.inputs)
        experts, weights = CONTRACT.reference(**inputs)
        expected = torch.tensor([weigh(inputs["logits"][0].tolist(), experts[0].tolist(), inputs)], dtype=torch.float64)
        there = ~(expected <= 1e-200)  # not of sigmoids whose sum vanishes in the books' form
        torch.testing.assert_close(weights[there], expected[there], rtol=1e-12, atol=0, equal_nan=True)
        compared += int(there.sum())
    assert compared > 200


@EVERY
@FORMS
def test_a_row_with_a_nan_gets_the_first_experts_and_weighs_nothing(variant: str, form: dict[str, Any]) -> None:
    rows = [[0.0, 1.0, nan, 3.0, 2.0], [0.0, 1.0, 5.0, 3.0, 2.0], [nan] * 5, [nan, inf, -inf, 0.0, 1.0]]
    experts, weights = route(variant, rows, 3, **form)
    assert experts == [[0, 1, 2], [2, 3, 4], [0, 1, 2], [0, 1, 2]]
    assert weights.isnan().tolist() == [[True] * 3, [False] * 3, [True] * 3, [True] * 3]
    biased, weights = route(variant, rows[1:2] * 2, 3, bias=torch.tensor([0.0, 0.0, 0.0, nan, 0.0]), **form)
    assert biased == [[0, 1, 2]] * 2
    assert weights.isnan().all()
    biased, weights = route(variant, [[inf, 0.0, 1.0]], 2, bias=torch.tensor([-inf, 0.0, 0.0]), **form)
    assert biased == [[0, 1]]
    assert weights.isnan().all()


@EVERY
@FORMS
def test_infinite_logits_rank_as_such_and_weigh_what_the_formula_gives(variant: str, form: dict[str, Any]) -> None:
    rows = [[0.0, inf, 1.0], [0.0, -inf, -1.0], [-inf] * 3, [inf, 0.0, inf], [1.0, -inf, -inf], [2.0] * 3]
    experts, weights = route(variant, rows, 2, **form)
    assert experts == [[1, 2], [0, 2], [0, 1], [0, 2], [0, 1], [0, 1]]
    expected = CONTRACT.reference(torch.tensor(rows, dtype=torch.float64), 2, **form)[1]
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
    at_fault = {(): [0, 2, 3], ("normalize",): [0, 2, 3], ("sigmoid",): [], ("normalize", "sigmoid"): [2]}
    assert weights.isnan().all(1).nonzero().flatten().tolist() == at_fault[tuple(form)]
    assert weights[4, 1] == 0.0
    assert weights[5, 0] == weights[5, 1]


@EVERY
def test_zeros_of_either_sign_are_equal_and_ties_go_to_the_lower_index(variant: str) -> None:
    experts, _ = route(variant, [[-0.0, 0.0, -1.0, 0.0, -0.0], [0.0, -0.0, 1e-45, 0.0, -0.0]], 4)
    assert experts == [[0, 1, 3, 4], [2, 0, 1, 3]]
    assert route(variant, [[7.0] * 130], 9)[0] == [list(range(9))]


@EVERY
def test_a_bias_chooses_and_does_not_weigh(variant: str) -> None:
    logits, bias = [[3.0, 1.0, 2.0, 0.0]], torch.tensor([-9.0, 0.0, 0.0, 9.0])
    experts, weights = route(variant, logits, 2, bias=bias, sigmoid=True)
    assert experts == [[3, 2]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[0.0, 2.0]])))
    experts, weights = route(variant, logits, 2, bias=bias)
    torch.testing.assert_close(weights, torch.tensor(logits).softmax(1)[:, [3, 2]])


@EVERY
def test_a_normalized_softmax_is_that_of_the_chosen_and_sums_up_to_the_scale(variant: str) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    experts, weights = route(variant, logits, 5, normalize=True, scale=2.5)
    torch.testing.assert_close(weights, 2.5 * logits.gather(1, torch.tensor(experts)).softmax(1))
    torch.testing.assert_close(weights.sum(1), torch.full((3,), 2.5))


@EVERY
def test_sigmoids_that_vanish_still_have_shares(variant: str) -> None:
    """In fp32 exp(-200) is 0, and so would be what divides."""
    _, weights = route(
        variant, [[-200.0, -201.0, -900.0], [-1000.0, -1000.0, -1000.0]], 2, sigmoid=True, normalize=True
    )
    torch.testing.assert_close(weights, torch.tensor([[0.0, -1.0], [0.0, 0.0]]).softmax(1))


@EVERY
def test_no_tokens_and_every_expert(variant: str) -> None:
    experts, weights = OP.variants[variant](torch.zeros(0, 4), 2)
    assert (experts.shape, experts.dtype, weights.shape, weights.dtype) == ((0, 2), torch.int32, (0, 2), torch.float32)
    assert route(variant, [[1.0, 3.0, 2.0]], 3)[0] == [[1, 2, 0]]


def test_float64_stays_float64() -> None:
    logits = torch.tensor([[1.0, 1.0 + 2.0**-40, 0.0]], dtype=torch.float64)
    experts, weights = OP.variants["torch"](logits, 2)
    assert experts.tolist() == [[1, 0]]
    assert weights.dtype == torch.float64


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ContractError, match="K <= E does not hold for E = 4, K = 5"):
        OP.variants["torch"](logits, 5)
    with pytest.raises(ContractError, match="'top_k' must be at least 1, got 0"):
        OP.variants["torch"](logits, 0)
    with pytest.raises(ContractError, match="'bias' must be float32"):
        OP.variants["torch"](logits, 2, bias=torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ContractError, match="gives E = 3, but E = 4"):
        OP.variants["torch"](logits, 2, bias=torch.zeros(3))
    with pytest.raises(UnsupportedError, match="rows wider than 1024"):
        OP.variants["rows_per_program"](torch.zeros(1, 1025), 2)
    assert OP.variants["rows_per_program"].supports({"E": 1024, "K": 16}, INTERPRETER) is None


FAULTS = {
    "ties_to_the_higher_index": ("ranked), offs)", "ranked), BLOCK_E - offs)"),
    "the_bias_weighs": ("tl.where(keys == best, logits, 0.0)", "tl.where(keys == best, ranked, 0.0)"),
    "the_first_choice_twice": ("tl.where(keys == best, _LEAST, keys)", "tl.where(offs == k, _LEAST, keys)"),
    "the_softmax_of_all_is_normalized": ("among = x", "among = logits"),
    "no_scale": (") * scale", ")"),
    "columns_beyond_the_experts": ("(rows < tokens) & (offs < num_experts)", "rows < tokens"),
    "a_stride_that_is_the_width": ("rows * stride_logits_t", "rows * num_experts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    write_copy(tmp_path, "route.rows_per_program", "planted", FAULTS[fault])
    wrong = OPS.with_variants_from(tmp_path)["route"].variants["planted"]
    assert computes_wrong(wrong)


def test_an_int32_offset_overflows_and_is_found(tmp_path: Path) -> None:
    write_copy(tmp_path, "route.rows_per_program", "planted", ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)"))
    wrong = OPS.with_variants_from(tmp_path)["route"].variants["planted"]
    found = [one.message for one in sanitized(SANITIZERS["overflow"], wrong, 4) if one is not None]
    assert any("int32 overflow" in one for one in found)
