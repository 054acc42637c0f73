"""moe_mlp: a token's experts added up, against loops; which algorithm is run where; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tkernels.ops.test_quantized_weight import drawn
from tkernels import OPS, ContractError
from tkernels.device import TARGETS
from tkernels.launch import Kernel
from tkernels.names import UnknownNameError
from tkernels.ops.moe_mlp.contract import CONTRACT
from tkernels.preparation import prepared_case
from tkernels.quantized.stacked import interleaved_experts, stack
from tkernels.recording import Recording
from tkernels.tuning import NEAREST

OP = OPS["moe_mlp"]
DENSE = pytest.mark.parametrize("variant", [name for name in OP.variants if not name.startswith(("dequant", "fp8"))])


def inputs(tokens: int, top_k: int, experts: int, hidden: int = 24, width: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand((tokens, experts), generator=generator).topk(top_k).indices.int()
    return {
        "x": torch.randn((tokens, hidden), generator=generator),
        "experts": chosen,
        "weights": torch.rand((tokens, top_k), generator=generator),
        "gate_up": torch.randn((experts, 2 * width, hidden), generator=generator) * hidden**-0.5,
        "down": torch.randn((experts, hidden, width), generator=generator) * width**-0.5,
    }


def by_loops(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, limit: float | None = None,
) -> torch.Tensor:  # fmt: skip
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, row in enumerate(experts.tolist()):
        for choice, expert in enumerate(row):
            if expert < 0:
                continue
            both = gate_up[expert].double() @ x[token].double()
            both += 0 if gate_up_bias is None else gate_up_bias[expert].double()
            gate, up = both.chunk(2)
            if limit is None:
                hidden = gate / (1 + (-gate).exp()) * up
            else:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                hidden = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
            own = down[expert].double() @ hidden + (0 if down_bias is None else down_bias[expert].double())
            out[token] += weights[token, choice].double() * own
    return out


@DENSE
def test_a_tokens_experts_are_added_up(variant: str) -> None:
    arguments = inputs(5, 3, 6)
    arguments["experts"][1, 1] = -1
    arguments["experts"][3] = -1
    out = OP.variants[variant](**arguments)
    torch.testing.assert_close(out.double(), by_loops(**arguments), rtol=1e-5, atol=1e-5)
    assert out[3].tolist() == [0] * 24


@DENSE
def test_the_clamped_gate_and_biases_are_gpt_osss(variant: str) -> None:
    arguments = inputs(4, 2, 3)
    arguments["x"] *= 6  # so that gates and ups lie on both sides of the limit
    generator = torch.Generator().manual_seed(3)
    arguments["gate_up_bias"] = torch.randn((3, 32), generator=generator)
    arguments["down_bias"] = torch.randn((3, 24), generator=generator)
    out = OP.variants[variant](**arguments, limit=7.0)
    torch.testing.assert_close(out.double(), by_loops(**arguments, limit=7.0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("seed", "tokens"), [(seed, tokens) for seed in range(4) for tokens in (1, 7)])
def test_one_expert_takes_all_or_none(seed: int, tokens: int) -> None:
    for routing in ("one_takes_all", "one_takes_none"):
        point: dict[str, Any] = {"T": tokens, "K": 2, "E": 4, "routing": routing, "dropped": False}
        drawn_case = CONTRACT.case(CONTRACT.draw_axes(lambda name, values: values[seed % len(values)], point), seed)
        taken = (drawn_case.inputs["experts"] == 0).any(1)
        assert bool(taken.all()) == (routing == "one_takes_all")
        assert bool(taken.any()) == (routing == "one_takes_all")
        assert all(len(set(row)) == 2 for row in drawn_case.inputs["experts"].tolist())


@pytest.mark.parametrize(
    ("tokens", "stored", "expected"),
    [
        (1, "", "gemv_per_pair"), (8, "", "gemv_per_pair"), (9, "", "padded_tiles"), (512, "", "padded_tiles"),
        (513, "", "persistent"), (1, ",W4", "dequant_gemv"), (9, ",W4", "dequant_padded_tiles"),
        (4096, ",W4", "dequant_padded_tiles"), (8, ",FP8", "fp8_gemv"), (9, ",FP8", "fp8_padded_tiles"),
        (4096, ",FP8", "fp8_padded_tiles"),
    ],
)  # fmt: skip
def test_auto_follows_the_number_of_tokens(tokens: int, stored: str, expected: str) -> None:
    auto = OP.variants["auto"]
    assert auto.chosen is not None
    axes = {**CONTRACT.benchmarks[f"T=1,Qwen3-30B-A3B{stored}"], "T": tokens}
    assert auto.chosen(axes, auto.default[""], TARGETS["sm_90"]).name == expected


def test_weights_of_two_kinds_are_refused() -> None:
    arguments = inputs(3, 2, 3, hidden=64, width=8)
    arguments["gate_up"] = interleaved_experts(stack([drawn(seed) for seed in range(3)], 3))
    with pytest.raises(ContractError, match="argument 'down' gives bits = 0, but bits = 4 from the arguments before"):
        OP.variants["auto"](**arguments)


@pytest.mark.parametrize("name", [name for name in OP.variants if name not in ("torch", "auto")])
def test_a_variant_tells_its_sections_apart(name: str) -> None:
    recording, variant = Recording("cpu"), OP.variants[name]
    stored = {"dequant": ",W4", "fp8": ",FP8"}.get(name.partition("_")[0], "")
    axes = {**CONTRACT.benchmarks[f"T=1,Qwen3-30B-A3B{stored}"], "H": 128, "I": 128, "E": 4, "K": 2}
    drawn = CONTRACT.draw_axes(lambda axis, values: values[0], {**axes, "activation": "float16", "weight": "float16"})
    arguments = prepared_case(variant, CONTRACT.case(drawn, 0)).inputs
    Kernel(variant, NEAREST, {}, ranges=recording)(**arguments)
    spans = recording.spans()
    sections = [(span.name, spans[span.parent].name) for span in spans if span.category == "section"]
    sorts = [] if "gemv" in name else ["sort"]
    assert sections == [(f"moe_mlp {section}", f"moe_mlp.{name}") for section in (*sorts, "up", "down")]
    with pytest.raises(UnknownNameError, match="unknown section of moe_mlp 'dwon': there is down, sort, up; did you"):
        Kernel(variant, NEAREST, {}).section("dwon")


def test_bytes_are_those_of_the_distinct_experts() -> None:
    sizes = {"E": 128, "K": 8, "H": 32, "I": 16}
    point = {**CONTRACT.benchmarks["T=64,Qwen3-30B-A3B"], **sizes}
    points = [CONTRACT.draw_axes(lambda name, values: values[0], {**point, "T": tokens}) for tokens in (1, 64)]
    cases = [CONTRACT.case(axes, 0) for axes in points]
    distinct = [int(case.inputs["experts"].unique().numel()) for case in cases]
    assert distinct[0] == 8
    assert 120 <= distinct[1] < 128  # 126 are to be expected
    assert cases[1].bytes_moved - cases[0].bytes_moved == (distinct[1] - 8) * 3 * 32 * 16 * 2 + 63 * (2 * 32 * 2 + 64)
    assert cases[1].flops == 6 * 64 * 8 * 32 * 16
