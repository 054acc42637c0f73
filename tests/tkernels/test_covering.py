"""Drawn cases meet every pair of levels of an op's axes that a variant takes, within a few dozen cases."""

from pathlib import Path
from typing import Any

import pytest

from tkernels import OPS
from tkernels.variant import Variant
from tkernels.verification.check import check_case, drawn_results
from tkernels.verification.covering import Cover, Pair, pairs_met, pairs_of_draws
from tkernels.verification.draws import chooser, draw, drawn_cases

CASES = 32
"""Four dtypes by four layouts are 16, and attention has 18 axes."""


def pairs_found(variant: Variant, tries: int) -> set[Pair]:
    """The pairs that are feasible for a variant, as far as a search by independent draws finds them."""
    found: set[Pair] = set()
    for seed in range(tries):
        if (drawn := draw(variant, chooser(seed), seed)) is not None:
            found |= pairs_met(variant.contract, drawn[0].axes)
    return found


@pytest.mark.parametrize("op", OPS)
def test_all_but_a_few_pairs_that_the_rules_allow_are_met_within_32_cases(op: str) -> None:
    """All but the rarest three, and what goes with a pool of one page, for which one table and page size alone fit."""
    contract = OPS[op].contract
    found: set[Pair] = set()
    for seed in range(500):
        found |= pairs_met(contract, contract.draw_axes(chooser(seed)))
    assert found <= set(pairs_of_draws(contract, {}))
    cover = Cover(contract, seed=0)
    for seed in range(CASES):
        axes = cover.propose() or contract.draw_axes(chooser(seed))
        contract.check_axes(axes)
        cover.note(axes, True)
        found -= pairs_met(contract, axes)
    common = [pair for pair in found if not any(contract.axes[axis].name == "P" and level == 1 for axis, level in pair)]
    assert len(common) <= 3, common


def parameters(op: str, variant: str) -> Any:
    """Attention's inputs and a quantized weight's take most of the time."""
    is_slow = op == "dequant_gemm" or OPS[op].contract.work in ("decode", "prefill")
    return pytest.param(op, variant, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("op", "variant"), [parameters(op.name, name) for op in OPS.values() for name in op.variants])
def test_nearly_every_pair_that_a_variant_takes_is_met_within_its_first_cases(op: str, variant: str) -> None:
    """But for 3 in 100, where `supports` leaves so little that the search gave up; independent draws leave 5 to 20."""
    subject = OPS[op].variants[variant]
    found = pairs_found(subject, 60)
    missing = found.copy()
    for case, _ in drawn_cases(subject, CASES + 8):
        missing -= pairs_met(subject.contract, case.axes)
    assert len(found) > 50
    assert len(missing) <= 0.03 * len(found), missing


def test_the_same_seed_draws_the_same_cases_and_another_one_others() -> None:
    variant = OPS["kv_scatter"].variants["token_per_program"]
    one, again, other = ([(c.axes, c.seed, config) for c, config in drawn_cases(variant, 25, s)] for s in (0, 0, 7))
    assert one == again != other


def test_held_axes_are_held_and_the_others_cover_beside_them() -> None:
    variant = OPS["dequant_gemm"].variants["torch"]
    cases = [case for case, _ in drawn_cases(variant, 12, fixed={"bits": 3, "bias": True})]
    assert {(case.axes["bits"], case.axes["bias"]) for case in cases} == {(3, True)}
    shown = {(case.axes["coding"], case.axes["permuted"]) for case in cases}
    assert shown == {("lookup", True), ("lookup", False), ("uniform", True), ("uniform", False)}


def test_an_empty_batch_is_drawn_but_meets_no_pair() -> None:
    contract = OPS["rms_norm"].contract
    axes = {"T": 0, "H": 64, "activation": "float16", "layout": "padded", "values": "huge"}
    assert pairs_met(contract, axes) == {((0, 0), (0, 0))}
    assert len(pairs_met(contract, {**axes, "T": 1})) == 5 + 10
    drawn = [case.axes["T"] for case, _ in drawn_cases(OPS["rms_norm"].variants["torch"], 20)]
    assert 1 <= drawn.count(0) <= 3


def test_a_fault_of_two_options_is_found_within_20_cases(tmp_path: Path) -> None:
    """Values are divided by the keys' scales where a page has three slots."""
    source = OPS["kv_scatter"].variants["token_per_program"].file.read_text().replace("token_per_program", "planted")
    right = "v_scale_ptr,\n            stride_v_h,\n            stride_v_cache_h,"
    wrong = "v_scale_ptr if PAGE_SIZE != 3 else k_scale_ptr,\n            stride_v_h,\n            stride_v_cache_h,"
    assert source.count(right) == 1
    (tmp_path / "kv_scatter").mkdir()
    (tmp_path / "kv_scatter" / "planted.py").write_text(source.replace(right, wrong))
    planted = OPS.with_variants_from(tmp_path)["kv_scatter"].variants["planted"]
    failure = next(result for result in drawn_results(planted, 20) if result.status != "ok")
    again = check_case(planted, planted.contract.case(failure.axes, failure.seed), failure.config)
    assert str(again) == str(failure)
