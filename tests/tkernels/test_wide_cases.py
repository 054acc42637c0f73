"""Sizes as large as a model's, every architecture's default config, and the corners that no draw reaches."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from tests.conftest import DEVICE
from tests.tkernels.outside import write_variant
from tkernels import OPS, Config
from tkernels.device import INTERPRETER, device_facts
from tkernels.variant import Variant
from tkernels.verification.check import check_case, drawn_results, wide_results
from tkernels.verification.draws import _wide_plans, chooser, count_wide_cases, wide_cases
from tkernels.verification.mutation.campaign import outcomes, trials
from tkernels.verification.mutation.pool import Pool

VARIANTS = [(op.name, name) for op in OPS.values() for name in op.variants]
BY_FACTOR = [("FACTOR=1,", 'FACTOR=run.config["FACTOR"],'), ("configs=(Config(), Config(num_warps=8)), ", "")]


_SLOW = ("dequant_gemm", "paged_prefill", "gate_up_swiglu")
"""Their wide cases take most: weights and contexts as wide as a model's, 5 to 10 s each of the latter two."""

_SLOW_VARIANTS = {("matmul", "auto")}
"""It reaches 32,769 outputs by persistent, whose few programs walk 2,049 of the interpreter's tiles: 20 s."""


def parameters(op: str, variant: str) -> Any:
    is_slow = op in _SLOW or (op, variant) in _SLOW_VARIANTS
    return pytest.param(op, variant, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("op", "variant"), [parameters(*names) for names in VARIANTS])
def test_variant_is_right_on_its_wide_cases(op: str, variant: str) -> None:
    subject = OPS[op].variants[variant]
    results = list(wide_results(subject, device=DEVICE))
    for result in results:
        assert result.status == "ok", f"\n{result}"
    assert 2 <= len(results) <= count_wide_cases(subject, device=DEVICE)
    if subject.kind == "triton":
        arch = device_facts(DEVICE).arch
        own = subject.default_config(arch)
        every = {*subject.default.values(), own} if arch == INTERPRETER.arch else {own}
        assert {one.constants for one in every} <= {
            result.config.constants for result in results if result.config is not None
        }


@pytest.mark.parametrize("op", list(OPS))
def test_wide_draws_are_within_the_constraints_and_take_wide_values_alone_where_they_fit(op: str) -> None:
    contract = OPS[op].contract
    drawn: dict[str, set[object]] = {axis.name: set() for axis in contract.axes}
    for seed in range(500):
        axes = contract.draw_axes(chooser(seed), wide=True)
        contract.check_axes(axes)
        for name, value in axes.items():
            drawn[name].add(value)
    assert any(axis.wide for axis in contract.axes)
    for axis in contract.axes:
        assert drawn[axis.name] <= {*axis.wide, *axis.draws}
        assert drawn[axis.name] & set(axis.wide or axis.draws)


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_a_long_context_is_drawn_of_pages_of_any_size(op: str, page: int) -> None:
    axes = OPS[op].contract.draw_axes(chooser(page), {"S": page}, wide=True)
    assert axes["lengths"] == "long"
    assert int(OPS[op].contract.case(axes, 0).inputs["context_lens"].min()) > 700


def planted(folder: Path, op: str, original: str, before: str, after: str) -> Variant:
    source = OPS[op].variants[original].file.read_text().replace(original, "planted")
    assert before in source
    (folder / op).mkdir()
    (folder / op / "planted.py").write_text(source.replace(before, after))
    return OPS.with_variants_from(folder)[op].variants["planted"]


def test_a_kernel_that_is_right_up_to_257_wide_is_found(tmp_path: Path) -> None:
    wrong = planted(tmp_path, "rms_norm", "row_per_program", "/ hidden +", "/ tl.minimum(hidden, 257) +")
    assert {result.status for result in drawn_results(wrong, 20)} == {"ok"}
    assert "wrong" in {result.status for result in wide_results(wrong)}  # not of faint rows, whose epsilon is all


def test_a_kernel_that_is_wrong_of_one_block_of_wide_rows_is_found(tmp_path: Path) -> None:
    wrong = planted(
        tmp_path, "rms_norm", "row_per_program", "/ hidden +", "/ (hidden if BLOCK_H != 8192 else BLOCK_H) +"
    )
    assert {result.status for result in drawn_results(wrong, 20)} == {"ok"}
    assert "wrong" in {result.status for result in wide_results(wrong)}


@pytest.mark.parametrize("op", [op.name for op in OPS.values() if "values" in op.contract.axis_by_name])
def test_the_first_wide_draw_is_of_ordinary_values_and_what_is_held_is_held(op: str) -> None:
    for variant in OPS[op].variants.values():
        for fixed, values in (({}, ["ordinary", None]), ({"values": "tiny"}, ["tiny", "tiny"])):
            wide = [held for held, _, is_wide in _wide_plans(variant, fixed, None, torch.device("cpu")) if is_wide]
            assert [held.get("values") for held in wide[:2]] == values


@pytest.mark.parametrize("scaled", ["is None", "is not None"])
def test_what_an_fp8_cache_saturates_is_looked_at_with_and_without_a_scale(scaled: str, tmp_path: Path) -> None:
    """Negative values alone, and only where they have been divided, or have not."""
    before = "values = tl.minimum(tl.maximum(values.to(tl.float32), -448.0), 448.0)"
    after = before.replace("-448.0", f"-448.0 if scale_ptr {scaled} else -1.0e30")
    wrong = planted(tmp_path, "kv_scatter", "token_per_program", before, after)
    for seed in range(3):
        assert "wrong" in {result.status for result in wide_results(wrong, seed)}


def test_an_attention_that_sees_the_last_330_keys_alone_is_found(tmp_path: Path) -> None:
    wrong = planted(
        tmp_path, "paged_decode", "one_pass", "    first = 0\n", "    first = tl.maximum(length - 330, 0)\n"
    )
    assert {result.status for result in drawn_results(wrong, 20)} == {"ok"}
    assert "wrong" in {result.status for result in wide_results(wrong)}


@pytest.mark.parametrize(
    "wrong",
    [
        "p = tl.where(p < 1e-6, 0.0, p)",
        "p = tl.exp2(tl.maximum(qk * scale_log2 - origin[:, None], -16.0))",
        "p = p * (tl.max(p, axis=1) > 1e-5)[:, None]",
    ],
    ids=["light keys are dropped", "the exponent is clamped", "a light block is dropped"],
)
def test_keys_lighter_than_a_millionth_count(wrong: str, tmp_path: Path) -> None:
    right = "    p = tl.exp2(qk * scale_log2 - origin[:, None])\n"
    variant = planted(tmp_path, "paged_prefill", "packed_gqa", right, f"{right}    {wrong}\n")
    light = [drawn for drawn in wide_cases(variant) if drawn[0].axes["values"] == "light"]
    assert {check_case(variant, *drawn, offsets=False).status for drawn in light} == {"wrong"}


def test_a_default_that_is_wrong_on_one_architecture_alone_is_found(tmp_path: Path) -> None:
    changes = [*BY_FACTOR, ('{"": Config()}', '{"": Config(FACTOR=1), "sm_100": Config(FACTOR=2)}')]
    variant = OPS.with_variants_from(write_variant(tmp_path, *changes))["swiglu"].variants["doubled"]
    assert {result.status for result in drawn_results(variant, 20)} == {"ok"}
    results = list(wide_results(variant))
    assert {result.config for result in results if result.status == "wrong"} == {Config(FACTOR=2)}
    assert [result.status for result in results].count("ok") == 2


def test_held_axes_and_a_held_config_are_held() -> None:
    variant = OPS["rms_norm"].variants["rows_per_program"]
    pinned = variant.default_config("sm_90")
    cases = list(wide_cases(variant, fixed={"H": 64, "activation": "float16"}, config=pinned))
    assert len(cases) == 3
    assert all(case.axes["H"] == 64 and case.axes["activation"] == "float16" for case, _ in cases)
    assert {config for _, config in cases} == {pinned}
    decode = OPS["paged_decode"].variants["one_pass"]
    held = [case.axes["values"] for case, _ in wide_cases(decode, fixed={"values": "tiny"})]
    assert held == ["tiny"] * len(held)
    assert 2 <= len(held) < len(list(wide_cases(decode)))


@pytest.mark.slow
def test_a_fault_that_only_a_corner_shows_is_a_killed_mutant() -> None:
    """A masked part counts as one of logit 0: nothing beside any weight that is no less than 2**-126 of it."""
    decode = list(tkernels.OPS["paged_decode"].variants.values())
    (fault,) = (
        trial
        for trial in trials(decode, ("constant_changed",))
        if (trial.mutant.function, trial.mutant.before, trial.mutant.nth) == ("combine_parts", "float('-inf')", 2)
    )
    with Pool() as pool:
        (outcome,) = outcomes(pool, [fault], seed=0, compiled=False)
    assert outcome.column == "value"
