"""logprobs: whose tokens and ranks are defined to the bit; as near to one and to nothing as fp32; one read of a row."""

from __future__ import annotations

from math import inf, log, log1p, nan
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.tkernels.traffic import count_bytes
from tkernels import OPS, ContractError, UnsupportedError
from tkernels.ops.logprobs import _rows
from tkernels.verification.calls import call

OP = OPS["logprobs"]
EVERY = pytest.mark.parametrize("variant", list(OP.variants))
KERNELS = pytest.mark.parametrize("variant", ["row_per_program", "last_arriver"])
LOWEST = -3.4028234663852886e38


def describe(variant: str, logits: Any, tokens: Any, top: int = 0) -> tuple[list[Any], ...]:
    """(log-probabilities, ranks, listed tokens, their log-probabilities) of rows [B, V]."""
    results = OP.variants[variant](torch.as_tensor(logits, dtype=torch.float32), torch.as_tensor(tokens), top=top)
    logprobs, ranks, top_tokens, top_logprobs = (result.tolist() for result in results)
    return logprobs, ranks, top_tokens, top_logprobs


def by_definition(row: list[float], token: int, top: int) -> tuple[int, list[int]]:
    """(rank, listed tokens), one comparison at a time."""
    if any(one != one for one in row) or max(row) in (inf, -inf):
        return 1, list(range(top))
    rank = 1 + sum(one > row[token] for one in row)
    return rank, sorted(range(len(row)), key=lambda place: (-row[place], place))[:top]


@EVERY
def test_rows_at_fault_have_nan_and_their_first_tokens(variant: str) -> None:
    barred = [-inf] * 4
    logits = [[0.0, nan, 1.0, 2.0], [0.0, -inf, inf, 1.0], barred, [nan, inf, -inf, nan], [inf, inf, inf, inf]]
    for tokens in ([0, 1, 2, 3, 0], [1, 2, 0, 0, 3]):
        logprobs, ranks, listed, values = describe(variant, logits, tokens, top=3)
        assert ranks == [1] * 5
        assert listed == [[0, 1, 2]] * 5
        assert np.isnan(logprobs).all()
        assert np.isnan(values).all()
        assert np.isnan(describe(variant, logits, tokens)[0]).all()


@EVERY
def test_a_barred_token_ranks_behind_all_that_are_not(variant: str) -> None:
    logits = [[-inf, 1.0, -inf, 1.0, 0.0]] * 2
    logprobs, ranks, listed, values = describe(variant, logits, [2, 4], top=5)
    assert ranks == [4, 3]
    assert listed[0] == [1, 3, 4, 0, 2]
    assert logprobs[0] == -inf
    assert values[0][3:] == [-inf, -inf]
    assert abs(logprobs[1] + log(1 + 2 * np.e)) < 1e-6


@EVERY
def test_the_lowest_number_is_not_barred(variant: str) -> None:
    logits = [[LOWEST, LOWEST, -inf], [LOWEST, -inf, -inf], [LOWEST, -inf, 0.0]]
    logprobs, ranks, listed, values = describe(variant, logits, [1, 0, 2], top=2)
    assert (ranks, listed) == ([1, 1, 1], [[0, 1], [0, 1], [2, 0]])
    assert [round(one, 6) for one in logprobs] == [-0.693147, 0.0, 0.0]
    assert values[1:] == [[0.0, -inf], [0.0, LOWEST]]


@EVERY
def test_a_token_that_has_nearly_all_keeps_its_digits(variant: str) -> None:
    """Of log_softmax in fp32 nothing is left: 1 and a billionth is 1."""
    for apart, others in ((20.0, 1), (20.0, 63), (12.5, 5), (40.0, 3)):
        row = [apart, *[0.0] * others]
        for logits, token in ((row, 0), (row[::-1], others)):
            (logprob,), _, _, ((value,),) = describe(variant, [logits], [token], top=1)
            expected = -log1p(others * np.exp(-apart))
            assert abs(logprob / expected - 1) < 1e-6
            assert value == logprob


@EVERY
def test_zeros_of_either_sign_are_equal(variant: str) -> None:
    _, ranks, listed, _ = describe(variant, [[-0.0, 0.0, -1.0, 0.0, -0.0], [0.0, -0.0, 0.0, -0.0, 1e-45]], [1, 3], 4)
    assert ranks == [1, 2]
    assert listed == [[0, 1, 3, 4], [4, 0, 1, 2]]


@EVERY
def test_ties_at_every_place_go_to_the_lower_ids(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (2, 45), generator=generator).float()
    logits[1] = 7.0
    for top in (1, 9, 44, 45):
        _, ranks, listed, _ = describe(variant, logits, [20, 44], top)
        expected = [by_definition(row, token, top) for row, token in zip(logits.tolist(), [20, 44], strict=True)]
        assert list(zip(ranks, listed, strict=True)) == expected


NUMBERS = st.sampled_from([-inf, LOWEST, -1.0, -1e-45, -0.0, 0.0, 1.0, 1.0000001, 88.0, 3e38]) | st.floats(
    width=32, allow_nan=False, max_value=2.0**127
)


@st.composite
def rows(draw: Any) -> tuple[list[float], int, int]:
    """A row of blocks of equal and of different logits, one of its tokens, and how many are listed."""
    some = draw(st.lists(st.lists(NUMBERS, min_size=1, max_size=9), min_size=1, max_size=8))
    row = [one for part in some for one in part * draw(st.sampled_from([1, 1, 2, 9]))]
    if draw(st.booleans()):
        row.sort(reverse=draw(st.booleans()))
    top = draw(st.one_of(st.integers(0, min(20, len(row))), st.just(len(row))))
    return row, draw(st.integers(0, len(row) - 1)), top


@given(rows())
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_variant_lists_what_a_sort_does(drawn: tuple[list[float], int, int]) -> None:
    row, token, top = drawn
    for variant in OP.variants:
        logprobs, (rank,), (listed,), (values,) = describe(variant, [row], [token], top)
        assert (rank, listed) == by_definition(row, token, top), variant
        if token in listed:
            assert values[listed.index(token)] == logprobs[0] or np.isnan(logprobs[0])


@pytest.mark.parametrize(("top", "order"), [(0, "peaked"), (20, "peaked"), (20, "ascending"), (300, "descending")])
@KERNELS
def test_a_row_of_a_model_is_read_once_and_its_largest_parts_again(variant: str, top: int, order: str) -> None:
    vocab = 151_936
    axes = {"B": 1, "V": vocab, "top": top, "score": "float32", "layout": "contiguous", "values": "peaked"}
    inputs = dict(OP.contract.case(axes, 0).inputs)
    if order != "peaked":  # then the largest logits fill whole parts
        inputs["logits"] = inputs["logits"].sort(dim=1, descending=order == "descending").values
    config = OP.variants[variant].default_config("sm_90").pinned({"BLOCK_V": 4096, "maxnreg": 0})
    with count_bytes({"logits": inputs["logits"]}) as passed:
        found = call(OP.variants[variant], inputs, config)
    expected = OP.contract.reference(**inputs)
    assert torch.equal(found["ranks"], expected[1])
    assert torch.equal(found["top_tokens"], expected[2])
    size = inputs["logits"].nbytes
    assert size <= passed["logits", "load"] <= size + top * 32 * 4 + 256  # and the token's own, once a span
    written = sum(count for (_, access), count in passed.items() if access == "store")
    assert written <= (size / 12 if top < 100 else size / 4)


@triton.jit
def exponentiate_all(out_ptr, x_ptr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    tl.store(out_ptr + offs, _rows.exponentiate(tl.load(x_ptr + offs)))


def test_a_gpus_exponential_is_within_three_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own way, by a product that is added to before it is rounded, which the interpreter's is not."""

    def fused(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle) -> TensorHandle:
        wide = a.data.astype(np.float64) * b.data + c.data
        return TensorHandle(wide.astype(np.float32), a.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    monkeypatch.setattr(_rows, "INTERPRETING", tl.constexpr(False))
    x = -torch.cat([torch.linspace(0, 90, 4090), torch.tensor([1e-30, 149.0, 1e5, 3e38, inf, nan])])
    out = torch.empty_like(x)
    exponentiate_all[(1,)](out, x, COUNT=4096)
    expected = x[:4087].double().exp()
    assert ((out[:4087].double() - expected).abs() / expected)[expected > 1e-37].max() < 3 * 2.0**-24
    assert out[4090:-1].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert out[-1].isnan()


def test_what_does_not_fit_is_refused() -> None:
    logits, tokens = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ContractError, match="top <= V"):
        OP.variants["torch"](logits, tokens, top=5)
    with pytest.raises(ContractError, match="at least 0"):
        OP.variants["torch"](logits, tokens, top=-1)
    with pytest.raises(ContractError, match="'tokens' must be int64"):
        OP.variants["torch"](logits, tokens.int())
    with pytest.raises(UnsupportedError, match="float64 is for the torch variants"):
        OP.variants["last_arriver"](logits.double(), tokens)
    assert OP.variants["torch"](logits.double(), tokens)[0].dtype == torch.float64
