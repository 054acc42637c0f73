"""Soft caps and sinks in every attention: the definitions against dense sums, sinks that count once, bad calls."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.conftest import DEVICE
from tests.tkernels.ops.test_cascade_decode import case_of
from tests.tkernels.ops.test_paged_decode import case_with_contexts
from tests.tkernels.ops.test_paged_prefill import chunk, whole_prompt
from tkernels import OPS, ContractError
from tkernels.contract import Case
from tkernels.ops.paged_cache import gather_context
from tkernels.ops.softmax import tanh_of
from tkernels.verification.check import check_case, drawn_results

DECODE, PREFILL, CASCADE, MERGE = (
    OPS[name].variants for name in ("paged_decode", "paged_prefill", "cascade_decode", "merge_states")
)
SINKS = torch.tensor([2.0, -20.0, 25.0, -math.inf, 0.0, 4.0])


@triton.jit
def tangents(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tanh_of(tl.load(x_ptr + offs)))


def test_a_tangent_is_at_most_two_units_in_the_last_place_off() -> None:
    sizes = torch.logspace(-12, 2, 4090, dtype=torch.float64).float()
    edges = torch.tensor([0.0, 0.625, math.inf, 3e38, 1e-45, math.nan])
    x = torch.cat((sizes, edges))
    for signed in (x, -x):
        got = torch.empty_like(signed).to(DEVICE)
        tangents[(1,)](got, signed.to(DEVICE), BLOCK=4096)
        true = signed.double().tanh()
        units = np.spacing(true.float().abs().numpy())
        off = (got.cpu().double() - true).abs().numpy() / units
        assert off[:-1].max() <= 2
        assert got[-1].isnan()


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, soft_cap: float | None, sink: float
) -> tuple[torch.Tensor, float]:
    """(out [Dv], log-sum-exp) of one query [D] over the keys [n, D] and values [n, Dv] that it sees, in float64, each
    weight by itself.
    """
    scores = [float(q.double() @ key.double()) * scale for key in k]
    if soft_cap is not None:
        scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
    weights = [math.exp(score) for score in scores]
    total = math.fsum([*weights, math.exp(sink)])
    out = sum((weight / total * value.double() for weight, value in zip(weights, v, strict=True)), torch.zeros(()))
    return out, math.log(total)


OPTIONS = [(None, False), (3.0, False), (None, True), (3.0, True)]


@pytest.mark.parametrize(("soft_cap", "with_sinks"), OPTIONS)
@pytest.mark.parametrize("window", [0, 20])
def test_the_definition_of_decode_is_dense_attention(soft_cap: float | None, with_sinks: bool, window: int) -> None:
    inputs = case_with_contexts((72, 1, 17), activation="float64", kv="float64", window=window).inputs
    sinks = SINKS if with_sinks else torch.full((6,), -math.inf)
    given = {**inputs, "soft_cap": soft_cap, "sinks": sinks.double() if with_sinks else None}
    out, lse = OPS["paged_decode"].contract.reference(**given)
    lens = inputs["context_lens"]
    where = (inputs["block_tables"], lens, lens - window if window else None)
    k, v = (gather_context(inputs[name], *where) for name in ("k_cache", "v_cache"))
    for row, length in enumerate((72, 1, 17)):
        seen = slice(max(length - window, 0) if window else 0, length)
        for head in range(6):
            q, kv = inputs["q"][row, head], head // 3
            expected = dense(q, k[row, seen, kv], v[row, seen, kv], inputs["scale"], soft_cap, float(sinks[head]))
            torch.testing.assert_close(out[row, head], expected[0], rtol=1e-12, atol=1e-12)
            assert float(lse[row, head]) == pytest.approx(expected[1], rel=1e-12)


@pytest.mark.parametrize(("soft_cap", "with_sinks"), OPTIONS)
def test_the_definition_of_prefill_is_decode_of_each_token(soft_cap: float | None, with_sinks: bool) -> None:
    inputs = whole_prompt(activation="float64", kv="float64", window=19)
    options = {"soft_cap": soft_cap, "sinks": SINKS[:4].double() if with_sinks else None}
    out, lse = OPS["paged_prefill"].contract.reference(**{**inputs, **options})
    decode = {name: value for name, value in inputs.items() if name not in ("cu_seqlens_q", "causal")}
    for token in range(40):
        alone = {**decode, "q": inputs["q"][token : token + 1], "context_lens": torch.tensor([token + 1]).int()}
        expected = OPS["paged_decode"].contract.reference(**{**alone, **options})
        torch.testing.assert_close(out[token], expected[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[token], expected[1][0], rtol=1e-12, atol=1e-12)


def test_a_sink_is_a_key_whose_value_is_zero() -> None:
    """A state of it alone, merged by the definition without sinks, is what the definition with them makes."""
    reference = OPS["merge_states"].contract.reference
    out_a, out_b = torch.randn(2, 3, 6, 16, dtype=torch.float64)
    lse_a, lse_b = torch.randn(2, 3, 6, dtype=torch.float64)
    lse_a[0, 1] = lse_b[0, 1] = lse_b[1] = -math.inf
    both = reference(out_a, lse_a, out_b, lse_b)
    expected = reference(*both, torch.zeros_like(out_a), SINKS.double().expand(3, 6))
    for got, one in zip(reference(out_a, lse_a, out_b, lse_b, sinks=SINKS.double()), expected, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-12, atol=1e-12)


ATTENTIONS: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    **{f"paged_decode.{name}": (DECODE[name], lambda: case_with_contexts((0, 41)).inputs) for name in DECODE},
    **{
        f"cascade_decode.{name}": (CASCADE[name], lambda: case_of((0, 41), (0, 1, 2), (0, 32)).inputs)
        for name in CASCADE
    },
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_empty_context_with_a_sink_is_zeros_and_the_sink(name: str) -> None:
    variant, inputs = ATTENTIONS[name]
    out, lse = variant(**{**inputs(), "sinks": SINKS, "soft_cap": 3.0})
    assert torch.equal(out[0], torch.zeros(6, 64))
    torch.testing.assert_close(lse[0], SINKS, rtol=2e-7, atol=0)
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("variant", list(MERGE))
def test_two_empty_parts_with_a_sink_are_zeros_and_the_sink(variant: str) -> None:
    nothing, empty = torch.full((1, 6, 16), math.nan), torch.full((1, 6), -math.inf)
    out, lse = MERGE[variant](nothing, empty, nothing, empty, sinks=SINKS)
    assert torch.equal(out, torch.zeros(1, 6, 16))
    torch.testing.assert_close(lse[0], SINKS, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    "variant",
    [
        *(DECODE[name] for name in ("one_pass", "split_kv", "last_arriver")),
        *(PREFILL[name] for name in PREFILL if name != "torch"),
        *(CASCADE[name] for name in ("one_launch", "composed")),
    ],
    ids=lambda variant: f"{variant.contract.name}.{variant.name}",
)
def test_a_sink_of_minus_infinity_changes_no_bit(variant: Any) -> None:
    if variant.contract.name == "paged_decode":
        inputs = case_with_contexts((72, 0, 17)).inputs
    elif variant.contract.name == "paged_prefill":
        inputs = chunk(whole_prompt(window=19), 25, 40)
    else:
        inputs = case_of((40, 33, 0), (0, 2, 3), (32, 0)).inputs
    heads = inputs["q"].shape[1]
    sunk = variant(**{**inputs, "sinks": torch.full((heads,), -math.inf)})
    for got, expected in zip(sunk, variant(**inputs), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("soft_cap", [0.5, 29.7, 1e4])
@pytest.mark.parametrize("name", ["last_arriver", "one_pass", "split_kv", "torch"])
def test_a_cap_need_not_be_a_whole_number(name: str, soft_cap: float) -> None:
    case = case_with_contexts((72, 1, 17), values="peaked")
    given = Case(case.contract, case.axes, 0, {**case.inputs, "soft_cap": soft_cap, "sinks": SINKS})
    result = check_case(DECODE[name], given, offsets=False)
    assert result.status == "ok", result


def test_sinks_are_read_once() -> None:
    case = case_with_contexts((72, 1, 17))
    sunk = Case(case.contract, case.axes, 0, {**case.inputs, "sinks": SINKS})
    assert (sunk.bytes_moved, sunk.flops) == (case.bytes_moved + 6 * 4, case.flops)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"soft_cap": 0.0}, "'soft_cap' must be at least"),
        ({"soft_cap": -30.0}, "'soft_cap' must be at least"),
        ({"soft_cap": math.inf}, "'soft_cap' must be finite"),
        ({"soft_cap": math.nan}, "'soft_cap' must be finite"),
        ({"soft_cap": True}, "'soft_cap' must be float"),
        ({"sinks": torch.zeros(2)}, "'sinks' gives Hq = 2, but Hq = 6"),
        ({"sinks": torch.zeros(6, dtype=torch.bfloat16)}, "'sinks' must be float32, got bfloat16"),
        ({"sinks": torch.zeros(6, 1)}, r"'sinks' must have shape \[Hq\]"),
    ],
)
def test_a_bad_cap_or_sink_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        DECODE["torch"](**{**case_with_contexts((9,)).inputs, **change})


CAP = "    if cap_log2 is not None:\n        qk = tanh_of(qk * scale_log2)\n        scale_log2 = cap_log2\n"
MAXIMUM = "    m_new = tl.maximum(m, tl.max(qk, axis=1) * scale_log2)\n"
OWN_PART = "max_context_len=max_context_len, return_lse=True, **options,"
IMPORT = "import scale_arguments\n"
PLANTED: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "a sink counts in each split": (
        "paged_decode.last_arriver",
        (
            (IMPORT, "import beside_sinks, scale_arguments\n"),
            (
                "        store_part(",
                "        if sinks_ptr is not None:\n"
                "            _, top, l = beside_sinks(m, l, tl.load(sinks_ptr + heads, mask=mask_g))\n"
                "            acc = acc * tl.exp2(tl.where(top == m, 0.0, m - top))[:, None]\n"
                "            m = top\n"
                "        store_part(",
            ),
        ),
    ),
    "a sink counts in a part and in the merge": (
        "cascade_decode.composed",
        ((OWN_PART, OWN_PART.replace("**options", "sinks=sinks, **options")),),
    ),
    "a sink is capped": (
        "paged_decode.one_pass",
        (
            (
                "sinks_ptr=sinks",
                "sinks_ptr=sinks if sinks is None or soft_cap is None else (sinks / soft_cap).tanh() * soft_cap",
            ),
        ),
    ),
    "a sink is scaled": (
        "paged_decode.one_pass",
        (("sinks_ptr=sinks", "sinks_ptr=None if sinks is None else sinks * scale"),),
    ),
    "a sink is a KV head's": (
        "paged_decode.one_pass",
        (("sinks_ptr=sinks", 'sinks_ptr=None if sinks is None else sinks.repeat_interleave(part["GROUP"])'),),
    ),
    "what is masked is capped": (
        "paged_prefill.packed_gqa",
        (
            (CAP, ""),
            (MAXIMUM, CAP + MAXIMUM),
        ),
    ),
    "a cap is in units of log 2": (
        "paged_prefill.packed_gqa",
        (("**scale_arguments(scale, soft_cap),",
          '**scale_arguments(scale, soft_cap), **({} if soft_cap is None else {"cap_log2": soft_cap}),'),),
    ),
    "a sink has no part in the log-sum-exp": (
        "merge_states.head_tile",
        (("top + tl.log2(total)", "top + tl.log2(weight_a + weight_b)"),),
    ),
    "a sink is of another base": (
        "merge_states.head_tile",
        (("total += tl.exp2((sinks - origin) * 1.4426950408889634)", "total += tl.exp2(sinks - origin)"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_by_drawn_cases(bug: str, tmp_path: Path) -> None:
    (op, original), changes = PLANTED[bug][0].split("."), PLANTED[bug][1]
    source = OPS[op].variants[original].file.read_text()
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    (tmp_path / op).mkdir()
    (tmp_path / op / "planted.py").write_text(source.replace(f"{op}_{original}", f"{op}_planted"))
    planted = OPS.with_variants_from(tmp_path)[op].variants["planted"]
    statuses = (result.status for result in drawn_results(planted, 16))
    assert next(status for status in statuses if status != "ok") == "wrong"
