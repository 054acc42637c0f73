"""kv_scatter: skipped rows, and the baseline's path for a device that the host must not wait for."""

import math

import pytest
import torch

from tkernels import OPS, ContractError
from tkernels.device import TARGETS
from tkernels.inputs import clone_inputs
from tkernels.ops.kv_scatter.contract import CONTRACT, reference, scatter_without_sync
from tkernels.verification.draws import chooser


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (torch.isnan(a) & torch.isnan(b))).all())


@pytest.mark.parametrize("skipped", ["none", "some", "all"])
@pytest.mark.parametrize("seed", range(8))
def test_the_path_without_a_sync_writes_the_same(skipped: str, seed: int) -> None:
    axes = CONTRACT.draw_axes(chooser(seed), {"skipped": skipped})
    case = CONTRACT.case(axes, seed)
    expected, got = clone_inputs(case.inputs), clone_inputs(case.inputs)
    reference(**expected)
    scatter_without_sync(**got)
    assert same_bits(got["k_cache"], expected["k_cache"])
    assert same_bits(got["v_cache"], expected["v_cache"])


@pytest.mark.parametrize("variant", list(OPS["kv_scatter"].variants))
def test_minus_one_is_not_the_last_slot(variant: str) -> None:
    k = torch.ones(3, 2, 16)
    k_cache, v_cache = torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16)
    OPS["kv_scatter"].variants[variant](k, 2 * k, k_cache, v_cache, torch.tensor([-1, 5, -1]))
    written = torch.zeros(2, 4, 2, 16)
    written[1, 1] = 1
    assert torch.equal(k_cache, written)
    assert torch.equal(v_cache, 2 * written)


@pytest.mark.parametrize("variant", list(OPS["kv_scatter"].variants))
def test_stored_is_value_over_scale_for_each_head(variant: str) -> None:
    k = torch.full((1, 2, 16), 6.0)
    k_cache, v_cache = torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16)
    scale = torch.tensor([2.0, 3.0])
    OPS["kv_scatter"].variants[variant](k, k, k_cache, v_cache, torch.tensor([1]), k_scale=scale)
    assert k_cache[0, 1, :, 0].tolist() == [3.0, 2.0]
    assert v_cache[0, 1, :, 0].tolist() == [6.0, 6.0]
    assert k_cache[0, 0].count_nonzero() == 0


@pytest.mark.parametrize("variant", list(OPS["kv_scatter"].variants))
def test_fp8_is_rounded_to_nearest_even_and_saturates_on_both_sides(variant: str) -> None:
    values = torch.tensor([447.0, 448.0, 465.0, 1e30, math.inf, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
    expected = [448.0, 448.0, 448.0, 448.0, 448.0, 16.0, 20.0, 0.0, 2.0**-8]
    k = torch.stack([values, -values]).view(1, 2, 9)
    k_cache, v_cache = (torch.zeros(1, 2, 2, 9).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.tensor([1.0, 2.0])
    OPS["kv_scatter"].variants[variant](k, k, k_cache, v_cache, torch.tensor([1]), v_scale=scale)
    assert k_cache[0, 1].float().tolist() == [expected, [-x for x in expected]]
    assert v_cache[0, 1, 1].float().tolist()[:4] == [-224.0, -224.0, -240.0, -448.0]  # -232.5 rounds to -240
    assert k_cache[0, 0].float().count_nonzero() == 0


@pytest.mark.parametrize(("arch", "known"), [("sm_80", False), ("sm_86", False), ("sm_89", True), ("gfx942", False)])
def test_fp8_is_unsupported_with_a_reason_where_the_architecture_has_no_e4m3(arch: str, known: bool) -> None:
    variant = OPS["kv_scatter"].variants["token_per_program"]
    reason = variant.supports({"kv": "float8_e4m3fn"}, TARGETS[arch])
    assert (reason is None) == known
    assert known or arch in str(reason)
    assert variant.supports({"kv": "bfloat16"}, TARGETS[arch]) is None


def test_a_cache_of_another_dtype_is_refused() -> None:
    k, cache = torch.zeros(1, 1, 16), torch.zeros(1, 2, 1, 16, dtype=torch.float16)
    with pytest.raises(ContractError, match="kv == activation or kv == 'float8_e4m3fn' does not hold"):
        OPS["kv_scatter"].variants["torch"](k, k, cache, cache, torch.tensor([0]))
