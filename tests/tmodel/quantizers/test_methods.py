"""Each method on small random layers, against what algebra or trying everything says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from tkernels.quantized.weight import QuantizedWeight, dequantize, unpack_codes
from tmodel.quantization import LinearShape
from tmodel.quantizers import METHODS, Layer
from tmodel.quantizers.awq import clip_groups, output_error, power_scales, round_scaled, search_scales
from tmodel.quantizers.calibration import Inputs
from tmodel.quantizers.descent import BLOCK, block_of, descend
from tmodel.quantizers.gptq import DAMPING, ActOrder, gptq, order_inputs
from tmodel.quantizers.kmeans import kmeans, move_centres, nearest_centre, sorted_rows
from tmodel.quantizers.rtn import compute_steps, round_to_codes, round_to_nearest, search_steps
from tmodel.quantizers.smoothquant import share_largest, smoothing_scales
from tmodel.quantizers.squeezellm import select_largest, squeezellm

N, K = 32, 96


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn((N, K), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def inputs() -> Inputs:
    """Correlated inputs of very different sizes, and one that is always 0."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((400, K), generator=generator, dtype=torch.float64)
    x = x @ torch.randn((K, K), generator=generator, dtype=torch.float64) / K**0.5
    x *= torch.randn(K, generator=generator, dtype=torch.float64).exp()
    x[:, 5] = 0
    return Inputs(x.t() @ x, x.abs().mean(0))


def error(weight: torch.Tensor, changed: QuantizedWeight, inputs: Inputs) -> float:
    return output_error([weight], [dequantize(changed, torch.float32)], inputs)


def test_round_to_nearest_is_within_half_a_step(weight: torch.Tensor) -> None:
    for bits, symmetric, lowest_zero in itertools.product((2, 3, 4, 8), (False, True), (0, 1)):
        made = round_to_nearest(weight, bits, 32, symmetric=symmetric, lowest_zero=lowest_zero)
        assert made.scales is not None
        step = made.scales.float().repeat_interleave(32, 0).t()  # [N, K]
        # The zero-point is rounded too, so that either end may be half a step short.
        allowed = step * (0.5 + 0.5 * (not symmetric)) + 2e-3 * weight.abs()
        assert bool(((dequantize(made, torch.float32) - weight).abs() <= allowed).all()), (bits, symmetric)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_group_above_zero_has_a_zero_point_that_v1_can_hold(weight: torch.Tensor, bits: int) -> None:
    made = round_to_nearest(weight.abs() + 1, bits, 32, lowest_zero=1)
    assert made.zeros is not None
    assert made.scales is not None
    assert int(made.zeros.min()) == int(made.zeros.max()) == 1
    assert int(unpack_codes(made).max()) == 2**bits - 1
    step = made.scales.float().repeat_interleave(32, 0).t()
    assert bool(((dequantize(made, torch.float32) - weight.abs() - 1).abs() <= step * 0.51).all())


def test_rtn_writes_what_v1_can_hold(weight: torch.Tensor) -> None:
    layer = Layer(0, (LinearShape(("up",), (N,), K),), {"up.weight": weight.abs() + 1}, torch.float32)
    made = METHODS["rtn"].quantize(layer, 4, 32).linears["up"]
    tensors = METHODS["rtn"].format(4, 32).encode("up", made)
    assert not tensors["qzeros"].any()  # 1 is stored as 0


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("act_order", ["none", "groups", "inputs"])
def test_gptq_leaves_less_output_error_than_rounding(
    weight: torch.Tensor, inputs: Inputs, bits: int, group_size: int, act_order: ActOrder
) -> None:
    # Two bits around 0 are four values of which one is never used: too few to make up for anything with.
    for symmetric in (False, True)[: 1 if bits == 2 else 2]:
        options = {"symmetric": symmetric}
        made = gptq(weight, inputs.second_moment, bits, group_size, act_order=act_order, **options)
        assert error(weight, made, inputs) < 0.95 * error(
            weight, round_to_nearest(weight, bits, group_size, **options), inputs
        )
        assert (made.zeros is None) == symmetric


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_gptq_on_inputs_that_have_nothing_to_do_with_each_other_rounds(
    weight: torch.Tensor, bits: int, group_size: int, scale: float
) -> None:
    made = gptq(weight, scale * torch.eye(K), bits, group_size, act_order="none")
    plain = round_to_nearest(weight, bits, group_size)
    assert torch.equal(unpack_codes(made), unpack_codes(plain))
    assert torch.equal(dequantize(made), dequantize(plain))


@pytest.mark.parametrize("damping", [0.01, DAMPING, 0.5])
def test_gptq_moves_what_is_left_to_the_least_squares_of_it(
    weight: torch.Tensor, inputs: Inputs, damping: float
) -> None:
    """The definition, without Cholesky: after each column, those to come are the best for those that are fixed."""
    moment = inputs.second_moment.clone()
    moment[5, 5] = 1.0
    damped = moment + damping * moment.diagonal().mean() * torch.eye(K, dtype=torch.float64)
    wide = weight.double()
    wide[:, 5] = 0
    grid = round_to_nearest(wide, 4, -1)
    assert grid.scales is not None
    assert grid.zeros is not None
    step, zero = grid.scales[0].double(), grid.zeros[0].double()
    fixed, current = torch.empty_like(wide), wide.clone()
    for k in range(K):
        fixed[:, k] = (((current[:, k] / step).round() + zero).clamp(0, 15) - zero) * step
        rest = torch.arange(k + 1, K)
        gone = fixed[:, : k + 1] - wide[:, : k + 1]
        # min over d of [gone d] H [gone d]^T: d = -gone H_gr H_rr^-1
        best = -gone @ damped[: k + 1][:, rest] @ torch.linalg.inv(damped[rest][:, rest])
        current[:, rest] = wide[:, rest] + best
    made = gptq(weight.double(), inputs.second_moment, 4, -1, act_order="none", damping=damping)
    assert torch.equal(dequantize(made, torch.float64), fixed)
    if damping == DAMPING:
        untold = gptq(weight.double(), inputs.second_moment, 4, -1, act_order="none")
        assert torch.equal(dequantize(untold, torch.float64), fixed)


def test_gptq_in_order_of_activation_groups_the_largest_inputs(weight: torch.Tensor, inputs: Inputs) -> None:
    made = gptq(weight, inputs.second_moment, 4, 32)
    assert made.permutation is not None
    assert sorted(made.permutation.tolist()) == list(range(K))
    largest = inputs.second_moment.diagonal().argsort(descending=True)[:32]
    assert made.permutation[:32].tolist() == sorted(largest.tolist())
    assert gptq(weight, inputs.second_moment, 4, -1).permutation is None  # one group needs none


def test_gptq_in_order_of_groups_leaves_every_input_in_its_group(weight: torch.Tensor, inputs: Inputs) -> None:
    made = gptq(weight, inputs.second_moment, 4, 32, act_order="groups")
    assert made.permutation is None
    # By definition: groups by their largest moment, inputs of each by their own.
    moments = inputs.second_moment.diagonal()
    groups = sorted(range(K // 32), key=lambda g: -float(moments[32 * g : 32 * g + 32].max()))
    expected = [k for g in groups for k in sorted(range(32 * g, 32 * g + 32), key=lambda k: -float(moments[k]))]
    order = order_inputs(moments, 32, "groups")
    assert order.tolist() == expected
    assert groups != sorted(groups), "a test of nothing"
    # The first group that is rounded has the steps of its dense weights, for nothing was corrected yet.
    first = slice(32 * groups[0], 32 * groups[0] + 32)
    dead = moments[first] == 0
    step, zeros = compute_steps(weight.t()[first].masked_fill(dead[:, None], 0), 4)
    assert made.scales is not None
    assert made.zeros is not None
    assert torch.equal(made.scales[groups[0]].float(), step[0])
    assert torch.equal(made.zeros[groups[0]].float(), zeros[0])
    # In that order, a plain walk gives the same codes.
    sorted_moment = inputs.second_moment[order][:, order]
    walked = gptq(weight[:, order], sorted_moment, 4, 32, act_order="none")
    assert torch.equal(unpack_codes(made)[order], unpack_codes(walked))
    assert torch.equal(dequantize(made, torch.float64)[:, order], dequantize(walked, torch.float64))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("lowest_zero", [0, 1])
def test_a_search_never_errs_more_than_the_whole_range(
    weight: torch.Tensor, bits: int, symmetric: bool, lowest_zero: int
) -> None:
    """Of each group and output, weighted; and what it finds is the best of its grid, tried one by one in float64."""
    groups = weight.double().t().unflatten(0, (-1, 32))[:, :, :6]  # [3, 32, 6]
    costs = torch.rand((3, 32, 1), generator=torch.Generator().manual_seed(2), dtype=torch.float64).pow(6)

    def cost(step: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        rounded = (round_to_codes(groups, step, zeros, bits) - zeros) * step
        return (costs * (rounded - groups).square()).sum(1)

    options = {"symmetric": symmetric, "lowest_zero": lowest_zero}
    plain = cost(*compute_steps(groups, bits, **options))  # type: ignore[arg-type]
    found = cost(*search_steps(groups, costs, bits, **options))  # type: ignore[arg-type]
    every = [cost(*compute_steps(groups * (1 - i / 100), bits, **options)) for i in range(80)]  # type: ignore[arg-type]
    assert bool((found <= plain).all())
    assert bool((found < 0.9 * plain).any()) or bits == 8
    torch.testing.assert_close(found, torch.stack(every).amin(0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("bits", [2, 3])
def test_gptq_that_searches_leaves_less_output_error(weight: torch.Tensor, inputs: Inputs, bits: int) -> None:
    whole, searched = (gptq(weight, inputs.second_moment, bits, 32, search=search) for search in (False, True))
    assert error(weight, searched, inputs) < 0.97 * error(weight, whole, inputs)


def test_a_block_of_inputs_divides_a_group() -> None:
    assert [block_of(size) for size in (1, 32, 96, 128, 131, 192, 256, 1024)] == [1, 32, 96, 128, 1, 96, 128, BLOCK]


def descent_loss(weight: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """[N]: what the codes [K, N] around 2 cost each output, by definition."""
    difference = (codes - 2) * steps.repeat_interleave(32, 0) - weight.t()
    return torch.einsum("kn,kl,ln->n", difference, moment, difference)


def test_descent_ends_where_no_code_and_no_step_alone_would_be_better(weight: torch.Tensor, inputs: Inputs) -> None:
    wide, moment = weight.double(), inputs.second_moment + torch.eye(K, dtype=torch.float64)
    plain = round_to_nearest(wide, 2, 32, symmetric=True)
    assert plain.scales is not None
    columns, codes, steps = wide.t(), unpack_codes(plain).double(), plain.scales.double()
    losses = [descent_loss(wide, codes, steps, moment)]
    for _ in range(30):
        codes, steps = descend(columns, codes, steps, torch.full_like(steps, 2), moment, 2, 1)
        losses.append(descent_loss(wide, codes, steps, moment))
    assert all(bool((after <= before * (1 + 1e-12)).all()) for before, after in itertools.pairwise(losses))
    assert torch.equal(losses[-1], losses[-2]), "more than 30 sweeps"
    assert float(losses[-1].sum()) < 0.7 * float(losses[0].sum())
    least = losses[-1] * (1 - 1e-12)
    for k, by in itertools.product(range(K), (-3, -2, -1, 1, 2, 3)):
        other = codes.clone()
        other[k] = (other[k] + by).clamp(0, 3)
        assert bool((descent_loss(wide, other, steps, moment) >= least).all())
    for g, to in itertools.product(range(len(steps)), (0.0, torch.inf)):
        changed = steps.half()
        changed[g] = torch.nextafter(changed[g], torch.tensor(to).half())
        assert bool((descent_loss(wide, codes, changed.double(), moment) >= least).all())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 32), (4, -1)])
def test_gptq_that_goes_over_its_codes_again_leaves_less_output_error(
    weight: torch.Tensor, inputs: Inputs, bits: int, group_size: int, symmetric: bool
) -> None:
    options = {"symmetric": symmetric, "search": True, "damping": 1e-3, "lowest_zero": 1}
    walked, swept = (gptq(weight, inputs.second_moment, bits, group_size, sweeps=n, **options) for n in (0, 2))  # type: ignore[arg-type]
    assert error(weight, swept, inputs) < 0.97 * error(weight, walked, inputs)
    assert (swept.zeros is None) == symmetric


def test_gptq_untold_does_what_its_page_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text()
    said = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)", page, re.MULTILINE))
    untold = {name: str(value).lower() for name, value in METHODS["gptq"].options.model_dump().items()}
    assert {name: said.get(name) for name in untold} == untold


def test_gptq_refuses_what_is_no_second_moment(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, torch.full((K, K), torch.nan), 4, 32)


def test_awq_with_power_0_rounds(weight: torch.Tensor, inputs: Inputs) -> None:
    scales = power_scales(inputs.mean_abs, 0.0)
    assert torch.equal(scales, torch.ones_like(scales))
    assert torch.equal(round_scaled(weight, scales, 4, 32), dequantize(round_to_nearest(weight, 4, 32), torch.float32))


def test_awq_finds_the_best_power_of_its_grid(weight: torch.Tensor, inputs: Inputs) -> None:
    other = weight.flip(0)[: N // 2] * 2  # a second linear of the same inputs
    scales = search_scales([weight, other], inputs, inputs.mean_abs, 4, 32)

    def cost(scales: torch.Tensor) -> float:
        return sum(output_error([w], [round_scaled(w, scales, 4, 32)], inputs) for w in (weight, other))

    every = [cost(power_scales(inputs.mean_abs, power / 20)) for power in range(20)]
    assert cost(scales) == min(every) < 0.8 * every[0]
    assert len(set(every)) == 20


def test_output_error_is_that_of_the_outputs(weight: torch.Tensor) -> None:
    x = torch.randn((50, K), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    changed = weight * 1.01
    expected = (x @ (changed - weight).double().t()).square().sum().item()
    found = output_error([weight], [changed], Inputs(x.t() @ x, x.abs().mean(0)))
    assert found == pytest.approx(expected, rel=1e-9)


def test_clipping_leaves_less_output_error_of_each_group(weight: torch.Tensor, inputs: Inputs) -> None:
    cut = clip_groups(weight, inputs.second_moment, 4, 32)
    groups = weight.unflatten(1, (-1, 32))
    bounds = cut.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert torch.equal(cut.unflatten(1, (-1, 32)), groups.clamp(-bounds, bounds))
    assert bool((bounds < groups.abs().amax(-1, keepdim=True)).any())
    before, after = (dequantize(round_to_nearest(w, 4, 32), torch.float32) - weight for w in (weight, cut))
    for g in range(K // 32):
        part = slice(g * 32, (g + 1) * 32)
        moment = inputs.second_moment[part, part].float()
        errors = [((d[:, part] @ moment) * d[:, part]).sum(1) for d in (before, after)]
        assert bool((errors[1] <= errors[0] * 1.00001).all())


def test_clipping_takes_the_best_bound_of_its_grid_for_every_group(weight: torch.Tensor, inputs: Inputs) -> None:
    wide = weight.double()
    cut = clip_groups(wide, inputs.second_moment, 4, 32)
    for start in range(0, K, 32):
        own, moment = wide[:, start : start + 32], inputs.second_moment[start : start + 32, start : start + 32]
        greatest = own.abs().amax(1, keepdim=True)
        bounds = [greatest * (1 - step / 20) for step in range(10)]
        rounded = [dequantize(round_to_nearest(own.clamp(-b, b), 4, 32), torch.float64) - own for b in bounds]
        errors = torch.stack([((d @ moment) * d).sum(1) for d in rounded])  # [10, N]
        best = torch.stack(bounds).gather(0, errors.argmin(0)[None, :, None])[0]
        assert torch.equal(cut[:, start : start + 32], own.clamp(-best, best))
        assert len(errors.argmin(0).unique()) > 2


def test_kmeans_is_as_good_as_trying_every_cut() -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn((5, 9), generator=generator, dtype=torch.float64)
    weights = torch.rand((5, 9), generator=generator, dtype=torch.float64)
    weights[4] = 0  # counts as even
    rows = sorted_rows(values, weights)
    found = rows.cost(kmeans(values, weights, 3))
    for row in range(5):
        v, w = rows.values[row], rows.weights[row]
        costs = []
        for cuts in itertools.combinations(range(1, 9), 2):
            parts = zip(v.tensor_split(cuts), w.tensor_split(cuts), strict=True)
            costs.append(sum(float((b * (a - (a * b).sum() / b.sum()).square()).sum()) for a, b in parts))
        assert float(found[row]) == pytest.approx(min(costs), rel=1e-9)


def test_lloyds_steps_never_make_a_row_worse() -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn((20, 300), generator=generator, dtype=torch.float64)
    weights = torch.rand((20, 300), generator=generator, dtype=torch.float64).pow(8)
    rows = sorted_rows(values, weights)
    centres = torch.linspace(-3, 3, 8, dtype=torch.float64).repeat(20, 1)
    costs = [rows.cost(centres)]
    for _ in range(12):
        centres = rows.compute_means(centres)
        costs.append(rows.cost(centres))
    for before, after in itertools.pairwise(costs):
        assert bool((after <= before * (1 + 1e-12)).all())
    assert float(costs[-1].sum()) < 0.8 * float(costs[0].sum())
    best = rows.cost(kmeans(values, weights, 8))  # 300 values: cut between stretches, then moved
    assert bool((best <= rows.cost(move_centres(rows, centres)) * 1.02).all())


def test_kmeans_with_even_sensitivities_is_the_plain_one_and_keeps_few_values_exactly(weight: torch.Tensor) -> None:
    plain = kmeans(weight, torch.ones_like(weight), 8)
    for even in (torch.full_like(weight, 1e-30), torch.full_like(weight, 7.0), torch.zeros_like(weight)):
        torch.testing.assert_close(kmeans(weight, even, 8), plain, rtol=1e-9, atol=1e-9)
    few = weight[:, :8].repeat(1, 12)
    centres = kmeans(few, torch.ones_like(few), 8)
    torch.testing.assert_close(centres.gather(1, nearest_centre(few.double(), centres)), few.double())


def test_squeezellm_keeps_five_of_ten_thousand_for_their_sensitivity_and_forty_for_their_size(
    weight: torch.Tensor,
) -> None:
    sensitivity = torch.rand((N, K), generator=torch.Generator().manual_seed(6))
    made = squeezellm(weight, sensitivity, 3)
    assert made.outliers is not None
    apart = select_largest(sensitivity, 0.0005) | select_largest(weight.abs(), 0.004)
    assert len(made.outliers.cols) == int(apart.sum()) > 0


@pytest.mark.parametrize("bits", [3, 4])
def test_squeezellm_keeps_what_matters_and_what_sticks_out(weight: torch.Tensor, bits: int) -> None:
    sensitivity = torch.rand((N, K), generator=torch.Generator().manual_seed(6)).pow(4)
    weight[3, 7], sensitivity[8, 9] = 50.0, 100.0
    made = squeezellm(weight, sensitivity, bits, sensitive=0.001, large=0.004)
    assert made.table is not None
    assert made.outliers is not None
    apart = select_largest(sensitivity, 0.001) | select_largest(weight.abs(), 0.004)
    assert bool(apart[3, 7] & apart[8, 9])
    kept = torch.zeros_like(apart)
    kept[made.outliers.outputs(), made.outliers.cols.long()] = True
    assert torch.equal(kept, apart)
    dense = dequantize(made, torch.float32)
    torch.testing.assert_close(dense[apart], weight[apart], rtol=1e-6, atol=1e-6)
    table = made.table.t()  # [N, 2**bits]
    nearest = (weight[:, :, None] - table[:, None, :]).abs().amin(-1)
    torch.testing.assert_close((dense - weight).abs()[~apart], nearest[~apart], rtol=1e-5, atol=1e-6)
    # An outlier's code is that of the value nearest 0, as in the original's files.
    code = unpack_codes(made).t()[apart].long()
    assert torch.equal(code, table.abs().argmin(1).repeat_interleave(apart.sum(1)))


def test_squeezellm_minds_sensitivities(weight: torch.Tensor) -> None:
    sensitivity = torch.rand((N, K), generator=torch.Generator().manual_seed(6)).pow(4)
    costs = []
    for given in (sensitivity, torch.ones_like(weight)):
        dense = dequantize(squeezellm(weight, given, 3, sensitive=0, large=0), torch.float32)
        costs.append(float((sensitivity * (dense - weight).square()).sum()))
    assert costs[0] < 0.7 * costs[1]


def test_the_most_are_a_share_and_the_first_of_equals() -> None:
    scores = torch.tensor([[1.0, 3.0], [3.0, 2.0]])
    assert select_largest(scores, 0.25).tolist() == [[False, True], [False, False]]
    assert select_largest(scores, 0.5).tolist() == [[False, True], [True, False]]
    assert not select_largest(scores, 0.0).any()


def test_smoothquant_makes_the_largest_input_and_the_largest_weight_of_one_size(weight: torch.Tensor) -> None:
    largest = torch.randn(K, generator=torch.Generator().manual_seed(7), dtype=torch.float64).exp()
    other = weight.flip(0)[: N // 2] * 2  # a second linear of the same inputs
    scales = smoothing_scales(largest, [weight, other], torch.arange(K))
    by_weight = (torch.cat([weight, other]).double() * scales).abs().amax(0)
    torch.testing.assert_close(largest / scales, by_weight)
    assert torch.equal(smoothing_scales(largest, [weight], torch.arange(K), migration=1.0), largest)  # all of it


def test_smoothquant_scales_inputs_of_one_row_alike_and_dead_ones_finitely(weight: torch.Tensor) -> None:
    rows = torch.arange(K // 2).repeat_interleave(2)
    largest = torch.arange(K, dtype=torch.float64)
    assert torch.equal(share_largest(largest, rows), (torch.arange(K // 2) * 2.0 + 1).repeat_interleave(2).double())
    weight[:, 7] = 0
    largest[10:12] = 0
    scales = smoothing_scales(largest, [weight], rows)
    assert torch.equal(scales[::2], scales[1::2])
    assert bool(((scales > 0) & torch.isfinite(scales)).all())
