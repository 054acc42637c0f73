"""QuantizedWeight: its layout, its helpers and what it refuses; and the two kernels' own promises."""

from dataclasses import replace

import pytest
import torch

from tkernels import OPS, Config, ContractError, UnsupportedError, prepared, select
from tkernels.device import INTERPRETER, TARGETS
from tkernels.launch import Kernel
from tkernels.ops.dequant_gemm.auto import ALGORITHMS
from tkernels.ops.served_models import SERVED_MODELS
from tkernels.ops.split_sums import words_per_split
from tkernels.quantized.codes import BITS, interleaving, unpack
from tkernels.quantized.outliers import Outliers, outliers_from
from tkernels.quantized.rounding import quantize
from tkernels.quantized.slicing import slice_inputs
from tkernels.quantized.weight import QuantizedWeight, dequantize, interleaved, sequential, unpack_codes
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.ahead_of_time import compile_for
from tkernels.verification.check import check_case
from tkernels.verification.inspection import expected
from tkernels.verification.inspection.rows import CompiledKernel

VARIANTS = OPS["dequant_gemm"].variants
AUTO, GEMV, SPLIT_K, TILED = (VARIANTS[name] for name in ("auto", "gemv", "split_k", "tiled"))
LOOKUP_GEMV, DENSE_FIRST = VARIANTS["lookup_gemv"], VARIANTS["dequantize_then_matmul"]


NO_OUTLIERS = Outliers(
    torch.zeros(17, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.float16)
)


def axes_of(**given: int | str | bool) -> dict[str, int | str | bool]:
    kind = {"bits": 4, "coding": "uniform", "permuted": False, "sparse": False, "padding": 0, "symmetric": False}
    dtypes = {"activation": "bfloat16", "weight": "bfloat16", "bias": True}
    layouts = {"order": "interleaved", "layout": "contiguous", "weight_layout": "padded", "values": "ordinary"}
    return {**kind, **dtypes, **layouts, **given}


def dense(outputs: int = 16, inputs: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)


def drawn(seed: int = 0, **given: int | str | bool) -> QuantizedWeight:
    """A weight as the contract draws it."""
    sizes: dict[str, int | str | bool] = {"M": 1, "N": 40, "K": 96, "group_size": 32}
    weight: QuantizedWeight = TILED.contract.case(axes_of(**{**sizes, **given}), seed).inputs["weight"]
    return weight


def weight_for(variant: Variant) -> QuantizedWeight:
    """[16, 64] in fp32, of the coding that the variant takes."""
    if variant is not LOOKUP_GEMV:
        return quantize(dense(), group_size=16)
    kind = {"coding": "lookup", "group_size": 64, "activation": "float32", "weight": "float32", "order": "sequential"}
    return drawn(N=16, K=64, **kind)


def by_hand(weight: QuantizedWeight) -> torch.Tensor:
    """W [N, K] decoded one code at a time with Python's integers."""
    packed = weight.packed.tolist()
    zeros = weight.zeros.tolist() if weight.zeros is not None else None
    outputs, inputs = weight.shape
    decoded = torch.empty(outputs, inputs, dtype=torch.float64)
    for n in range(outputs):
        for k in range(inputs):
            group = k // weight.group_size
            code = (packed[k // 8][n] % 2**32 >> (4 * (k % 8))) % 16
            zero = 8 if zeros is None else zeros[group][n]
            decoded[n, k] = (code - zero) * float(weight.scales[group, n])
    return decoded


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_layout_is_the_documented_one(symmetric: bool) -> None:
    axes = {"M": 1, "N": 16, "K": 64, "group_size": 16, "activation": "float32", "weight": "float32"}
    case = GEMV.contract.case(axes_of(**axes, symmetric=symmetric, order="sequential", bias=False), seed=0)
    weight = case.inputs["weight"]
    assert {0, 15} <= set(unpack_codes(weight).unique().tolist())
    if not symmetric:
        assert {0, 16} <= set(weight.zeros.unique().tolist())
    torch.testing.assert_close(dequantize(weight, torch.float64), by_hand(weight), rtol=0, atol=0)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [8, 32, -1])
def test_quantize_is_within_half_a_step(symmetric: bool, group_size: int) -> None:
    weight = dense()
    weight[0] = weight[0].abs() + 1  # a row of one sign: the range still holds zero
    quantized = quantize(weight, group_size=group_size, symmetric=symmetric)
    assert quantized.symmetric == symmetric
    steps = quantized.scales.t().repeat_interleave(quantized.group_size, dim=1)  # [N, K]
    error = (dequantize(quantized) - weight).abs()
    assert (error <= steps * 0.5001).all()
    assert error.max() > 0.3 * steps.min()
    codes = unpack_codes(quantized)
    assert codes.min() == 0
    assert codes.max() == 15


def test_quantizing_a_representable_weight_changes_nothing() -> None:
    steps = torch.arange(64).view(1, 64) % 16 - 5.0  # -5 .. 10: 16 levels, step 1
    weight = steps.expand(8, 64) * 0.25
    quantized = quantize(weight, group_size=16)
    assert torch.equal(dequantize(quantized), weight)


def test_zero_stays_exactly_zero_and_a_group_of_zeros_is_legal() -> None:
    weight = dense()
    weight[3] = 0
    weight[:, ::5] = 0
    assert (dequantize(quantize(weight, group_size=16))[weight == 0] == 0).all()


def test_bytes_at_group_128_are_under_0_29_of_bf16() -> None:
    weight = dense(64, 512, torch.bfloat16)
    quantized = quantize(weight)
    assert quantized.dtype == torch.bfloat16
    assert quantized.nbytes == 64 * 512 // 2 + 64 * 4 * 2 + 64 * 4 * 2
    assert quantized.nbytes < 0.29 * weight.nbytes


def test_map_tensors_reaches_every_part() -> None:
    quantized = quantize(dense(), group_size=16)
    seen: list[torch.Tensor] = []

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.double() if tensor.is_floating_point() else tensor

    wide = quantized.map_tensors(widen)
    assert len(seen) == 3
    assert wide.dtype == torch.float64
    assert wide.group_size == 16
    assert torch.equal(dequantize(wide), dequantize(quantized, torch.float64))
    assert quantized.to("meta").device.type == "meta"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8, got 5"),
        ({"order": "planar"}, "order must be sequential or interleaved, got 'planar'"),
        ({"group_size": 24}, "group_size must be -1 or a multiple of 8 that divides K = 64, got 24"),
        ({"group_size": 4}, "group_size must be -1 or a multiple of 8"),
        ({"group_size": 32}, r"scales has shape \[4, 16\], not \[2, 16\] = \[K / group_size, N\]"),
        ({"packed": torch.zeros(8, 16)}, "packed must have int32, got torch.float32"),
        ({"packed": torch.zeros(0, 16, dtype=torch.int32)}, "a positive multiple of 8"),
        ({"packed": torch.zeros(8, dtype=torch.int32)}, "packed must have two dims"),
        ({"packed": torch.zeros(16, 8, dtype=torch.int32).t()}, "packed needs unit stride"),
        ({"packed": torch.empty(2**16, 2**15, dtype=torch.int32, device="meta")}, "2\\*\\*31 words"),
        ({"scales": torch.zeros(4, 16, dtype=torch.int32)}, "scales must have a floating dtype"),
        ({"zeros": torch.zeros(4, 2, dtype=torch.int16)}, r"zeros has shape \[4, 2\], not \[4, 16\]"),
        ({"zeros": torch.zeros(4, 16, dtype=torch.int32)}, "zeros must have int16"),
        ({"bits": 3}, "high keeps the third bits"),
        ({"high": torch.zeros(2, 16, dtype=torch.int32)}, "high keeps the third bits of 3-bit codes"),
        ({"scales": None}, "either scales or a table"),
        ({"table": torch.zeros(16, 16)}, "either scales or a table"),
        ({"scales": None, "table": torch.zeros(16, 16)}, "a table's codes have no zeros"),
        ({"inputs": 60}, "60 inputs without a permutation, but 64 codes"),
        ({"permutation": torch.zeros(60, dtype=torch.int32)}, r"permutation has shape \[60\], not \[64\]"),
        ({"permutation": torch.zeros(64)}, "permutation must have int32"),
        ({"outliers": NO_OUTLIERS}, "outliers are torch.float16, and the rest is torch.float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(quantize(dense(), group_size=16), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (dense(), {"bits": 5}, "bits must be one of 2, 3, 4, 8"),
        (dense(16, 60), {}, "K = 60 must be a multiple of 8 at 4 bits"),
        (dense(16, 48), {"bits": 3}, "K = 48 must be a multiple of 32 at 3 bits"),
        (dense(16, 64), {"group_size": 128}, "divides K = 64, got 128"),
        (torch.zeros(16, 64, dtype=torch.int8), {}, "floating"),
        (torch.zeros(0, 64), {}, "floating"),
    ],
)
def test_quantize_refuses_bad_input(weight: torch.Tensor, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(weight, **options)


def test_a_call_with_the_wrong_weight_names_it() -> None:
    weight, x = interleaved(quantize(dense(), group_size=16)), torch.zeros(1, 64)
    with pytest.raises(ContractError, match="'weight' must be a QuantizedWeight, got Tensor"):
        TILED(x, dense())
    with pytest.raises(ContractError, match="'weight.packed' gives K = 64, but K = 72"):
        TILED(torch.zeros(1, 72), weight)
    with pytest.raises(ContractError, match="weight == activation does not hold"):
        TILED(x.half(), weight)
    with pytest.raises(ContractError, match=r"'weight.packed' is on meta, the first tensor is on cpu"):
        TILED(x, weight.to("meta"))
    with pytest.raises(ContractError, match="'bias'"):
        TILED(x, weight, bias=torch.zeros(8))


def test_interleaving_moves_every_code_to_its_documented_place_and_back() -> None:
    weight = quantize(dense(), group_size=16)
    words = interleaved(weight)
    codes = unpack(weight.packed, dim=0).unflatten(0, (-1, 8))  # [K/8, 8, N]
    assert interleaving(8) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(unpack(words.packed, dim=0).unflatten(0, (-1, 8)), codes[:, interleaving(8)])
    assert words.order == "interleaved"
    assert words.nbytes == weight.nbytes
    assert torch.equal(sequential(words).packed, weight.packed)
    assert torch.equal(dequantize(words), dequantize(weight))
    assert interleaved(words) is words
    assert sequential(weight) is weight


def test_preparing_says_what_it_cost_and_a_kernel_refuses_what_was_not_prepared() -> None:
    x = torch.ones(1, 64)
    for variant in VARIANTS.values():
        weight = weight_for(variant)
        mine, report = prepared(variant, weight)
        assert report.bytes_before == report.bytes_after == weight.nbytes
        assert report.seconds >= 0
        assert (mine is weight) == (variant.name == "torch")
        torch.testing.assert_close(variant(x, mine), x @ dequantize(weight).t())
        if variant.name != "torch":
            with pytest.raises(UnsupportedError, match=f"{variant.name}.*interleaved, not sequential.*prepared"):
                variant(x, weight)
    both = report + report
    assert both.bytes_after == 2 * weight.nbytes
    assert "MiB as loaded" in str(both)


def test_a_variant_is_selected_before_there_is_a_weight_to_prepare() -> None:
    sizes = {"M": (0, 64), "N": 64, "K": 64, "group_size": 64, "bits": 4, "symmetric": True, "bias": False}
    chosen = select({"dequant_gemm": "auto"}, device="cpu", dtype=torch.bfloat16, axes={"dequant_gemm": sizes})
    assert chosen.arm == {"dequant_gemm": "auto"}


def test_auto_runs_what_its_number_of_tokens_asks_for_or_what_was_tuned() -> None:
    axes = axes_of(N=64, K=64, group_size=64)
    by_default = {
        m: ALGORITHMS.chosen({**axes, "M": m}, AUTO.default_config("sm_90"), INTERPRETER).name
        for m in (0, 1, 2, 8, 9, 64, 65, 4096)
    }
    assert by_default == {
        0: "tiled", 1: "gemv", 2: "gemv", 8: "gemv", 9: "split_k", 64: "split_k", 65: "tiled",
        4096: "dequantize_then_matmul",
    }  # fmt: skip
    names = [ALGORITHMS.chosen({**axes, "M": 1}, config, INTERPRETER).name for config in AUTO.configs]
    assert names == ["gemv", "gemv", "split_k", "dequantize_then_matmul", "tiled"]
    # gemv takes one token of most weights: tuned so for a bucket, it would still give way.
    for others in ({"bits": 8}, {"weight": "float32", "activation": "float32"}, {"group_size": 16}):
        assert ALGORITHMS.chosen({**axes, "M": 3, **others}, AUTO.configs[0], INTERPRETER).name == "split_k"
    for arch, name in (("gfx942", "split_k"), ("sm_80", "gemv")):
        assert ALGORITHMS.chosen({**axes, "M": 3}, AUTO.default_config(arch), TARGETS[arch]).name == name


def test_auto_gives_the_bits_of_the_algorithm_that_it_runs() -> None:
    weight = interleaved(quantize(dense(40, 136, torch.bfloat16), group_size=8))
    x = dense(65, 136, torch.bfloat16)
    for rows, variant in ((1, GEMV), (17, SPLIT_K), (65, TILED)):
        assert torch.equal(AUTO(x[:rows], weight), variant(x[:rows], weight))


def test_a_weight_whose_rows_begin_anywhere_is_copied_once_or_refused_by_what_takes_pairs() -> None:
    x = dense(3, 128, torch.bfloat16)
    view = quantize(dense(48, 128, torch.bfloat16), group_size=-1).map_tensors(lambda part: part[:, 3:43])
    assert not GEMV.contract.bind_axes({"x": x, "weight": view, "bias": None})[0]["weight_aligned"]
    copied = interleaved(view)
    assert GEMV.contract.bind_axes({"x": x, "weight": copied, "bias": None})[0]["weight_aligned"]
    wide = copied.map_tensors(lambda part: torch.cat((part, part), dim=1)[:, 1:41])
    assert wide.shape == (40, 128)
    with pytest.raises(UnsupportedError, match="one token at a time, not M = 3.*rows that begin on 16 bytes"):
        GEMV(x, wide)
    assert torch.equal(AUTO(x, wide), SPLIT_K(x, wide))


def test_a_variant_says_how_many_tokens_it_takes() -> None:
    weight = interleaved(quantize(dense(), group_size=16))
    with pytest.raises(UnsupportedError, match="one token at a time, not M = 2"):
        GEMV(torch.zeros(2, 64), weight)
    with pytest.raises(UnsupportedError, match="takes up to 8 tokens, not M = 9"):
        GEMV(torch.zeros(9, 64), weight)
    with pytest.raises(UnsupportedError, match="takes 64 rows, not M = 65"):
        SPLIT_K(torch.zeros(65, 64), weight)
    for variant in VARIANTS.values():
        assert variant(torch.zeros(0, 64), interleaved(weight_for(variant))).shape == (0, 16)


@pytest.mark.parametrize("variant", [GEMV, SPLIT_K])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 8), (2560, 9728), (19456, 2560), (2560, 65536), (152064, 2560)])
def test_splits_cover_k_and_fill_the_device(variant: Variant, outputs: int, inputs: int) -> None:
    device = TARGETS["sm_90"]
    config = variant.default_config(device.arch)
    block_w = config["BLOCK_W"] if variant is GEMV else config["BLOCK_K"] // 8
    assert variant.module is not None
    if variant is GEMV and inputs % 128 == 0:  # a group of 128 for each tile
        block_w *= 2
    rows = words_per_split(inputs // 8, block_w, outputs, config, device, variant.module.MAX_SPLITS)
    splits = -(-(inputs // 8) // rows)
    assert rows % block_w == 0
    assert 1 <= splits <= 64
    assert (splits - 1) * rows < inputs // 8 <= splits * rows  # none is empty: each is counted
    shapes = {}
    for tokens in (1, 16):
        axes = axes_of(M=tokens, N=outputs, K=inputs, group_size=128 if inputs % 128 == 0 else 8)
        buffers = variant.workspace(axes, config, device)
        assert bool(buffers) == (splits > 1)
        shapes[tokens] = buffers["arrived"].shape if buffers else ()
    assert shapes[1] == shapes[16]  # one zeroed buffer for every batch
    if splits == 1 and inputs // 8 > block_w:
        assert outputs // config["BLOCK_N"] >= device.multiprocessors


@pytest.mark.parametrize("programs", [1, 8])
def test_gemv_is_right_with_one_split_and_with_several(programs: int) -> None:
    config = Config(BLOCK_N=16, BLOCK_W=4, PROGRAMS_PER_SM=programs)
    case = GEMV.contract.case(axes_of(M=1, N=40, K=256, group_size=64), seed=1)
    assert len(GEMV.workspace(axes_of(M=1, N=40, K=256, group_size=64), config, INTERPRETER)) == (
        2 if programs == 8 else 0
    )
    result = check_case(GEMV, case, config)
    assert result.status == "ok", str(result)


@pytest.mark.parametrize("group_size", [128, 16])
@pytest.mark.parametrize("programs", [1, 4])
def test_split_k_is_right_with_one_split_and_with_several(programs: int, group_size: int) -> None:
    config = Config(BLOCK_TOKENS=16, BLOCK_N=32, BLOCK_K=32 if programs == 4 else 256, PROGRAMS_PER_SM=programs)
    axes = axes_of(M=17, N=104, K=256, group_size=group_size)
    case = SPLIT_K.contract.case(axes, seed=1)
    assert bool(SPLIT_K.workspace(axes, config, INTERPRETER)) == (programs == 4)
    result = check_case(SPLIT_K, case, config)
    assert result.status == "ok", str(result)


@pytest.mark.parametrize("variant", [TILED, SPLIT_K])
def test_a_row_has_the_same_bits_in_every_batch(variant: Variant) -> None:
    weight = interleaved(quantize(dense(40, 136, torch.bfloat16), group_size=8))
    x = dense(19, 136, torch.bfloat16)
    whole = variant(x, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(16, 19)):
        assert torch.equal(variant(x[rows], weight), whole[rows])


WEIGHTS: list[dict[str, int | str | bool]] = [
    *({"bits": bits} for bits in BITS),
    *({"bits": bits, "permuted": True, "K": 72, "padding": 24, "sparse": True} for bits in BITS),
    *({"bits": bits, "coding": "lookup", "group_size": 96, "sparse": True} for bits in BITS),
    {"coding": "lookup", "group_size": 96, "permuted": True},
]


@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
def test_auto_takes_every_weight_at_every_number_of_tokens(kind: dict[str, int | str | bool]) -> None:
    for tokens, uniform in ((1, "gemv"), (17, "split_k"), (65, "tiled"), (600, "dequantize_then_matmul")):
        axes = axes_of(**{"M": tokens, "N": 40, "K": 96, "group_size": 32, **kind})
        runs = ALGORITHMS.chosen(axes, AUTO.default_config("sm_90"), INTERPRETER).name
        is_lookup = kind.get("coding") == "lookup"
        if uniform == "dequantize_then_matmul" and kind.get("sparse") and not is_lookup:
            assert runs == "tiled"  # outliers are added to rounded weights there, which is exact of a table's alone
        else:
            assert runs == ("lookup_gemv" if is_lookup and uniform == "gemv" else uniform)
        if tokens < 100:
            result = check_case(AUTO, AUTO.contract.case(axes, seed=3), offsets=False)
            assert result.status == "ok", str(result)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
def test_the_kernels_decode_bit_for_bit(kind: dict[str, int | str | bool], dtype: str) -> None:
    weight = drawn(activation=dtype, weight=dtype, **kind)
    if weight.coding == "uniform":
        weight = replace(weight, outliers=None)  # they are added to a weight that its dtype has rounded
    eye = torch.eye(weight.shape[1], dtype=weight.dtype)
    for variant in (TILED, DENSE_FIRST):
        assert torch.equal(variant(eye, weight), dequantize(weight).t()), variant.name


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [{"symmetric": True}, {"permuted": True, "K": 72, "padding": 24}], ids=str)
def test_pairs_of_codes_are_exact(kind: dict[str, int | str | bool], dtype: str, tokens: int) -> None:
    weight = drawn(activation=dtype, weight=dtype, **kind)
    eye = torch.eye(weight.shape[1], dtype=weight.dtype)
    for first in range(0, weight.shape[1] - tokens, 40):
        rows = slice(first, first + tokens)
        assert torch.equal(GEMV(eye[rows], weight), dequantize(weight).t()[rows])


@pytest.mark.parametrize(("block_n", "num_warps"), [(32, 1), (64, 2), (64, 4)])
def test_the_orders_of_pairs_go_with_every_tile(block_n: int, num_warps: int) -> None:
    config = Config(BLOCK_N=block_n, BLOCK_W=8, PROGRAMS_PER_SM=2, num_warps=num_warps)
    for tokens, group_size in ((1, 128), (7, 32)):
        case = GEMV.contract.case(axes_of(M=tokens, N=72, K=384, group_size=group_size), seed=2)
        result = check_case(GEMV, case, config)
        assert result.status == "ok", str(result)


def instructions_per_weight(row: CompiledKernel) -> float:
    """Of a main loop, at 4 bits and groups of 128."""
    assert GEMV.module is not None
    assert row.loop_instructions is not None
    config = Config(**row.config)
    places = config["BLOCK_K"] if row.variant == "split_k" else 8 * GEMV.module.word_rows(config, 4, 128, True)
    return row.loop_instructions / (places * config["BLOCK_N"] / (32 * config.num_warps))


# Triton 3.6 moves pairs between registers before it multiplies them.
@pytest.mark.parametrize(
    ("version", "variant", "most"), [("3.7", "gemv", 1.65), ("3.6", "gemv", 2.55), ("3.7", "split_k", 3.3)]
)
def test_the_expected_tables_count_the_instructions_for_each_weight(version: str, variant: str, most: float) -> None:
    row = expected.read(expected.table_path(version))["dequant_gemm", variant, "engine", 0, "sm_90"]
    assert instructions_per_weight(row) <= most


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "most"), [(1, 1.6), (8, 1.75), (16, 2.7), (32, 2.9), (64, 3.3)])
@pytest.mark.parametrize("layer", ["gate_up", "down"])
def test_what_auto_serves_takes_few_instructions_for_each_weight(layer: str, tokens: int, most: float) -> None:
    outputs, inputs = SERVED_MODELS["Qwen3-4B"].linears[layer]
    axes = axes_of(M=tokens, N=outputs, K=inputs, group_size=128)
    chosen = ALGORITHMS.chosen(axes, AUTO.default_config("sm_90"), TARGETS["sm_90"])
    assert chosen is (GEMV if tokens <= 8 else SPLIT_K)
    (row,) = compile_for(["sm_90"], [f"dequant_gemm.{chosen.name}"], {"M": tokens, "N": outputs, "K": inputs})
    assert row.spill_bytes == 0
    assert row.grid[0] == 1 or tokens <= 8  # one tile of tokens: the weight is read once
    assert instructions_per_weight(row) <= most


@pytest.mark.parametrize("variant", [GEMV, LOOKUP_GEMV, SPLIT_K, TILED], ids=lambda variant: variant.name)
def test_slices_of_an_activation_ordered_weight_run_and_add_up(variant: Variant) -> None:
    lookup = {"coding": "lookup", "group_size": 96} if variant is LOOKUP_GEMV else {}
    weight = drawn(activation="float32", weight="float32", permuted=True, sparse=True, **lookup)
    x = dense(1 if "gemv" in variant.name else 3, 96)
    parts = [slice_inputs(weight, start, stop) for start, stop in ((0, 29), (29, 64), (64, 96))]
    assert any(part.places > part.shape[1] for part in parts)  # padding
    sums = sum(variant(x[:, at : at + part.shape[1]], part) for part, at in zip(parts, (0, 29, 64), strict=True))
    expected = x.double() @ dequantize(weight, torch.float64).t()
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)  # fp32, summed in three parts


@pytest.mark.parametrize(("dtype", "coding"), [("float16", "uniform"), ("bfloat16", "lookup")])
def test_one_outlier_is_added_to_its_own_output_alone(dtype: str, coding: str) -> None:
    groups = 96 if coding == "lookup" else 32
    plain = drawn(activation=dtype, weight=dtype, coding=coding, group_size=groups)
    one = outliers_from(torch.tensor([7]), torch.tensor([90]), torch.tensor([3.0]), plain.shape)
    weight = replace(
        plain, outliers=one.map_tensors(lambda part: part.to(plain.dtype) if part.is_floating_point() else part)
    )
    x = torch.zeros(17, 96, dtype=plain.dtype)
    x[5, 90] = 1
    for variant in (SPLIT_K, TILED):
        without, got = variant(x, plain), variant(x, weight)
        moved = (without != got).nonzero().tolist()
        assert moved == [[5, 7]]
        assert got[5, 7] == (dequantize(plain, torch.float64)[7, 90] + 3).to(plain.dtype)


def test_variants_say_which_weights_they_do_not_take() -> None:
    x = torch.zeros(1, 96, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="uniform codes, not lookup: lookup_gemv does"):
        GEMV(x, drawn(coding="lookup", group_size=96))
    with pytest.raises(UnsupportedError, match="looked up, not uniform ones: gemv does"):
        LOOKUP_GEMV(x, drawn())
    with pytest.raises(UnsupportedError, match="one token at a time, not M = 2"):
        LOOKUP_GEMV(x.expand(2, 96), drawn(coding="lookup", group_size=96))
    with pytest.raises(UnsupportedError, match="adds outliers to weights that are rounded already"):
        DENSE_FIRST(x, drawn(sparse=True))


def test_a_call_is_checked_once_for_weights_of_one_structure() -> None:
    kernel = Kernel(VARIANTS["torch"], NEAREST, {})
    x = torch.zeros(1, 64)
    one, other = quantize(dense(), group_size=16), quantize(dense() + 1, group_size=16)
    for weight in (one, other, one):
        torch.testing.assert_close(kernel(x + 1, weight), (x + 1) @ dequantize(weight).t())
    assert len(kernel._known) == 1
    kernel(x, quantize(dense(), group_size=32))
    kernel(x, quantize(dense(), group_size=16, symmetric=True))
    assert len(kernel._known) == 3
    with pytest.raises(ContractError, match="'weight.packed' gives K = 64, but K = 72"):
        kernel(torch.zeros(1, 72), one)
