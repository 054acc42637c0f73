"""paged_decode: the definition against dense attention, batch invariance, splits, empty contexts, cost, bad calls."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tkernels import OPS, ContractError
from tkernels.check import check_case
from tkernels.contract import Axes, Case
from tkernels.inputs import Draws
from tkernels.ops.paged_decode.contract import CONTRACT, reference
from tkernels.ops.paged_decode.paged_cache import gather_context, paged_inputs

TRITON = [name for name, v in OPS["paged_decode"].variants.items() if v.kind == "triton"]
AXES: Axes = {
    "B": 3, "lengths": "edges", "S": 8, "N": 9, "P": 32, "Hkv": 2, "Hq": 6, "D": 32, "Dv": 64, "activation": "float32",
    "kv": "float32", "window": 0, "k_scale": False, "v_scale": False, "return_lse": True, "bound": "none",
    "layout": "contiguous", "values": "ordinary",
}  # fmt: skip


def case_with_contexts(contexts: tuple[int, ...], **axes: Any) -> Case:
    point = {**AXES, "B": len(contexts), **axes}
    device = torch.device("cpu")
    inputs = paged_inputs(point, Draws(0, device), device, [1] * len(contexts), len(contexts), contexts)
    return Case(CONTRACT, point, 0, {**vars(inputs), "return_lse": True})


def dense(inputs: dict[str, Any], sequence: int) -> torch.Tensor:
    """[Hq, Dv]: torch's own attention over this sequence's visible keys, copied out one by one."""
    page, length = inputs["k_cache"].shape[1], int(inputs["context_lens"][sequence])
    first = max(0, length - (inputs["window"] or length))
    places = [(int(inputs["block_tables"][sequence, i // page]), i % page) for i in range(first, length)]
    k = torch.stack([inputs["k_cache"][p, s] for p, s in places], dim=1)  # [Hkv, keys, D]
    v = torch.stack([inputs["v_cache"][p, s] for p, s in places], dim=1)
    group = inputs["q"].shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    q = inputs["q"][sequence].unsqueeze(1)  # [Hq, 1, D]
    return F.scaled_dot_product_attention(q, k, v, scale=inputs["scale"]).squeeze(1)


@pytest.mark.parametrize("window", [0, 5, 40])
def test_the_definition_is_dense_attention_over_the_visible_keys(window: int) -> None:
    case = case_with_contexts((72, 1, 17), activation="float64", kv="float64", window=window)
    out, _ = reference(**case.inputs)
    for sequence in range(3):
        torch.testing.assert_close(out[sequence], dense(case.inputs, sequence), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", TRITON)
@pytest.mark.parametrize("window", [0, 40])
def test_the_batch_around_a_sequence_changes_no_bit(variant: str, window: int) -> None:
    decode = OPS["paged_decode"].variants[variant]
    inputs = case_with_contexts((71, 33, 8), window=window).inputs
    out, lse = decode(**inputs)
    for sequence in range(3):
        alone = dict(inputs)
        for name in ("q", "block_tables", "context_lens"):
            alone[name] = inputs[name][sequence : sequence + 1]
        wider = torch.full((1, 4), torch.iinfo(torch.int32).max, dtype=torch.int32)
        alone["block_tables"] = torch.cat((alone["block_tables"], wider), dim=1)
        alone["max_context_len"] = 72
        out_alone, lse_alone = decode(**alone)
        assert torch.equal(out_alone[0], out[sequence])
        assert torch.equal(lse_alone[0], lse[sequence])


@pytest.mark.parametrize("num_splits", [1, 2, 5, 8])
def test_any_number_of_splits_is_right(num_splits: int) -> None:
    split_kv = OPS["paged_decode"].variants["split_kv"]
    config = split_kv.default_config("interpreter").pinned({"num_splits": num_splits})
    result = check_case(split_kv, case_with_contexts((72, 0, 17), Hq=2), config)
    assert result.status == "ok", result


@pytest.mark.parametrize("variant", list(OPS["paged_decode"].variants))
def test_an_empty_context_gives_zeros(variant: str) -> None:
    inputs = case_with_contexts((0, 9)).inputs
    out, lse = OPS["paged_decode"].variants[variant](**inputs)
    assert torch.equal(out[0], torch.zeros(6, 64))
    assert lse[0].tolist() == [-math.inf] * 6
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("variant", list(OPS["paged_decode"].variants))
def test_a_batch_may_be_empty(variant: str) -> None:
    out, lse = OPS["paged_decode"].variants[variant](**case_with_contexts(()).inputs)
    assert (out.shape, lse.shape) == ((0, 6, 64), (0, 6))


@pytest.mark.parametrize("variant", list(OPS["paged_decode"].variants))
def test_lse_is_a_natural_logarithm_of_weights_that_sum_to_one(variant: str) -> None:
    inputs = case_with_contexts((72, 1, 17)).inputs
    _, lse = OPS["paged_decode"].variants[variant](**inputs)
    for sequence, length in enumerate((72, 1, 17)):
        keys = gather_context(inputs["k_cache"], inputs["block_tables"], inputs["context_lens"])[sequence, :length]
        keys = keys.double().repeat_interleave(3, dim=1)  # [keys, Hq, D]
        logits = torch.einsum("hd,khd->hk", inputs["q"][sequence].double(), keys) * inputs["scale"]
        weights = (logits - lse[sequence].double()[:, None]).exp()
        torch.testing.assert_close(weights.sum(-1), torch.ones(6, dtype=torch.float64), rtol=2e-6, atol=0)


@pytest.mark.parametrize("variant", list(OPS["paged_decode"].variants))
def test_an_fp8_cache_is_the_same_as_its_values_times_their_scales_in_a_wider_one(variant: str) -> None:
    inputs = case_with_contexts((72, 1, 17), kv="float8_e4m3fn", k_scale=True, v_scale=True).inputs
    wide = dict(inputs)
    for name, scale in (("k_cache", "k_scale"), ("v_cache", "v_scale")):  # powers of two: the products are exact
        wide[name], wide[scale] = inputs[name].float() * inputs[scale][:, None], None
    decode = OPS["paged_decode"].variants[variant]
    torch.testing.assert_close(decode(**inputs), decode(**wide), rtol=2e-6, atol=2e-6)


def test_gathered_rows_past_a_context_are_zero_whatever_the_cache_holds() -> None:
    cache = torch.full((3, 4, 1, 16), float("nan"))
    cache[2] = 1.0
    cache[0, 0] = 2.0
    tables = torch.tensor([[2, 0, 2**31 - 1]], dtype=torch.int32)
    rows = gather_context(cache, tables, torch.tensor([5], dtype=torch.int32))[0, :, 0, 0]
    assert rows.tolist() == [1.0] * 4 + [2.0] + [0.0] * 7


def test_cost_counts_what_is_visible_once() -> None:
    case = case_with_contexts((72, 1, 17), window=40)
    visible = 40 + 1 + 17
    assert case.flops == 2 * 6 * (32 + 64) * visible
    queries = 3 * 6 * (4 * (32 + 64) + 4)
    pages = (9 - 4) + 1 + 3  # 40 of 72 keys begin on the fifth page
    assert case.bytes_moved == visible * 2 * (32 + 64) * 4 + queries + 4 * (pages + 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "'window' must be at least 1"),
        ({"scale": 0.0}, "'scale' must be at least"),
        ({"max_context_len": -1}, "'max_context_len' must be at least 0"),
        ({"q": torch.zeros(3, 5, 32)}, "Hq % Hkv == 0 does not hold"),
        ({"q": torch.zeros(3, 6, 32, dtype=torch.bfloat16)}, "kv == activation or kv == 'float8_e4m3fn' does not hold"),
        ({"context_lens": torch.zeros(3, dtype=torch.int64)}, "'context_lens' must be int32"),
        ({"k_scale": torch.ones(6)}, "'k_scale' gives Hkv = 6, but Hkv = 2"),
    ],
)
def test_a_bad_call_is_refused(change: dict[str, Any], message: str) -> None:
    inputs = CONTRACT.case(AXES, 0).inputs
    with pytest.raises(ContractError, match=message):
        OPS["paged_decode"].variants["torch"](**{**inputs, **change})


def test_a_page_size_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ContractError, match="does not hold for S = 6"):
        CONTRACT.check_axes({**AXES, "S": 6})
