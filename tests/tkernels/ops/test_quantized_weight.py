"""QuantizedWeight of every kind: codes in words, outliers, and weights put together and cut, against dense decodes."""

from itertools import pairwise

import pytest
import torch

from tkernels.ops.dequant_gemm._argument import axes_of
from tkernels.ops.dequant_gemm.contract import CONTRACT
from tkernels.quantized.codes import (
    BITS,
    codes_in,
    codes_per_row,
    codes_per_word,
    interleaving,
    low_bits,
    pack,
    pack_codes,
    reordered,
    unpack,
)
from tkernels.quantized.outliers import Outliers, outliers_from
from tkernels.quantized.rounding import quantize
from tkernels.quantized.slicing import concatenate, incompatible_reason, slice_inputs, slice_outputs
from tkernels.quantized.weight import (
    QuantizedWeight,
    dequantize,
    from_codes,
    interleaved,
    sequential,
    unpack_codes,
)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def drawn(seed: int = 0, **given: int | str | bool) -> QuantizedWeight:
    """A weight as the contract draws it: both ends of the codes and zero-points, padding, full and empty rows."""
    kind = {"bits": 4, "coding": "uniform", "permuted": False, "sparse": False, "padding": 0, "symmetric": False}
    sizes = {"M": 1, "N": 16, "K": 64, "group_size": 32, "activation": "float32", "weight": "float32"}
    rest = {"order": "sequential", "bias": False, "layout": "contiguous", "weight_layout": "padded"}
    inputs = CONTRACT.make_inputs({**kind, **sizes, **rest, "values": "ordinary", **given}, seed, torch.device("cpu"))
    weight: QuantizedWeight = inputs["weight"]
    return weight


KINDS: list[dict[str, int | str | bool]] = [
    *({"bits": bits} for bits in BITS),
    *({"bits": bits, "permuted": True, "K": 72, "padding": 24, "sparse": True} for bits in BITS),
    *({"bits": bits, "coding": "lookup", "sparse": True, "group_size": 64} for bits in BITS),
    {"symmetric": True, "sparse": True},
    {"coding": "e2m1", "symmetric": True},
    {"coding": "e2m1", "symmetric": True, "permuted": True, "K": 72, "padding": 24},
    {"coding": "lookup", "permuted": True, "K": 37, "padding": 11, "group_size": 48},
]


def e2m1(code: int) -> float:
    """A sign, two bits of exponent less 1 and one of mantissa; of exponent 0 subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * ((1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2)


def by_hand(weight: QuantizedWeight) -> torch.Tensor:
    """W [N, K] in float64, decoded one code at a time with Python's integers, from a sequential weight."""
    packed, places = weight.packed.tolist(), weight.places
    decoded = torch.zeros(*weight.shape, dtype=torch.float64)
    for p in range(places):
        k = p if weight.permutation is None else int(weight.permutation[p])
        for n in range(weight.shape[0]):
            if weight.bits == 3:
                low = packed[p // 16][n] % 2**32 >> (2 * (p % 16)) & 3
                assert weight.high is not None
                code = low + 4 * (weight.high.tolist()[p // 32][n] % 2**32 >> (p % 32) & 1)
            else:
                fields = 32 // weight.bits
                code = packed[p // fields][n] % 2**32 >> (weight.bits * (p % fields)) & (2**weight.bits - 1)
            if k < 0:
                continue
            if weight.table is not None:
                decoded[n, k] = float(weight.table[code, n])
            else:
                assert weight.scales is not None
                group = p // weight.group_size
                zero = 2 ** (weight.bits - 1) if weight.zeros is None else int(weight.zeros[group, n])
                number = e2m1(code) if weight.e2m1 else code - zero
                decoded[n, k] = number * float(weight.scales[group, n])
    if weight.outliers is not None:
        rows, cols, vals = (getattr(weight.outliers, name).tolist() for name in ("rows", "cols", "vals"))
        for n in range(weight.shape[0]):
            assert cols[rows[n] : rows[n + 1]] == sorted(set(cols[rows[n] : rows[n + 1]]))
            for i in range(rows[n], rows[n + 1]):
                decoded[n, cols[i]] += vals[i]
    return decoded


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("order", ["sequential", "interleaved"])
@pytest.mark.parametrize("dim", [0, -1])
def test_unpack_inverts_pack_for_every_code_in_every_place(bits: int, order: str, dim: int) -> None:
    levels, fields = 2**bits, 32 // bits
    size = max(levels, fields)
    codes = (torch.arange(size).view(1, -1) + torch.arange(size).view(-1, 1)) % levels  # each code at each place
    words = pack(codes, dim, bits, order)  # type: ignore[arg-type]
    assert words.dtype == torch.int32
    assert words.shape[dim] == size // fields
    assert (words < 0).any()  # the top code sets the sign
    assert torch.equal(unpack(words, dim, bits, order), codes)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", BITS)
def test_codes_come_back_in_both_orders_and_each_lies_where_the_picture_shows_it(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (96, 24), generator=generator(), dtype=torch.uint8)
    codes[:, 0], codes[:, 1] = 2**bits - 1, 0
    packed, high = pack_codes(codes, bits)
    assert packed.shape == (96 // codes_per_word(bits), 24)
    assert (high is not None) == (bits == 3)
    assert torch.equal(codes_in(packed, high, bits), codes)
    width = low_bits(bits)
    swapped = reordered(packed, width, "interleaved")
    fields = 32 // width
    assert torch.equal(swapped, pack(codes & (2**width - 1), 0, width, "interleaved"))
    pairs = torch.stack([(swapped >> (width * i)) & ((2**width - 1) * 0x10001) for i in range(fields // 2)])
    low = (codes & (2**width - 1)).unflatten(0, (-1, fields // 2, 2)).int()  # [words, pairs, 2, N]
    assert torch.equal(pairs, (low[:, :, 1] << 16 | low[:, :, 0]).transpose(0, 1))
    assert torch.equal(reordered(swapped, width, "sequential"), packed)
    if high is not None:
        assert high.shape == (3, 24)
        assert torch.equal(codes_in(swapped, reordered(high, 1, "interleaved"), 3, "interleaved"), codes)


def test_the_interleaving_of_each_width() -> None:
    assert interleaving(4) == [0, 2, 1, 3]
    assert interleaving(8) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert interleaving(16) == [*range(0, 16, 2), *range(1, 16, 2)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_weight_of_every_kind_is_what_its_parts_say(kind: dict[str, int | str | bool]) -> None:
    weight = drawn(**kind)
    expected = by_hand(weight)
    codes = unpack_codes(weight)
    assert {0, 2**weight.bits - 1} <= set(codes.unique().tolist())
    if weight.zeros is not None:
        assert {0, 2**weight.bits} <= set(weight.zeros.unique().tolist())
    if weight.permutation is not None:
        assert int((weight.permutation < 0).sum()) == kind["padding"]
    if weight.outliers is not None:
        counts = weight.outliers.rows.diff().tolist()
        assert counts[0] == weight.shape[1]
        assert counts[-1] == 0
    assert torch.equal(dequantize(weight, torch.float64), expected)
    assert torch.equal(dequantize(weight), expected.float())
    words = interleaved(weight)
    assert words.order == "interleaved"
    assert torch.equal(dequantize(words), expected.float())
    back = sequential(words)
    assert torch.equal(back.packed, weight.packed)
    assert words.nbytes == weight.nbytes == sum(part.nbytes for _, part in weight.parts())
    given = {name: value for name, value in kind.items() if name in axes_of(weight)}
    assert axes_of(weight) == {**axes_of(weight), **given}


def test_codes_and_parts_make_the_weight_that_they_are_of() -> None:
    weight = drawn(bits=3, permuted=True, K=72, padding=24, sparse=True)
    again = from_codes(
        unpack_codes(weight),
        3,
        scales=weight.scales,
        zeros=None if weight.zeros is None else weight.zeros.long(),
        group_size=weight.group_size,
        permutation=weight.permutation,
        outliers=weight.outliers,
    )
    assert again.shape == weight.shape == (16, 72)
    assert torch.equal(dequantize(again), dequantize(weight))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_to_the_nearest_is_within_half_a_step_at_every_width(bits: int, symmetric: bool) -> None:
    dense = torch.randn(24, 96, generator=generator())
    quantized = quantize(dense, bits, 32, symmetric=symmetric)
    assert quantized.scales is not None
    steps = quantized.scales.t().repeat_interleave(32, dim=1)  # [N, K]
    error = (dequantize(quantized) - dense).abs()
    # The middle of a symmetric range lies at a code, so its top is cut by half a step.
    assert (error <= steps * 0.5001).all()
    assert error.max() > 0.3 * steps.min()


@pytest.mark.parametrize(
    ("bits", "group_size", "most"), [(2, 128, 0.16), (3, 128, 0.22), (4, 128, 0.29), (8, 128, 0.54), (4, 32, 0.38)]
)
def test_bytes_of_every_width_beside_bf16(bits: int, group_size: int, most: float) -> None:
    outputs, inputs = 64, 512
    dense = torch.randn(outputs, inputs, generator=generator()).bfloat16()
    quantized = quantize(dense, bits, group_size)
    groups = inputs // group_size
    # codes, bf16 scales, int16 zero-points
    assert quantized.nbytes == outputs * inputs * bits // 8 + outputs * groups * 2 + outputs * groups * 2
    assert interleaved(quantized).nbytes == quantized.nbytes < most * dense.nbytes


def test_outliers_are_sorted_added_up_and_checked() -> None:
    made = outliers_from(
        torch.tensor([2, 0, 2, 2]), torch.tensor([5, 1, 0, 5]), torch.tensor([1.0, 2.0, 4.0, 8.0]), (4, 6)
    )
    assert made.rows.tolist() == [0, 1, 1, 3, 3]
    assert made.cols.tolist() == [1, 0, 5]
    assert made.vals.tolist() == [2.0, 4.0, 9.0]
    assert made.outputs().tolist() == [0, 2, 2]
    empty = outliers_from(torch.zeros(0), torch.zeros(0), torch.zeros(0), (4, 6))
    assert empty.rows.tolist() == [0] * 5
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="input 6 or 6 is not below 6"):
        outliers_from(one, torch.tensor([6]), torch.ones(1), (4, 6))
    with pytest.raises(ValueError, match="output -1 or -1"):
        outliers_from(-one, one, torch.ones(1), (4, 6))
    with pytest.raises(ValueError, match="not finite"):
        outliers_from(one, one, torch.tensor([float("nan")]), (4, 6))
    ints = torch.zeros(3, dtype=torch.int32)
    for rows, cols, vals, message in (
        (ints.long(), ints, torch.zeros(3), "rows must be contiguous int32"),
        (ints, ints[::2], torch.zeros(2), "cols must be contiguous int32"),
        (ints, ints, ints, "vals must be contiguous and floating"),
        (ints, ints, torch.zeros(2), "one for each of 3 cols"),
        (ints[:1], ints, torch.zeros(3), "N \\+ 1 entries, got 1"),
        (ints, torch.empty(2**30, dtype=torch.int32, device="meta"), torch.empty(2**30, device="meta"), "2\\*\\*30"),
    ):
        with pytest.raises(ValueError, match=message):
            Outliers(rows, cols, vals)


@pytest.mark.parametrize("order", ["sequential", "interleaved"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_slices_are_those_of_the_dense_weight_bit_for_bit(kind: dict[str, int | str | bool], order: str) -> None:
    weight = drawn(**kind, order=order)
    outputs, inputs = weight.shape
    dense = dequantize(weight)
    for start, stop in ((0, 5), (5, outputs), (0, outputs), (3, 4)):
        part = slice_outputs(weight, start, stop)
        assert part.order == order
        assert torch.equal(dequantize(part), dense[start:stop])
    # A rank's slice need not end where a group or a word does.
    for start, stop in ((0, inputs), (0, 32), (32, inputs), (5, 29), (inputs - 1, inputs)):
        part = slice_inputs(weight, start, stop)
        assert (part.order, part.shape) == (order, (outputs, stop - start))
        assert torch.equal(dequantize(part), dense[:, start:stop])
        assert part.places % codes_per_row(weight.bits) == 0
    for start, stop in ((4, 4), (-1, 4), (0, 1000)):
        with pytest.raises(ValueError, match="slice: outputs"):
            slice_outputs(weight, start, stop)
        with pytest.raises(ValueError, match="slice: inputs"):
            slice_inputs(weight, start, stop)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_the_ranks_compute_adds_up_to_the_whole(kind: dict[str, int | str | bool], ranks: int) -> None:
    weight = drawn(**kind)
    outputs, inputs = weight.shape
    x = torch.randn(3, inputs, generator=generator(), dtype=torch.float64)
    whole = x @ dequantize(weight, torch.float64).t()
    ends = [inputs * rank // ranks for rank in range(ranks + 1)]
    parts = [slice_inputs(weight, start, stop) for start, stop in pairwise(ends)]
    sums = [
        CONTRACT.reference(x[:, start:stop], part.to("cpu", torch.float64))
        for part, (start, stop) in zip(parts, pairwise(ends), strict=True)
    ]
    torch.testing.assert_close(sum(sums), whole, rtol=1e-12, atol=1e-12)
    edges = [outputs * rank // ranks for rank in range(ranks + 1)]
    columns = [slice_outputs(weight, start, stop) for start, stop in pairwise(edges)]
    beside = [CONTRACT.reference(x, part.to("cpu", torch.float64)) for part in columns]
    torch.testing.assert_close(torch.cat(beside, 1), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(dequantize(concatenate(columns)), dequantize(weight))


def test_a_slice_at_groups_ends_stays_as_plain_as_its_weight() -> None:
    weight = drawn(K=256, group_size=64)
    part = slice_inputs(weight, 64, 192)
    assert part.permutation is None
    assert (part.group_size, part.shape) == (64, (16, 128))
    assert part.nbytes == weight.nbytes // 2
    ordered = drawn(K=256, group_size=64, permuted=True)
    parts = [slice_inputs(ordered, start, start + 64) for start in range(0, 256, 64)]
    assert all(part.permutation is not None for part in parts)
    # Padding is what ragged groups cost: no more than as many codes again, and nothing here near it.
    assert sum(part.places for part in parts) <= 1.5 * 256


def test_weights_are_put_together_where_they_agree_and_not_otherwise() -> None:
    one, other = drawn(0, symmetric=True), drawn(1)
    both = concatenate([one, other])
    assert both.shape == (32, 64)
    assert torch.equal(dequantize(both), torch.cat((dequantize(one), dequantize(other))))
    assert concatenate([one]) is one
    sparse = drawn(2, sparse=True)
    three = concatenate([one, sparse, other])
    assert torch.equal(dequantize(three), torch.cat([dequantize(part) for part in (one, sparse, other)]))
    permuted = drawn(0, permuted=True)
    assert torch.equal(dequantize(concatenate([permuted, permuted]))[16:], dequantize(permuted))
    for different, reason in (
        (drawn(bits=2), "bits 4 and 2"),
        (drawn(group_size=64), "group_size 32 and 64"),
        (drawn(coding="lookup", group_size=64), "group_size 32 and 64|coding"),
        (drawn(coding="e2m1", symmetric=True), "coding uniform and e2m1"),
        (drawn(K=128), "inputs 64 and 128"),
        (interleaved(drawn()), "order sequential and interleaved"),
        (drawn().to("cpu", torch.float16), "dtype"),
        (permuted, "only one is permuted"),
    ):
        with pytest.raises(ValueError, match=reason):
            concatenate([other, different])
    assert incompatible_reason(permuted, drawn(1, permuted=True)) == "they are permuted each in its own way"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_part_moves_and_only_floats_change_their_dtype(kind: dict[str, int | str | bool]) -> None:
    weight = drawn(**kind)
    half = weight.to("cpu", torch.float16)
    assert half.dtype == torch.float16
    for (name, before), (_, after) in zip(weight.parts(), half.parts(), strict=True):
        assert after.dtype == (torch.float16 if before.is_floating_point() else before.dtype), name
    assert {part.device.type for _, part in weight.to("meta").parts()} == {"meta"}
