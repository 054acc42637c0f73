"""sample: one token, whoever computes it; drawn as the float64 distribution says; read three times at most.

    python -m tests.tkernels.ops.test_sample 100000

draws so many rows with every variant beside the definition, and a tenth as many beside exact fractions. The seed of the
first case may follow, so that several processes draw different rows.
"""

from __future__ import annotations

import random
import sys
from fractions import Fraction
from math import ceil, floor, inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.tkernels.traffic import count_bytes
from tkernels import OPS, Case, ContractError, UnsupportedError
from tkernels.ops.sample import _constants as constants
from tkernels.ops.sample import _definition as definition
from tkernels.verification.calls import call

OP = OPS["sample"]
CONTRACT = OP.contract
EVERY = pytest.mark.parametrize("variant", list(OP.variants))
POLICIES = pytest.mark.parametrize("inverse_cdf", [False, True], ids=["gumbel", "inverse_cdf"])
CPU = torch.device("cpu")


def rows_of(logits: Any, **asks: Any) -> dict[str, Any]:
    """The arguments of rows [B, V] that ask for a draw at temperature 1, and what else is said, for all of them."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    batch = logits.shape[0]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 7, "indices": 0}
    dtypes = {name: torch.int64 if name in ("top_k", "seeds", "indices") else torch.float64 for name in neutral}
    own = {name: asks.pop(name, value) for name, value in neutral.items()}
    given = {name: torch.as_tensor(value, dtype=dtypes[name]).expand(batch).clone() for name, value in own.items()}
    return {"logits": logits, **given, **asks}


def sample(variant: str, logits: Any, **asks: Any) -> list[int]:
    found: list[int] = OP.variants[variant](**rows_of(logits, **asks)).tolist()
    return found


def drawn_case(seed: int) -> Case:
    choose = random.Random(seed)
    axes = CONTRACT.draw_axes(lambda name, values: choose.choice(list(values)), wide=seed % 20 == 19)
    return CONTRACT.case(axes, seed)


@EVERY
@POLICIES
def test_rows_that_no_model_should_make_say_so(variant: str, inverse_cdf: bool) -> None:
    barred = [-inf, -inf, -inf]
    logits = [[0.0, nan, 1.0], [-inf, inf, 0.0], barred, [-inf, -3.0, -inf], [nan, inf, -inf]]
    for temperature in (0.0, 1.0):
        for asks in ({}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}):
            found = sample(variant, logits, temperature=temperature, inverse_cdf=inverse_cdf, **asks)
            assert found == [-1, -1, -2, 1, -1]


@EVERY
def test_without_a_temperature_it_is_the_first_of_the_largest(variant: str) -> None:
    logits = [[1.0, 4.0, 4.0, -2.0], [5.0, 1.0, 5.0, 5.0]]
    assert sample(variant, logits, temperature=0.0, top_k=1, min_p=1.0) == [1, 0]


@EVERY
@POLICIES
def test_one_token_is_left_by_every_filter(variant: str, inverse_cdf: bool) -> None:
    logits = [[0.0, 2.0, 1.0, 2.0]] * 3
    for asks in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0, "top_k": 1}, {"temperature": 1e-30, "top_k": 1}):
        assert sample(variant, logits, indices=[0, 1, 2], inverse_cdf=inverse_cdf, **asks) == [1, 1, 1]
    kept = sample(variant, [[0.0, 2.0, 1.0, 2.0]] * 64, indices=list(range(64)), min_p=1.0, inverse_cdf=inverse_cdf)
    assert set(kept) == {1, 3}


@EVERY
def test_a_top_k_above_the_vocabulary_keeps_all(variant: str) -> None:
    logits, indices = torch.randn(8, 9, generator=torch.Generator().manual_seed(0)), list(range(8))
    for top_k in (9, 10, 2**31 - 1, 2**63 - 1):
        assert sample(variant, logits, indices=indices, top_k=top_k) == sample(variant, logits, indices=indices)


@EVERY
def test_penalties_are_those_of_a_slot(variant: str) -> None:
    """Token 0 stands in the prompt, 1 twice in the output, 2 in neither."""
    logits = torch.tensor([[4.0, 4.5, 3.0]]).expand(5, 3).contiguous()
    counts = torch.tensor([[1, 4, 0], [0, 0, 0]], dtype=torch.int32)
    asks = torch.tensor([[1, 0, 0], [2.0, 0, 0], [1, 0.5, 0], [1, 0, 0.75], [2.0, 0, 0]], dtype=torch.float32)
    slots = torch.tensor([0, 0, 0, 0, -1])
    found = sample(variant, logits, temperature=0.0, counts=counts, slots=slots, penalties=asks)
    # 4 and 4.5; 2 and 2.25 beside 3; 4.5 - 2 * 0.5; 4.5 - 0.75; none.
    assert found == [1, 2, 0, 0, 1]


@EVERY
@POLICIES
def test_a_row_does_not_see_its_batch(variant: str, inverse_cdf: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    batch = 256 if variant == "torch" else 24  # of kernels the sanitizer `batch` looks at larger ones
    logits = torch.randn(batch, 33, generator=generator)
    asks = {
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        "indices": torch.randint(0, 2**31 - 1, (batch,), generator=generator),
        "top_p": torch.rand(batch, generator=generator).double().clamp(min=0.1),
        "top_k": torch.randint(0, 33, (batch,), generator=generator),
    }
    together = sample(variant, logits, inverse_cdf=inverse_cdf, **asks)
    for row in range(0, batch, 7 if batch < 64 else 51):
        alone = {name: value[row : row + 1] for name, value in asks.items()}
        assert sample(variant, logits[row : row + 1], inverse_cdf=inverse_cdf, **alone) == together[row : row + 1]


def test_every_variant_draws_the_defined_token() -> None:
    assert compare(range(4, 100_000, 5), 200) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_so_it_does_in_2000_rows(part: int) -> None:
    """The docstring above has the command for more."""
    assert compare(range(part, 100_000, 5), 500) >= 500


def compare(seeds: Any, num_rows: int) -> int:
    """How many rows were drawn, at least as many as asked for, without a difference to the definition."""
    rows = 0
    for seed in seeds:
        case = drawn_case(seed)
        expected = CONTRACT.reference(**case.inputs)
        for name, variant in OP.variants.items():
            found = variant(**case.inputs)
            assert torch.equal(found, expected), f"{name}, seed {seed}, {case.axes}: {found} for {expected}"
        rows += len(expected)
        if rows >= num_rows:
            return rows
    raise AssertionError("seeds ran out")


def test_exact_fractions_agree() -> None:
    assert compare_fractions(range(1000, 100_000), 150) >= 150


def compare_fractions(seeds: Any, num_rows: int) -> int:
    rows = 0
    for seed in seeds:
        case = drawn_case(seed)
        if int(case.axes["V"]) > 300:
            continue
        expected = CONTRACT.reference(**case.inputs).tolist()
        assert [sample_by_fractions(case.inputs, row) for row in range(len(expected))] == expected, (seed, case.axes)
        rows += len(expected)
        if rows >= num_rows:
            return rows
    raise AssertionError("seeds ran out")


def rounded(value: Fraction) -> Fraction:
    """To the nearest float64, of a number in its range."""
    return Fraction(float(value))


def horner(coefficients: tuple[int, ...], x: Fraction) -> int:
    """A polynomial, each product rounded down."""
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = coefficient + floor(value * x)
    return value


def sample_by_fractions(inputs: Any, row: int) -> int:
    """The definition once more, in rational numbers, a token at a time; a float64 is rounded to where it says so."""
    logits = inputs["logits"][row].tolist()
    if any(one != one or one == inf for one in logits):
        return -1
    scores = {token: Fraction(one) for token, one in enumerate(logits) if one > -inf}
    if not scores:
        return -2
    if inputs["slots"] is not None and int(inputs["slots"][row]) >= 0:
        penalize_by_fractions(scores, inputs["counts"][int(inputs["slots"][row])].tolist(), inputs["penalties"][row])
    if float(inputs["temperature"][row]) == 0.0:
        return max((score, -token) for token, score in scores.items())[1] * -1
    tokens = keep_by_fractions(
        scores, *(inputs[name][row].item() for name in ("temperature", "min_p", "top_k", "top_p"))
    )
    seed, index = int(inputs["seeds"][row]), int(inputs["indices"][row])
    if not inputs["inverse_cdf"]:
        return max((noise_by_fractions(seed, index, token) - units, -token) for token, units, _ in tokens)[1] * -1
    low, high, _, _ = definition.philox(seed, (0, index, 1, 0))
    left = floor(Fraction((high << 32 | low) >> 2, 2**62) * sum(weight for *_, weight in tokens))
    for token, _, weight in sorted(tokens):
        left -= weight
        if left < 0:
            return token
    raise AssertionError("a share below 1 of a sum is below it")


def penalize_by_fractions(scores: dict[int, Fraction], counts: list[int], penalties: torch.Tensor) -> None:
    repetition, frequency, presence = map(Fraction, penalties.tolist())
    for token, score in scores.items():
        seen = counts[token]
        if seen:
            score = rounded(score / repetition if score > 0 else score * repetition)
            score = rounded(score - frequency * (seen // 2))
            scores[token] = rounded(score - presence) if seen > 1 else score


def keep_by_fractions(
    scores: dict[int, Fraction], temperature: float, min_p: float, top_k: int, top_p: float
) -> list[tuple[int, int, int]]:
    """(token, its distance in units, its weight) of what is kept, the nearest first."""
    scale = rounded(Fraction(constants.LOG2_E) / Fraction(temperature))
    tokens = []
    for token, score in scores.items():
        apart = rounded(max(scores.values()) - score)
        binades = min(apart * scale, Fraction(64))  # above which no rounding brings it below
        units = floor(rounded(binades) * 2**31)
        whole = (units + 2**30) // 2**31
        rest = Fraction(units, 2**31) - whole
        weight = (2**62 + floor(horner(constants.POWER, rest) * rest * 2**29)) >> whole
        if weight >= max(1, ceil(Fraction(min_p) * 2**62)):
            tokens.append((apart, token, units, weight))
    tokens = sorted(tokens)[: top_k or None]
    needed = Fraction(ceil(Fraction(top_p) * 2**31), 2**31) * sum(weight for *_, weight in tokens)
    while len(tokens) > 1 and sum(weight for *_, weight in tokens[:-1]) >= needed:
        tokens.pop()
    return [one[1:] for one in tokens]


def noise_by_fractions(seed: int, index: int, token: int) -> int:
    low, high = definition.philox(seed, (token >> 1, index, 0, 0))[2 * (token & 1) :][:2]
    u = Fraction(2 * ((high << 32 | low) >> 12) + 1, 2**53)
    whole, below_one = 0, u
    while below_one < Fraction(1, 2):
        whole, below_one = whole + 1, 2 * below_one
    exact = minus_log(1 - below_one)  # -log2 u is whole and this
    if whole:
        exact = rounded(whole + Fraction(floor(exact * 2**52), 2**52))
    exponent = 0
    while exact >= 1:
        exponent, exact = exponent + 1, exact / 2
    while exact < Fraction(1, 2):
        exponent, exact = exponent - 1, 2 * exact
    return floor(minus_log(1 - exact) * 2**31) - exponent * 2**31


def minus_log(rest: Fraction) -> Fraction:
    """-log2(1 - rest)."""
    coarse = Fraction(floor(rest * 2**31), 2**31)
    return rounded(rest * Fraction(horner(constants.LOG, coarse - Fraction(1, 4)), 2**31))


def test_philox_is_the_published_one() -> None:
    """The known answers of Random123."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert definition.philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert definition.philox(2**64 - 1, (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    key = 0x299F31D0 << 32 | 0xA4093822
    assert definition.philox(key, pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_weights_are_a_distribution_within_2_to_the_minus_30() -> None:
    """Of a token's probability the error is at most half of what relative errors of weights differ by, and the total
    variation half of that. A weight below one unit, 2**-62, is 0: with 2**24 tokens no more than 2**-38 of all.
    """
    scores = -np.concatenate([np.linspace(0, 20, 20_001), np.geomspace(1e-12, 20, 20_001)])  # 0 is the largest
    for temperature in (1.0, 0.37, 3.0):
        _, weights = definition.find_weights(scores, temperature)
        expected = np.exp(scores.astype(np.longdouble) / np.longdouble(temperature)) * np.longdouble(2) ** 62
        error = ((weights - expected) / expected)[expected > 2.0**34].astype(np.float64)
        assert (error.max() - error.min()) / 4 < 2.0**-30
        assert abs(weights - expected).max() < 2.0**62 * 2.0**-30


def test_noise_is_gumbels_within_2_to_the_minus_30() -> None:
    """As factors of weights, whose relative errors move a distribution by a fourth of what they differ by, at most."""
    tokens = np.arange(20_000)
    for seed, index in ((5, 0), (-3, 2**31 - 1)):
        noise = definition.find_noise(tokens, seed, index) * 2.0**-31
        words = [definition.philox(seed, (int(t) // 2, index, 0, 0))[2 * (int(t) % 2) :][:2] for t in tokens]
        u = np.array([((high << 32 | low) >> 12) * 2 + 1 for low, high in words]) * 2.0**-53
        error = (noise + np.log2(-np.log2(u))) * np.log(2)
        assert (error.max() - error.min()) / 4 < 2.0**-30
        assert abs(error).max() < 2.0**-29


CHECKED_SHARES = (
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.95, "min_p": 0.02},
)


@POLICIES
@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("asks", CHECKED_SHARES, ids=str)
def test_tokens_come_as_often_as_their_probabilities_say(
    asks: dict[str, float], penalized: bool, inverse_cdf: bool
) -> None:
    draws = 8000
    scores = np.array([2.0, 1.5, 1.25, 1.0, 0.75, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0])
    more: dict[str, Any] = {}
    logits = torch.tensor(scores).float().expand(draws, -1).contiguous()
    if penalized:
        seen = np.array([5, 1, 0, 3, 0, 2, 7, 0, 1, 0, 0, 2])
        more = {
            "counts": torch.tensor(seen, dtype=torch.int32)[None],
            "slots": torch.zeros(draws, dtype=torch.int64),
            "penalties": torch.tensor([[1.25, 0.25, 0.5]]).expand(draws, -1).contiguous(),
        }
        repeated = np.where(scores > 0, scores / 1.25, scores * 1.25)
        scores = np.where(seen > 0, repeated, scores) - 0.25 * (seen // 2) - 0.5 * (seen > 1)
    found = sample("torch", logits, indices=list(range(draws)), inverse_cdf=inverse_cdf, **asks, **more)
    expected = filtered(scores, **asks)
    counts = np.bincount(found, minlength=12)
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert chisquare(counts[kept], expected[kept] * draws).pvalue > 1e-4


def filtered(
    scores: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The float64 distribution."""
    shares = np.exp((scores - scores.max()) / temperature)
    shares[shares < min_p] = 0
    order = np.argsort(-shares, kind="stable")
    shares[order[top_k or None :] if top_k else []] = 0
    reached = np.cumsum(shares[order]) / shares.sum()
    shares[order[np.searchsorted(reached, top_p) + 1 :]] = 0
    return shares / shares.sum()


@pytest.mark.parametrize(
    "asks",
    [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "top_p": 0.95, "min_p": 0.01}, {"inverse_cdf": True},
     {"top_p": 0.9, "inverse_cdf": True}],
    ids=str,
)  # fmt: skip
def test_candidates_reads_a_row_of_a_model_three_times_at_most(asks: dict[str, Any]) -> None:
    vocab = 151_936
    axes = {"B": 1, "V": vocab, "R": 1, "score": "float32", "layout": "contiguous", "values": "peaked"}
    axes |= {"counts": False, "slots": False, "penalties": False, "inverse_cdf": False, "asks": "nothing"}
    logits = CONTRACT.case(axes, 0).inputs["logits"]
    inputs = {**rows_of(logits, **asks), "logits": logits}
    variant = OP.variants["candidates"]
    config = variant.default_config("sm_90").pinned({"BLOCK_V": 4096, "maxnreg": 0})
    with count_bytes({"logits": logits}) as passed:
        found = call(variant, {**dict.fromkeys(CONTRACT.arguments), "inverse_cdf": False, **inputs}, config)
    assert found["tokens"].tolist() == sample("torch", logits, **asks)
    # The list's tokens are read once more for each guess, from the L1 cache: some hundreds of 151,936.
    assert passed["logits", "load"] <= 3 * logits.nbytes
    written = sum(count for (_, access), count in passed.items() if access == "store")
    assert written < logits.nbytes / 8


def test_what_does_not_fit_is_refused() -> None:
    inputs = rows_of(torch.zeros(2, 4))
    with pytest.raises(ContractError, match="slots == counts"):
        OP.variants["torch"](**inputs, counts=torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(ContractError, match="'seeds' must be int64"):
        OP.variants["torch"](**{**inputs, "seeds": inputs["seeds"].int()})
    with pytest.raises(UnsupportedError, match="float64 is for the torch variants"):
        OP.variants["candidates"](**{**inputs, "logits": inputs["logits"].double()})


def main() -> None:
    rows, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10**6
    drawn = compare(range(first, 10**9), rows)
    print(f"{drawn:,} rows: {', '.join(OP.variants)} draw the defined token", flush=True)
    print(f"{compare_fractions(range(first, 10**9), rows // 10):,} rows: exact fractions agree")


if __name__ == "__main__":
    main()
