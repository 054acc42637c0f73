"""kv_scatter: skipped rows, and the baseline's path for a device that the host must not wait for."""

import pytest
import torch

from tkernels import OPS, ContractError
from tkernels.check import chooser
from tkernels.inputs import clone_inputs
from tkernels.ops.kv_scatter.contract import CONTRACT, reference, scatter_without_sync


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


def test_a_cache_of_another_dtype_is_refused_for_now() -> None:
    k, cache = torch.zeros(1, 1, 16), torch.zeros(1, 2, 1, 16, dtype=torch.float16)
    with pytest.raises(ContractError, match="kv == activation does not hold"):
        OPS["kv_scatter"].variants["torch"](k, k, cache, cache, torch.tensor([0]))
