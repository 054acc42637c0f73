"""quantize_groups and block_scaled_matmul: each group and each block has its own scale, and no other."""

import pytest
import torch

from tkernels import OPS, ContractError, Kernel
from tkernels.device import TARGETS
from tkernels.ops.block_scaled_matmul.auto import ALGORITHMS
from tkernels.ops.block_scaled_matmul.split_k import split_inputs
from tkernels.quantized.row_codes import SMALLEST_SCALE
from tkernels.quantized.scaled_weight import ScaledWeight, dequantize
from tkernels.tuning import NEAREST

GROUPS, PRODUCTS = OPS["quantize_groups"].variants, OPS["block_scaled_matmul"].variants
TRITON = [name for name, variant in PRODUCTS.items() if variant.kind == "triton"]
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("variant", list(GROUPS))
def test_a_groups_codes_are_those_of_a_row_of_its_own(variant: str) -> None:
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(0))
    x[1, 128:256] = 0
    x[2, 256:] *= 2.0**-100
    x[0, 5] = 1e8  # the others of its group become 0; those of the next do not
    q, scale = GROUPS[variant](x)
    rows, scales = OPS["quantize_tokens"].variants["torch"](x.view(9, 128), dtype=FP8)
    assert torch.equal(q.float(), rows.view(3, 384).float())
    assert torch.equal(scale, scales.view(3, 3))
    assert scale[1, 1] == SMALLEST_SCALE
    assert q[0, :128].float().abs().count_nonzero() == 1
    assert q[0, 128:].float().abs().count_nonzero() > 200


@pytest.mark.parametrize("variant", list(PRODUCTS))
def test_every_group_and_every_block_counts_by_its_own_scale(variant: str) -> None:
    """One code of 1 in each group of a token and each row of a block: the products of scales, added up."""
    q, weight = torch.zeros(3, 256), torch.zeros(300, 256)
    q[:, [7, 200]], weight[:, [7, 200]] = 1.0, 1.0
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    weight_scale = torch.tensor([[1.0, 64.0], [3.0, 5.0], [7.0, 11.0]])
    bias = torch.arange(300.0)
    out = PRODUCTS[variant](q.to(FP8), scale, weight.to(FP8), weight_scale, bias=bias, out_dtype=torch.float32)
    by_row = weight_scale.repeat_interleave(128, 0)[:300]
    assert torch.equal(out, scale @ by_row.t() + bias)


@pytest.mark.parametrize("variant", TRITON)
def test_both_ops_together_are_within_what_the_codes_lost(variant: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, dense = torch.randn(4, 256, generator=generator), torch.randn(136, 256, generator=generator)
    blocks = [[dense[n : n + 128, k : k + 128] for k in (0, 128)] for n in (0, 128)]
    scales = torch.tensor([[float(block.abs().max()) / 448 for block in row] for row in blocks])
    codes = torch.cat([torch.cat([b / s for b, s in zip(row, line, strict=True)], 1)
                       for row, line in zip(blocks, scales, strict=True)]).to(FP8)  # fmt: skip
    weight = ScaledWeight(codes, scales)
    q, scale = GROUPS["group_tile"](x)
    out = PRODUCTS[variant](q, scale, weight.values, weight.scales, out_dtype=torch.float32)
    decoded = q.double() * scale.double().repeat_interleave(128, 1)
    exact = decoded @ dequantize(weight, torch.float64).t()
    assert (out.double() - exact).abs().max() < 1e-5 * exact.abs().max()
    lost = (x.double() - decoded).abs() @ dense.double().abs().t()
    lost += decoded.abs() @ (dense.double() - dequantize(weight, torch.float64)).abs().t()
    assert ((out.double() - x.double() @ dense.double().t()).abs() <= lost * 1.001 + 1e-4).all()


@pytest.mark.parametrize("variant", ["split_k", "tiled"])
def test_a_tile_of_half_a_group_gives_what_one_of_a_whole_group_does(variant: str) -> None:
    """Codes whose products fp32 sums without error, at scales that are powers of two."""
    generator = torch.Generator().manual_seed(0)
    q, weight = (torch.randint(-8, 9, (rows, 256), generator=generator).float().to(FP8) for rows in (3, 40))
    scale, weight_scale = (2.0 ** torch.randint(-3, 4, shape, generator=generator) for shape in ((3, 2), (1, 2)))
    results = [
        Kernel(PRODUCTS[variant], NEAREST, {"BLOCK_K": depth})(q, scale, weight, weight_scale, out_dtype=torch.float32)
        for depth in (32, 64, 128)
    ]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[2])
    with pytest.raises(ValueError, match="BLOCK_K must be from 16 to 128, got 256"):
        Kernel(PRODUCTS[variant], NEAREST, {"BLOCK_K": 256})(q, scale, weight, weight_scale)


def test_k_is_split_in_whole_tiles_whatever_the_number_of_tokens_and_auto_splits_it_for_few() -> None:
    facts, config = TARGETS["sm_90"], PRODUCTS["split_k"].default_config("sm_90")
    per_split = split_inputs(2560, 9728, config, facts)
    assert per_split % config["BLOCK_K"] == 0
    assert 2560 // 64 * -(-9728 // per_split) <= facts.multiprocessors * config["PROGRAMS_PER_SM"]
    axes = {"N": 2560, "K": 9728, "codes": "float8_e4m3fn", "out": "bfloat16"}
    needed = PRODUCTS["split_k"].workspace({**axes, "M": 3}, config, facts)
    assert needed["partial"].shape == (-(-9728 // per_split), 3, 2560)
    assert "takes 64 rows, not M = 65" in (PRODUCTS["split_k"].supports({**axes, "M": 65}, facts) or "")
    default = PRODUCTS["auto"].default[""]
    chosen = [ALGORITHMS.chosen({**axes, "M": tokens}, default, facts).name for tokens in (1, 32, 65)]
    assert chosen == ["split_k", "split_k", "tiled"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 128, dtype=torch.int8)}, "'weight' gives codes = float8_e4m3fn, but codes = int8"),
        ({"scale": torch.ones(2, 2)}, "'scale' gives K = 256, but K = 128"),
        ({"weight_scale": torch.ones(1, 1)}, r"shape \[1, 1\], where \[ceil\(N/128\) K/128\] is needed"),
        ({"weight_scale": torch.ones(2, 2)}, "'weight_scale' gives K = 256, but K = 128"),
    ],
)
def test_a_call_that_breaks_the_contract_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments = {"q": torch.zeros(2, 128).to(FP8), "scale": torch.ones(2, 1)}
    arguments |= {"weight": torch.zeros(130, 128).to(FP8), "weight_scale": torch.ones(2, 1)}
    assert PRODUCTS["tiled"](**arguments).shape == (2, 130)
    with pytest.raises(ContractError, match=message):
        PRODUCTS["tiled"](**{**arguments, **change})


def test_features_that_do_not_fill_groups_are_refused() -> None:
    with pytest.raises(ContractError, match="K % 128 == 0 does not hold for K = 130"):
        GROUPS["torch"](torch.ones(2, 130))


@pytest.mark.parametrize("arch", list(TARGETS))
def test_both_are_only_where_the_architecture_has_e4m3(arch: str) -> None:
    axes = {"M": 1, "N": 128, "K": 128, "codes": "float8_e4m3fn", "out": "bfloat16"}
    reasons = [PRODUCTS["tiled"].supports(axes, TARGETS[arch]), GROUPS["group_tile"].supports(axes, TARGETS[arch])]
    assert [bool(reason) for reason in reasons] == [arch in ("sm_80", "sm_86", "gfx942")] * 2
