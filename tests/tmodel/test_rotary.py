"""The rotary tables against the formula, and every kind of frequencies against transformers'."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from tmodel.fields import RotaryConfig, parse_fields
from tmodel.rotary import ROPE_KINDS, Rope, RopeParameters

NUM_DRAWS = 200


def rope(dim: int, theta: float) -> Rope:
    return Rope(dim, RopeParameters(rope_theta=theta))


def test_tables_follow_the_formula() -> None:
    cos, sin = rope(6, 10000.0).tables(9, 9, dtype=torch.float64, device="cpu")
    assert cos.shape == sin.shape == (9, 3)
    pair = torch.arange(3, dtype=torch.float64)
    exact = torch.outer(torch.arange(9, dtype=torch.float64), 10000.0 ** (-2 * pair / 6))
    torch.testing.assert_close(cos, exact.cos(), rtol=0, atol=2e-6)
    torch.testing.assert_close(sin, exact.sin(), rtol=0, atol=2e-6)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos), rtol=0, atol=1e-15)


def test_a_float32_table_is_the_float64_one_rounded() -> None:
    for wide, narrow in zip(
        rope(64, 1e6).tables(5000, 5000, dtype=torch.float64, device="cpu"),
        rope(64, 1e6).tables(5000, 5000, dtype=torch.float32, device="cpu"),
        strict=True,
    ):
        assert torch.equal(wide.float(), narrow)


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_fewer_positions_are_the_first_of_the_models_own(kind: str) -> None:
    """The scaling goes by what the model was made for, however little of it is asked for."""
    raw = {**drawn_config(kind, random.Random(kind)), "max_position_embeddings": 40_000}
    whole, part = (rope_of(raw).tables(40_000, count, dtype=torch.float32, device="cpu") for count in (40_000, 20_000))
    for table, its_part in zip(whole, part, strict=True):
        assert torch.equal(table[:20_000], its_part)


@pytest.mark.parametrize("rotary_dim", [0, 1, 7])
def test_odd_widths_are_refused(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match=f"rotary_dim is {rotary_dim}"):
        rope(rotary_dim, 10000.0)


def drawn_config(kind: str, rng: random.Random) -> dict[str, Any]:
    """What a config.json says of its positions: a kind's keys, each that may be absent half the time."""
    dim, length = 2 * rng.randint(2, 128), rng.choice((rng.randint(64, 4096), 2 ** rng.randint(8, 17)))

    def some(**optional: Any) -> dict[str, Any]:
        return {key: value for key, value in optional.items() if rng.random() < 0.5}

    def divisors() -> list[float]:
        return [rng.uniform(1, 64) for _ in range(dim // 2)]

    factor = rng.choice((rng.randint(2, 64), rng.uniform(1, 64)))
    original = some(original_max_position_embeddings=rng.randint(2, length))
    scale = some(attention_factor=rng.uniform(0.5, 2))
    low = rng.uniform(0.5, 4)
    keys: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": factor},
        "llama3": {
            "factor": factor, "low_freq_factor": low, "high_freq_factor": low + rng.uniform(0.5, 8), **original
        },
        "yarn": {
            "factor": rng.choice((factor, None)), **original, **scale,
            **some(beta_fast=rng.uniform(8, 64), beta_slow=rng.uniform(0.5, 4), truncate=rng.random() < 0.5),
            **some(mscale=rng.uniform(0.1, 1.5)), **some(mscale_all_dim=rng.uniform(0.1, 1.5)),
        },
        "longrope": {
            "short_factor": divisors(), "long_factor": divisors(), **original, **scale, **some(factor=float(factor))
        },
    }  # fmt: skip
    theta = rng.choice((rng.randint(100, 10**7), 10 ** rng.uniform(2, 8)))
    sizes = {"hidden_size": 2 * dim, "num_attention_heads": 2, "head_dim": dim, "max_position_embeddings": length}
    if rng.random() < 0.5:
        return {**sizes, "rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys[kind]}}
    return {**sizes, "rope_theta": theta, "rope_scaling": {"type": kind, **keys[kind]}}


def rope_of(raw: dict[str, Any]) -> Rope:
    return parse_fields(RotaryConfig, {"vocab_size": 1, **raw}).whole_head_rope(raw["head_dim"])


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_frequencies_are_those_of_transformers_to_the_bit(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs: Any = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    rng = random.Random(f"rope {kind}")
    seen = set()
    for _ in range(NUM_DRAWS):
        raw = drawn_config(kind, rng)
        length = raw["max_position_embeddings"]
        expected, scale = theirs(LlamaConfig.from_dict(copy.deepcopy(raw)), seq_len=length)
        ours = rope_of(raw)
        frequencies = ours.parameters.inverse_frequencies(ours.dim, length)
        assert frequencies.dtype == expected.dtype == torch.float32
        assert torch.equal(frequencies, expected), raw
        assert ours.parameters.table_scale(length) == scale, raw
        seen.add((tuple(expected.tolist()), scale))
    assert len(seen) > 0.9 * NUM_DRAWS


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_cos_and_sin_are_those_of_transformers(kind: str) -> None:
    """The attention factor is on both tables."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rng = random.Random(f"tables {kind}")
    for _ in range(5):
        raw = {**drawn_config(kind, rng), "max_position_embeddings": rng.randint(64, 1024)}
        length = raw["max_position_embeddings"]
        theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(raw)))
        expected = theirs(torch.zeros(()), torch.arange(length)[None])
        ours = rope_of(raw)
        scale = ours.parameters.table_scale(length)
        assert scale == 1 or kind in ("yarn", "longrope")
        tables = ours.tables(length, length, dtype=torch.float32, device="cpu")
        for table, both_halves in zip(tables, expected, strict=True):
            # A cosine of either is half a unit in the last place off, and so is the product.
            torch.testing.assert_close(table, both_halves[0, :, : ours.dim // 2], rtol=0, atol=2.5e-7 * scale)
