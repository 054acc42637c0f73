"""grouped_matmul: every pair meets its own expert and nobody else's, in any dtype and coding, and faults are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tkernels.ops.test_quantized_weight import drawn
from tests.tkernels.outside import computes_wrong, write_copy
from tkernels import OPS, ContractError, UnsupportedError
from tkernels.device import INTERPRETER, TARGETS
from tkernels.ops.grouped_matmul import _tiles
from tkernels.ops.grouped_matmul._argument import coding_of
from tkernels.ops.grouped_matmul.contract import CONTRACT
from tkernels.ops.sort_by_expert import contract as sort_by_expert
from tkernels.quantized.scaled_weight import ScaledWeight
from tkernels.quantized.stacked import dequantize_experts, interleaved_experts, stack
from tkernels.quantized.stacked_scaled import stack_scaled
from tkernels.quantized.weight import from_codes
from tkernels.variant import Variant
from tkernels.verification.check import drawn_results

OP = OPS["grouped_matmul"]
DENSE = [name for name in OP.variants if not name.startswith(("dequant", "fp8"))]
EVERY = pytest.mark.parametrize("variant", DENSE)


def call(
    variant: str, x: torch.Tensor, weight: Any, rows: list[list[int]], tile: int = 16, **options: Any
) -> torch.Tensor:
    experts = torch.tensor(rows, dtype=torch.int32).view(len(rows), -1)
    order, starts, tile_expert, tile_start = sort_by_expert.reference(experts, weight.shape[0], tile)
    return OP.variants[variant](x, weight, experts, order, starts, tile, tile_expert, tile_start, **options)


def by_pairs(x: torch.Tensor, weight: torch.Tensor, rows: list[list[int]]) -> list[torch.Tensor | None]:
    """Each pair's product in float64, None for a pair that is left out."""
    pairs = [expert for row in rows for expert in row]
    each = len(pairs) // len(x)
    return [
        None if expert < 0 else weight[expert].double() @ x[pair // each].double() for pair, expert in enumerate(pairs)
    ]


@EVERY
@pytest.mark.parametrize("per_pair", [False, True])
def test_each_pair_meets_its_expert(variant: str, per_pair: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [[3, 0], [1, 3], [-1, 3], [2, 1], *([[3, 0]] * 15)]
    x = torch.randn((2 * len(rows) if per_pair else len(rows), 40), generator=generator)
    weight = torch.randn((4, 24, 40), generator=generator)
    out = call(variant, x, weight, rows)
    for pair, expected in enumerate(by_pairs(x, weight, rows)):
        if expected is not None:
            torch.testing.assert_close(out[pair].double(), expected, rtol=1e-5, atol=1e-5)


@EVERY
def test_a_tokens_choices_are_added_up_and_those_left_out_are_not(variant: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [[2, 0, -1], [-1, -1, -1], [1, 2, 0]]
    x = torch.randn((9, 24), generator=generator)
    weight, bias = torch.randn((3, 8, 24), generator=generator), torch.randn((3, 8), generator=generator)
    combine = torch.rand((3, 3), generator=generator)
    out = call(variant, x, weight, rows, bias=bias, combine=combine)
    expected = torch.zeros((3, 8), dtype=torch.float64)
    for pair, own in enumerate(by_pairs(x, weight, rows)):
        if own is not None:
            expected[pair // 3] += combine[pair // 3, pair % 3] * (own + bias[rows[pair // 3][pair % 3]])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert out[1].tolist() == [0] * 8


@EVERY
def test_no_tokens_are_no_result(variant: str) -> None:
    x, weight = torch.randn((0, 24)), torch.randn((3, 8, 24))
    experts = torch.zeros((0, 2), dtype=torch.int32)
    tables = sort_by_expert.reference(experts, 3, 16)
    out = OP.variants[variant](x, weight, experts, *tables[:2], 16, *tables[2:])
    assert out.shape == (0, 8)


@pytest.mark.parametrize("kind", [{}, {"coding": "e2m1", "symmetric": True}], ids=["uniform", "e2m1"])
@pytest.mark.parametrize("variant", ["dequant_padded_tiles", "dequant_gemv"])
def test_codes_of_each_expert_are_its_own(variant: str, kind: dict[str, Any]) -> None:
    weight = interleaved_experts(stack([drawn(seed, **kind) for seed in range(3)], 3))
    rows, x = [[1, 0], [2, 1], [-1, 2]], torch.randn((3, 64), generator=torch.Generator().manual_seed(2))
    out = call(variant, x, weight, rows)
    for pair, expected in enumerate(by_pairs(x, dequantize_experts(weight), rows)):
        if expected is not None:
            torch.testing.assert_close(out[pair].double(), expected, rtol=1e-4, atol=1e-4)


EVERY_CODE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
"""Of e4m3, subnormal ones and both zeros among them, but its two NaNs."""


def in_blocks(seed: int, outputs: int = 200, inputs: int = 256) -> ScaledWeight:
    """A weight in which every code is, and whose blocks have scales far apart."""
    codes = EVERY_CODE[torch.randperm(outputs * inputs, generator=torch.Generator().manual_seed(seed)) % 254]
    shape = (-(-outputs // 128), inputs // 128)
    scales = 2.0 ** (torch.arange(shape[0] * shape[1]).view(shape) - 8 + seed)
    return ScaledWeight(codes.view(torch.float8_e4m3fn).view(outputs, inputs), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["fp8_padded_tiles", "fp8_gemv", "auto", "torch"])
def test_every_e4m3_code_and_every_blocks_scale_counts(variant: str, dtype: torch.dtype) -> None:
    """An input of 1 beside zeros picks a column of the weight, whose numbers 16 bits hold."""
    weight = stack_scaled([in_blocks(seed) for seed in range(3)], 3)
    columns = [0, 127, 128, 255]
    x = torch.nn.functional.one_hot(torch.tensor(columns), 256).to(dtype)
    rows = [[1, 0], [2, 1], [-1, 2], [0, 2]]
    out = call(variant, x, weight, rows)
    dense = dequantize_experts(weight)
    for pair, expert in enumerate(expert for row in rows for expert in row):
        if expert >= 0:
            assert torch.equal(out[pair].float(), dense[expert, :, columns[pair // 2]])


def test_what_does_not_fit_is_refused() -> None:
    x, weight, rows = torch.randn((3, 24)), torch.randn((3, 8, 24)), [[1, 0], [2, 1], [-1, 2]]
    with pytest.raises(ContractError, match="K <= E does not hold for E = 1, K = 2"):
        call("torch", x, weight[:1], [[0, 0]] * 3)
    experts = torch.tensor(rows, dtype=torch.int32)
    tables = sort_by_expert.reference(experts, 3, 16)
    with pytest.raises(ContractError, match="argument 'starts' gives E = 3, but E = 4"):
        OP.variants["torch"](x, torch.randn((4, 8, 24)), experts, *tables[:2], 16, *tables[2:])
    with pytest.raises(ContractError, match=r"with which x has 3 or 6 rows, not 5"):
        call("torch", torch.randn((5, 24)), weight, rows)
    with pytest.raises(ContractError, match="a StackedWeight or a StackedScaledWeight, got list"):
        OP.variants["torch"](x, [weight], *[torch.zeros(1)] * 3, 16, *[torch.zeros(1)] * 2)
    codes = stack([drawn(seed) for seed in range(3)], 3)
    with pytest.raises(UnsupportedError, match="its weights must be interleaved, not sequential"):
        call("dequant_gemv", torch.randn((3, 64)), codes, rows)
    with pytest.raises(UnsupportedError, match="its weights are dense, not codes of 4 bits"):
        call("padded_tiles", torch.randn((3, 64)), codes, rows)
    with pytest.raises(UnsupportedError, match="its weights are codes, not dense"):
        call("dequant_gemv", x, weight, rows)
    blocks = stack_scaled([in_blocks(seed) for seed in range(3)], 3)
    with pytest.raises(UnsupportedError, match="its weights are codes in words, not e4m3"):
        call("dequant_gemv", torch.randn((3, 256)), blocks, rows)
    with pytest.raises(UnsupportedError, match="its weights are dense, not codes of 8 bits"):
        call("padded_tiles", torch.randn((3, 256)), blocks, rows)
    with pytest.raises(UnsupportedError, match="its weights are e4m3 codes, not uniform ones of 4 bits"):
        call("fp8_gemv", torch.randn((3, 64)), codes, rows)
    with pytest.raises(UnsupportedError, match="its weights are e4m3 codes, not dense"):
        call("fp8_padded_tiles", x, weight, rows)


def test_a_loaded_models_weight_says_how_it_is_stored() -> None:
    codes = stack([drawn(seed, bits=3, permuted=True, K=72, padding=24) for seed in range(2)], 2)
    assert coding_of(codes) == {
        "bits": 3, "coding": "uniform", "group_size": 32, "padding": 24, "symmetric": False, "permuted": True,
        "order": "sequential",
    }  # fmt: skip
    floats = stack([drawn(seed, symmetric=True, coding="e2m1") for seed in range(2)], 2)
    assert (coding_of(floats)["bits"], coding_of(floats)["coding"]) == (4, "e2m1")
    blocks = coding_of(stack_scaled([in_blocks(0)], 1), "down_")
    told = tuple(blocks[name] for name in ("bits", "coding", "order", "down_group_size"))
    assert told == (8, "e4m3", "interleaved", 128)
    assert coding_of(torch.zeros(1))["bits"] == 0


def test_drawn_codes_of_many_experts_are_each_others_with_the_outputs_turned() -> None:
    point = {**CONTRACT.benchmarks["T=1,Qwen3-30B-A3B,up,W4"], "N": 16, "C": 128, "E": 20, "K": 2, "permuted": True}
    axes = CONTRACT.draw_axes(lambda name, values: values[0], {**point, "symmetric": False})
    dense = dequantize_experts(CONTRACT.case(axes, 0).inputs["weight"], torch.float64)  # [E, N, C]
    assert len({tuple(expert.flatten().tolist()) for expert in dense}) == 20
    assert torch.equal(dense[8:16], dense[:8].roll(1, 1))
    assert torch.equal(dense[16:], dense[:4].roll(2, 1))


def test_bytes_are_those_of_the_distinct_experts() -> None:
    point = {**CONTRACT.benchmarks["T=64,Qwen3-30B-A3B,down"], "N": 16, "C": 32}
    points = [
        CONTRACT.draw_axes(lambda name, values: values[0], {**point, "routing": routing})
        for routing in ("one_takes_all", "uniform")
    ]
    alike, spread = (CONTRACT.case(axes, 0) for axes in points)
    distinct = [int(case.inputs["experts"].unique().numel()) for case in (alike, spread)]
    assert spread.bytes_moved - alike.bytes_moved == (distinct[1] - distinct[0]) * 16 * 32 * 2
    assert alike.flops == spread.flops == 2 * 64 * 8 * 16 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["dequant_padded_tiles", "dequant_gemv"])
def test_every_e2m1_code_in_every_place_has_its_value(variant: str, dtype: torch.dtype) -> None:
    """Rows of the unit matrix read the weight out: each output has the 16 codes at every place of a word."""
    codes = (torch.arange(32)[:, None] + torch.arange(16)[None, :]) % 16  # [places, outputs]
    scales = torch.tensor([[2.0**exponent for exponent in range(-8, 8)]], dtype=dtype)
    weight = stack([replace(from_codes(codes, 4, scales=scales), e2m1=True)], 1)
    out = call(variant, torch.eye(32, dtype=dtype), interleaved_experts(weight), [[0]] * 32)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    assert torch.equal(out.double(), values[codes] * scales.double())


FAULTS = {
    "padding_rows_are_written": ("mask = places < tl.load(starts_ptr + expert + 1)", "mask = places >= 0"),
    "the_neighbours_combine_weight": ("stride_combine_t + choice,", "stride_combine_t + top_k - 1 - choice,"),
    "nobodys_pairs_count": ("mask=mask_t, other=-1) >= 0", "mask=mask_t, other=-1) >= -1"),
    "the_next_experts_bias": ("expert.to(tl.int64) * stride_bias_e", "(expert // 2).to(tl.int64) * stride_bias_e"),
    "the_order_of_places": ("other=0), mask", "other=0) // 2 * 2, mask"),
    "rows_in_their_sorted_order": (
        "pairs.to(tl.int64)[:, None] * stride_out_m",
        "(pairs - pairs % 2).to(tl.int64)[:, None] * stride_out_m",
    ),
    "sums_begin_at_the_last_choice": ("for choice in range(top_k)", "for choice in range(1, top_k)"),
}


def with_fault(folder: Path, *changes: tuple[str, str]) -> Variant:
    """A copy of padded_tiles, with the device functions in its own file, and changes in these."""
    source = Path(_tiles.__file__).read_text()
    helpers = source[source.index("COMBINED_AT_A_TIME") :]
    own = [change for change in changes if change[0] not in helpers]  # of the kernels in the file
    for before, after in changes:
        helpers = helpers.replace(before, after)
    text = OP.variants["padded_tiles"].file.read_text()
    start = text.index("from tkernels.ops.grouped_matmul._tiles import (")
    imports = text[start : text.index(")\n", start) + 2]
    more = "from typing import Any\nfrom tkernels.language import dot\nfrom tkernels.workspace import Buffer\n"
    write_copy(
        folder,
        "grouped_matmul.padded_tiles",
        "planted",
        (imports, more),
        ("CONFIGS = ", f"{helpers}\n\nCONFIGS = "),
        *own,
    )
    return OPS.with_variants_from(folder)["grouped_matmul"].variants["planted"]


def test_a_copy_without_a_fault_is_right(tmp_path: Path) -> None:
    assert {result.status for result in drawn_results(with_fault(tmp_path), 20)} == {"ok"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    assert computes_wrong(with_fault(tmp_path, FAULTS[fault]))


def test_variants_are_for_devices_that_have_what_they_need() -> None:
    axes = {**CONTRACT.benchmarks["T=4096,Qwen3-30B-A3B,up"], "weight_aligned": True}
    boxes = OP.variants["tensor_descriptor"]
    assert boxes.supports(axes, TARGETS["sm_90"]) is None
    assert "from sm_90 on" in str(boxes.supports(axes, TARGETS["sm_80"]))
    assert "16 bytes" in str(boxes.supports({**axes, "weight_aligned": False}, INTERPRETER))
