"""scaled_matmul: int8 sums are exact to the last product, every fp8 code counts what it means; and ScaledWeight."""

from dataclasses import replace

import pytest
import torch

from tkernels import OPS, Config, ContractError, Kernel, prepared
from tkernels.device import INTERPRETER, TARGETS
from tkernels.ops.code_sums import unsupported_sums
from tkernels.ops.scaled_matmul.auto import ALGORITHMS
from tkernels.ops.scaled_matmul.contract import MOST_INPUTS
from tkernels.ops.scaled_matmul.split_k import split_inputs
from tkernels.quantized.scaled_weight import ScaledWeight, concatenate, dequantize, quantize_rows
from tkernels.tuning import NEAREST

VARIANTS = OPS["scaled_matmul"].variants
TRITON = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]
FP8 = torch.float8_e4m3fn


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


def random_codes(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, (rows, inputs), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_scales_and_bias_are_each_their_own_rows_and_columns(variant: str) -> None:
    q, weight = torch.tensor([[1, 2], [3, -4]]).to(torch.int8), torch.tensor([[5, 6], [7, -8], [0, 1]]).to(torch.int8)
    scale, weight_scale = torch.tensor([2.0, 0.5]), torch.tensor([1.0, 4.0, 16.0])
    out = VARIANTS[variant](q, scale, weight, weight_scale, bias=torch.tensor([1.0, 2.0, 3.0]), out_dtype=torch.float32)
    assert out.tolist() == [[17 * 2 + 1, -9 * 8 + 2, 2 * 32 + 3], [-9 * 0.5 + 1, 53 * 2 + 2, -4 * 8 + 3]]


@pytest.mark.parametrize(("variant", "more"), [("tiled", {}), ("split_k", {"PROGRAMS_PER_SM": 16})])
def test_int8_sums_are_exact_at_the_most_inputs_of_the_largest_codes(variant: str, more: dict[str, int]) -> None:
    kernel = Kernel(VARIANTS[variant], NEAREST, {"BLOCK_K": 1024, **more})
    q, weight = (torch.full((rows, MOST_INPUTS), -128, dtype=torch.int8) for rows in (2, 1))
    q[1, 0] = -127
    out = kernel(q, torch.tensor([2.0**-31, 1.0]), weight, ones(1), out_dtype=torch.float32)
    assert MOST_INPUTS * 128**2 < 2**31 <= (MOST_INPUTS + 1) * 128**2
    assert out.flatten().tolist() == [MOST_INPUTS * 2.0**-17, float(torch.tensor(MOST_INPUTS * 128**2 - 128).float())]


@pytest.mark.parametrize("inputs", [33, 300])
def test_int8_has_the_same_bits_in_every_variant_config_and_batch(inputs: int) -> None:
    q, weight = random_codes(5, inputs), random_codes(24, inputs, seed=1)
    scale, weight_scale = torch.rand(5) + 0.1, torch.rand(24) + 0.1
    expected = ((q.long() @ weight.long().t()).float() * scale.unsqueeze(-1)) * weight_scale
    for name in ("tiled", "split_k"):
        for config in (VARIANTS[name].default_config("sm_90"), VARIANTS[name].default_config("interpreter")):
            kernel = Kernel(VARIANTS[name], NEAREST, config.as_dict())
            assert torch.equal(kernel(q, scale, weight, weight_scale, out_dtype=torch.float32), expected)
            alone = kernel(q[3:4], scale[3:4], weight, weight_scale, out_dtype=torch.float32)
            assert torch.equal(alone, expected[3:4])


@pytest.mark.parametrize("variant", TRITON)
def test_every_fp8_code_counts_what_it_means(variant: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = codes[~codes.float().isnan()].unsqueeze(-1)  # [254, 1]
    ten = torch.full((10, 1), 1.0).to(FP8)
    out = VARIANTS[variant](ten, ones(10), finite, ones(254), out_dtype=torch.float32)
    assert torch.equal(out, finite.float().t().expand(10, 254))


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("variant", TRITON)
def test_both_ops_together_are_within_what_the_codes_lost(variant: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, dense = (torch.randn(rows, 200, generator=generator) for rows in (4, 20))
    x[1] = 0
    bias = torch.randn(20, generator=generator)
    weight = quantize_rows(dense, dtype)
    q, scale = OPS["quantize_tokens"].variants["row_per_program"](x, dtype=dtype)
    out = VARIANTS[variant](q, scale, weight.values, weight.scales, bias=bias, out_dtype=torch.float32)
    decoded = q.double() * scale.double().unsqueeze(-1)
    lost = (x.double() - decoded).abs() @ dense.double().abs().t()
    lost += decoded.abs() @ (dense.double() - dequantize(weight, torch.float64)).abs().t()
    error = (out.double() - (x.double() @ dense.double().t() + bias.double())).abs()
    assert (error <= lost * 1.001 + 1e-4).all()
    assert torch.equal(out[1], bias)
    assert (error[0] > 0).all()


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_no_tokens_are_no_rows(variant: str) -> None:
    q, weight = torch.zeros(0, 8, dtype=torch.int8), torch.zeros(3, 8, dtype=torch.int8)
    assert VARIANTS[variant](q, ones(0), weight, ones(3)).shape == (0, 3)


def test_the_result_has_the_dtype_that_each_call_asks_for() -> None:
    q, weight = random_codes(2, 16), random_codes(8, 16, seed=1)
    kernel = Kernel(VARIANTS["tiled"], NEAREST, {})
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float32):
        assert kernel(q, ones(2) / 128, weight, ones(8) / 128, out_dtype=dtype).dtype == dtype
    assert kernel(q, ones(2), weight, ones(8)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 8).to(FP8)}, "'weight' gives codes = float8_e4m3fn, but codes = int8"),
        ({"weight": torch.zeros(3, 9, dtype=torch.int8)}, "'weight' gives K = 9, but K = 8"),
        ({"q": torch.zeros(2, 8, dtype=torch.int32)}, "'weight' gives codes = int8, but codes = int32"),
        ({"scale": ones(3)}, "'scale' gives M = 3, but M = 2"),
        ({"scale": ones(2).half()}, "'scale' must be float32"),
        ({"bias": ones(3)}, "'out_dtype' gives out = bfloat16, but out = float32"),
        ({"out_dtype": torch.int8}, "out = int8, but out in"),
    ],
)
def test_a_call_that_breaks_the_contract_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments = {"q": torch.zeros(2, 8, dtype=torch.int8), "scale": ones(2)}
    arguments |= {"weight": torch.zeros(3, 8, dtype=torch.int8), "weight_scale": ones(3)}
    with pytest.raises(ContractError, match=message):
        VARIANTS["tiled"](**{**arguments, **change})


def test_more_inputs_than_int32_holds_the_products_of_are_refused() -> None:
    q = torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8)
    with pytest.raises(ContractError, match="K = 131072, but 1 <= K <= 131071"):
        VARIANTS["torch"](q, ones(1), q, ones(1))


@pytest.mark.parametrize("arch", list(TARGETS))
def test_fp8_sums_are_refused_where_they_are_shorter_than_the_result(arch: str) -> None:
    def reason(codes: str, out: str) -> str:
        return unsupported_sums({"codes": codes, "out": out}, TARGETS[arch]) or ""

    assert all(reason("int8", out) == "" for out in ("float32", "bfloat16"))
    if arch in ("sm_89", "sm_90", "sm_120"):
        assert f"the matrix units of {arch} sum fp8 products in fewer bits" in reason("float8_e4m3fn", "float32")
        assert reason("float8_e4m3fn", "bfloat16") == reason("float8_e4m3fn", "float16") == ""
    else:
        assert bool(reason("float8_e4m3fn", "bfloat16")) == (arch != "sm_100")
    assert unsupported_sums({"codes": "float8_e4m3fn", "out": "float32"}, INTERPRETER) is None


def test_k_is_split_in_whole_blocks_whatever_the_number_of_tokens() -> None:
    config = VARIANTS["split_k"].default_config("sm_90")
    facts = TARGETS["sm_90"]
    per_split = split_inputs(2560, 9728, config, facts)
    assert per_split % config["BLOCK_K"] == 0
    assert 2560 // 64 * -(-9728 // per_split) <= facts.multiprocessors * config["PROGRAMS_PER_SM"]
    assert split_inputs(2**20, 9728, config, facts) == 9728
    needed = VARIANTS["split_k"].workspace({"M": 3, "N": 2560, "K": 9728, "codes": "int8"}, config, facts)
    assert needed["partial"].dtype == torch.int32
    assert needed["partial"].shape == (-(-9728 // per_split), 3, 2560)
    reason = VARIANTS["split_k"].supports({"M": 65, "codes": "int8", "out": "bfloat16"}, facts)
    assert reason is not None
    assert "takes 64 rows, not M = 65" in reason


def test_auto_goes_by_the_number_of_tokens_and_a_tuned_choice_stands_above_it() -> None:
    axes = {"N": 256, "K": 256, "codes": "int8", "out": "bfloat16"}
    default, tuned = VARIANTS["auto"].default[""], Config(ALGORITHM=3)
    untuned = [ALGORITHMS.chosen({**axes, "M": tokens}, default, INTERPRETER).name for tokens in (1, 4, 65)]
    assert untuned == ["split_k", "split_k", "tiled"]
    assert ALGORITHMS.chosen({**axes, "M": 4}, tuned, INTERPRETER).name == "tiled"
    assert ALGORITHMS.chosen({**axes, "M": 200}, Config(ALGORITHM=2), INTERPRETER).name == "tiled"


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_a_weights_rows_are_quantized_each_by_its_largest_value(dtype: torch.dtype, source: torch.dtype) -> None:
    dense = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(source)
    dense[2] = 0
    dense[3] *= 1000
    weight = quantize_rows(dense, dtype)
    assert (weight.shape, weight.dtype, weight.nbytes) == ((6, 64), dtype, 6 * 64 + 6 * 4)
    codes = weight.values.float().abs()
    step = weight.scales.unsqueeze(-1) * (1 if dtype == torch.int8 else (codes / 8).clamp(min=2.0**-9))
    assert ((dequantize(weight) - dense.float()).abs() <= step * 0.5001).all()
    top = 127 if dtype == torch.int8 else 448
    assert codes.amax(1).tolist() == [top, top, 0, top, top, top]
    assert torch.equal(dequantize(weight)[2], torch.zeros(64))
    again = quantize_rows(dequantize(weight), dtype)
    assert torch.equal(again.values.float(), weight.values.float())


def test_decoding_rounds_once() -> None:
    weight = quantize_rows(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), torch.int8)
    exact = weight.values.double() * weight.scales.double().unsqueeze(-1)
    assert torch.equal(dequantize(weight, torch.float64), exact)
    assert torch.equal(dequantize(weight, torch.float32), exact.float())
    assert torch.equal(dequantize(weight, torch.bfloat16), exact.float().bfloat16())


def test_a_weight_moves_and_maps_part_by_part_and_is_prepared_as_it_is() -> None:
    weight = quantize_rows(torch.ones(4, 8), FP8)
    seen: list[torch.dtype] = []
    copy = weight.map_tensors(lambda tensor: (seen.append(tensor.dtype), tensor.clone())[1])
    assert seen == [FP8, torch.float32]
    assert torch.equal(dequantize(copy), dequantize(weight))
    assert weight.to("meta").device.type == "meta"
    made, report = prepared(VARIANTS["auto"], weight)
    assert made is weight
    assert report.bytes_after == weight.nbytes == 4 * 8 + 4 * 4


def blocked(outputs: int, inputs: int, seed: int = 0) -> ScaledWeight:
    codes = random_codes(outputs, inputs, seed).float().to(FP8)
    return ScaledWeight(codes, torch.rand(-(-outputs // 128), inputs // 128) + 0.5)


@pytest.mark.parametrize("kind", ["int8", "fp8", "static", "blocks"])
def test_weights_of_one_input_are_one_weight_bit_for_bit(kind: str) -> None:
    if kind == "blocks":
        parts = [blocked(128, 256), blocked(256, 256, seed=1), blocked(40, 256, seed=2)]
    else:
        dense = torch.randn(60, 64, generator=torch.Generator().manual_seed(0))
        parts = [quantize_rows(part, torch.int8 if kind == "int8" else FP8) for part in dense.split([8, 32, 20])]
        if kind == "static":
            parts = [replace(part, input_scale=torch.tensor([0.5])) for part in parts]
    joined = concatenate(parts)
    assert torch.equal(dequantize(joined), torch.cat([dequantize(part) for part in parts]))
    assert joined.nbytes == sum(part.nbytes for part in parts) - (8 if kind == "static" else 0)
    assert concatenate(parts[:1]) is parts[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_scale": torch.tensor([2.0])}, "each has its own scale of the inputs"),
        ({"input_scale": None}, "only one has a scale of its inputs"),
        ({"values": torch.zeros(4, 8).to(FP8)}, "dtype torch.int8 and torch.float8_e4m3fn"),
        ({"values": torch.zeros(4, 9, dtype=torch.int8)}, "inputs 8 and 9"),
    ],
)
def test_weights_that_cannot_be_one_say_why(change: dict[str, torch.Tensor], message: str) -> None:
    weight = replace(quantize_rows(torch.ones(4, 8), torch.int8), input_scale=torch.tensor([1.0]))
    with pytest.raises(ValueError, match=f"scaled weights cannot be one: {message}"):
        concatenate([weight, replace(weight, **change)])


def test_blocks_that_end_within_a_part_cannot_go_on_in_the_next() -> None:
    with pytest.raises(ValueError, match="cannot be one: its 40 outputs end within a block of 128"):
        concatenate([blocked(40, 128), blocked(128, 128)])
    with pytest.raises(ValueError, match="cannot be one: is_blocked True and False"):
        concatenate([blocked(128, 128), quantize_rows(torch.ones(4, 128), FP8)])
    for values, scales in (
        (torch.zeros(4, 128, dtype=torch.int8), torch.ones(1, 1)),
        (torch.zeros(4, 100).to(FP8), torch.ones(1, 1)),
        (torch.zeros(129, 128).to(FP8), torch.ones(1, 1)),
    ):
        with pytest.raises(ValueError, match="blocks are of float8_e4m3fn values, K a multiple of 128"):
            ScaledWeight(values, scales)
    with pytest.raises(ValueError, match=r"input_scale must be \[1\], and of no blocks, got \[1\]"):
        replace(blocked(128, 128), input_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(4, 8)}, "must be int8 or float8_e4m3fn, got torch.float32"),
        ({"values": torch.zeros(8, dtype=torch.int8)}, r"must be \[N, K\], N and K at least 1, got \[8\]"),
        ({"values": torch.zeros(0, 8, dtype=torch.int8)}, r"got \[0, 8\]"),
        ({"values": torch.zeros(8, 4, dtype=torch.int8).t()}, "unit stride"),
        ({"scales": torch.zeros(4, dtype=torch.int32)}, "scales must be float32, got torch.int32"),
        ({"scales": torch.zeros(4).half()}, "scales must be float32, got torch.float16"),
        ({"scales": torch.zeros(8)}, r"scales has shape \[8\], not \[4\] = \[N\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"ScaledWeight: .*{message}"):
        replace(quantize_rows(torch.ones(4, 8), torch.int8), **change)


@pytest.mark.parametrize(
    ("weight", "dtype", "message"),
    [
        (torch.ones(4, 8), torch.int16, "dtype must be torch.int8 or torch.float8_e4m3fn, got torch.int16"),
        (torch.ones(8), torch.int8, r"must be floating \[N, K\], got torch.float32 \[8\]"),
        (torch.ones(4, 8).int(), torch.int8, "must be floating"),
        (torch.ones(0, 8), torch.int8, "must be floating"),
        (torch.tensor([[1.0], [float("nan")]]), torch.int8, "row 1 has a value that is not finite"),
        (torch.tensor([[float("-inf")]]), FP8, "row 0 has a value"),
    ],
)
def test_quantize_rows_refuses_bad_input(weight: torch.Tensor, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_rows(weight, dtype)
