"""quantize_tokens: ties, zeros and subnormal rows come out as the definition says, in every variant, to the bit."""

import pytest
import torch

from tkernels import OPS, ContractError, Kernel, UnsupportedError
from tkernels.device import TARGETS
from tkernels.quantized.row_codes import LARGEST, SMALLEST_SCALE, reciprocal_of, unsupported_codes
from tkernels.tuning import NEAREST

VARIANTS = OPS["quantize_tokens"].variants
TRITON = [name for name, variant in VARIANTS.items() if variant.kind == "triton"]
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_int8_ties_go_to_the_even_code(variant: str) -> None:
    x = torch.tensor(
        [[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 0.49], [-254.0, 1, 3, 5, 0, 0, 0, 0, 0, 0]]
    )
    q, scale = VARIANTS[variant](x, dtype=torch.int8)
    assert q.tolist() == [[127, -127, 0, 2, 2, 0, -2, -2, 126, 0], [-127, 0, 2, 2, 0, 0, 0, 0, 0, 0]]
    assert scale.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_fp8_ties_go_to_the_even_code_subnormal_ones_too(variant: str) -> None:
    x = torch.tensor([[448.0, -448.0, 17, 19, -17, 2.0**-10, 3 * 2.0**-10, 240.5, 463.0 / 8]])
    q, scale = VARIANTS[variant](x.bfloat16().float(), dtype=FP8)
    assert q.float().tolist() == [[448, -448, 16, 20, -16, 0, 2.0**-8, 240, 56]]
    assert scale.tolist() == [1.0]


@pytest.mark.parametrize("variant", TRITON)
def test_the_product_is_rounded_before_its_ties_are(variant: str) -> None:
    x = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0))
    scale = (x.abs().amax(1) * reciprocal_of(torch.int8)).unsqueeze(-1)
    # Values whose exact product with the reciprocal is no tie, but whose fp32 product is.
    inverse = (1 / scale).double()
    near = torch.tensor([2.0**-25, -(2.0**-25)], dtype=torch.float64)
    ties = torch.arange(100) + 0.5
    candidates = (ties.unsqueeze(-1) * (1 + near) / inverse[0]).float().flatten()
    exact = candidates.double() * inverse[0]
    differ = exact.round() != exact.float().round()
    assert differ.any()
    row = torch.cat([x[:1].abs().amax(1), candidates[differ]]).unsqueeze(0)
    q, _ = VARIANTS[variant](row, dtype=torch.int8)
    assert q[0, 1:].tolist() == exact[differ].float().round().tolist()


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_rows_of_zeros_and_of_subnormals_have_the_smallest_scale_and_no_nan(variant: str, dtype: torch.dtype) -> None:
    x = torch.zeros(4, 40)
    x[1, 3] = 2.0**-149
    x[2, 5] = -(2.0**-126)
    x[3, 7] = 2.0**-126 * LARGEST[dtype]
    q, scale = VARIANTS[variant](x, dtype=dtype)
    assert scale.tolist() == [SMALLEST_SCALE] * 4
    assert q.float().abs().amax(1).tolist() == [0, 0, 1, LARGEST[dtype]]
    assert torch.isfinite(q.float()).all()


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("variant", TRITON)
def test_what_is_decoded_is_within_half_a_step(variant: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, scale = VARIANTS[variant](x, dtype=dtype)
    step = scale.unsqueeze(-1) * (1 if dtype == torch.int8 else (q.float().abs() / 8).clamp(min=2.0**-9))
    error = (q.float() * scale.unsqueeze(-1) - x.float()).abs()
    assert (error <= step * 0.5001).all()
    assert q.float().abs().amax(1).tolist() == [LARGEST[dtype]] * 3


def test_both_algorithms_give_the_same_bits_at_any_width() -> None:
    generator = torch.Generator().manual_seed(2)
    walked = Kernel(VARIANTS["two_pass"], NEAREST, {"BLOCK_K": 4096})
    for inputs in (4096, 32768):
        x = torch.randn(1, inputs, generator=generator)
        whole = VARIANTS["row_per_program"](x, dtype=FP8)
        for one, other in zip(whole, walked(x, dtype=FP8), strict=True):
            assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_fixed_scale_is_every_rows_and_what_is_beyond_its_codes_is_the_last_of_them(variant: str) -> None:
    x = torch.tensor([[1.0, -3.0, 300.0, -300.0, 253.0, 254.5], [0.0, 0.9, -1.0, 0.5, 5.0, -255.0]])
    q, scale = VARIANTS[variant](x, dtype=torch.int8, static_scale=torch.tensor([2.0]))
    assert q.tolist() == [[0, -2, 127, -128, 126, 127], [0, 0, 0, 0, 2, -128]]  # ties to even, and one below -127
    assert scale.tolist() == [2.0, 2.0]
    q, scale = VARIANTS[variant](x, dtype=FP8, static_scale=torch.tensor([0.5]))
    assert q.float().tolist() == [[2, -6, 448, -448, 448, 448], [0, 1.75, -2, 1, 10, -448]]
    assert scale.tolist() == [0.5, 0.5]
    with pytest.raises(ContractError, match=r"argument 'static_scale' has shape \[2\], where \[1\] is needed"):
        VARIANTS[variant](x, static_scale=torch.ones(2))


def test_int8_is_what_no_dtype_means() -> None:
    q, _ = VARIANTS["torch"](torch.ones(1, 4))
    assert q.dtype == torch.int8


def test_a_row_too_wide_for_registers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="rows wider than 32768.*K = 32769: two_pass"):
        VARIANTS["row_per_program"](torch.ones(1, 32769))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "argument 'dtype' must be a torch.dtype, got 'int8'"),
        ({"dtype": torch.int16}, r"codes = int16, but codes in \(int8, float8_e4m3fn\)"),
        ({"dtype": None}, "argument 'dtype' must be a torch.dtype, got None"),
    ],
)
def test_what_is_no_dtype_of_codes_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        VARIANTS["torch"](torch.ones(1, 4), **options)


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("sm_80", "e4m3 from sm_89 on; this is sm_80"),
        ("sm_86", "from sm_89 on"),
        ("sm_89", None),
        ("sm_90", None),
        ("sm_100", None),
        ("sm_120", None),
        ("gfx942", "e4m3fn is not gfx942's own fp8, which is e4m3fnuz"),
    ],
)
def test_fp8_is_only_where_the_architecture_has_it_and_int8_everywhere(arch: str, reason: str | None) -> None:
    got = unsupported_codes({"codes": "float8_e4m3fn"}, TARGETS[arch])
    assert (got is None) if reason is None else (got is not None and reason in got)
    assert unsupported_codes({"codes": "int8"}, TARGETS[arch]) is None
