"""Expressions that name layers: the first that matches is found, and few are looked at one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.tmodel.formats import eight_bits
from tests.tmodel.formats.by_hand import Kind, settings
from tmodel.formats import parse_format, patterns
from tmodel.quantization import LinearShape, Quantization

LONG = "(?:a)" * 201
"""Too long to stand beside others."""


@pytest.mark.parametrize(
    ("expressions", "name", "place"),
    [
        ([], "a.b", None),
        (["a", "b"], "c", None),
        (["b", "a", "a.b"], "a.b", 1),
        (["a.c", "a.b"], "a_b", 1),
        (["b|a", "a.b"], "a.b", 0),
        (["b.c|c", "a.b"], "a.b", 1),
        (["(a)", r"(a|b)\1", "b"], "bb", 1),
        (["(?P<x>c)", "(?P<x>a)(?P=x)"], "aa", 1),
        (["(?i)c", "A"], "a", None),
        (["(?i)A", "a"], "a", 0),
        (["c", "(?i)A"], "a", 1),
        ([LONG, "aa"], "a" * 201, 0),
        ([LONG, "aa"], "aaa", 1),
        (["(?=b)", "(?!b)(?<=a|^)."], "a", 1),
    ],
)  # fmt: skip
def test_the_first_that_matches_from_the_beginning_is_found(
    expressions: list[str], name: str, place: int | None
) -> None:
    assert patterns.find_match(expressions, name, "ignore") == place


LAYERS, EXPERTS = 6, 4
EACH = [f"model.layers.{index}" for index in range(LAYERS)]
GPTQ = settings(Kind("gptq", 4, 32))
COMPRESSED = settings(Kind("compressed-tensors", 4, 32))
LISTED: dict[str, Mapping[str, Any]] = {
    "fp8": {
        **eight_bits.settings(eight_bits.Kind("fp8", "float", "block")),
        "modules_to_not_convert": [f"{one}.{name}" for one in EACH for name in ("input_layernorm", "mlp.gate")],
    },
    "gptq": {**GPTQ, "dynamic": {rf"-:{one}\.mlp\.gate$": {} for one in EACH}},
    "compressed-tensors, names": {**COMPRESSED, "ignore": ["lm_head", *(f"{one}.mlp.gate" for one in EACH)]},
    "compressed-tensors, expressions": {**COMPRESSED, "ignore": [rf"re:{one}\.mlp\.gate$" for one in EACH]},
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
        "extra_config": {f"{one}.mlp.gate": {"bits": 16} for one in EACH},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_a_list_is_looked_through_once_for_each_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published mixture has 36,000 layers and 283 names of others in its config, of which none matches any."""
    asked: list[str] = []
    match = patterns._match

    def counted(expression: str, layer: str) -> bool:
        asked.append(layer)
        return match(expression, layer)

    monkeypatch.setattr(patterns, "_match", counted)
    experts = [f"{one}.mlp.experts.{number}.up_proj" for one in EACH for number in range(EXPERTS)]
    linears = tuple(LinearShape((expert,), (128,), 128) for expert in experts)
    quantization = Quantization(parse_format(LISTED[name]), linears)
    assert all(quantization.scheme(expert) is not None for expert in experts)
    lists = 2 if "compressed" in name else 1  # ignored layers and targets
    assert asked == [expert for expert in experts for _ in range(lists)]
    assert quantization.format.scheme(f"{EACH[-1]}.mlp.gate") is None
