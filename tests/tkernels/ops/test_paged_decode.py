"""paged_decode: the definition against dense attention, batch invariance, splits, empty contexts, cost, bad calls."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton.runtime.interpreter import interpreter_builder

from tkernels import OPS, Config, ContractError
from tkernels.contract import Axes, Case
from tkernels.inputs import Draws
from tkernels.interpreter.replaced import replaced_methods
from tkernels.launch import Kernel, jit_door
from tkernels.ops.paged_cache import gather_context, paged_inputs
from tkernels.ops.paged_decode.contract import CONTRACT, reference
from tkernels.tuning import NEAREST
from tkernels.verification.ahead_of_time import compile_for
from tkernels.verification.check import check_case
from tkernels.verification.inspection import sass

SPLITTING = ["split_kv", "last_arriver"]
TRITON = [name for name, v in OPS["paged_decode"].variants.items() if v.kind == "triton"]
AXES: Axes = {
    "B": 3, "lengths": "edges", "S": 8, "N": 9, "P": 32, "Hkv": 2, "Hq": 6, "D": 32, "Dv": 64, "activation": "float32",
    "kv": "float32", "window": 0, "k_scale": False, "v_scale": False, "soft_cap": 0,
    "sinks": False, "return_lse": True, "bound": "none",
    "layout": "contiguous", "values": "ordinary",
}  # fmt: skip


def case_with_contexts(contexts: tuple[int, ...], **axes: Any) -> Case:
    point = {**AXES, "B": len(contexts), **axes}
    device = torch.device("cpu")
    inputs = paged_inputs(point, Draws(0, device), device, [1] * len(contexts), len(contexts), contexts)
    return Case(CONTRACT, point, 0, {**inputs, "return_lse": True})


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


@pytest.mark.parametrize("variant", SPLITTING)
@pytest.mark.parametrize("num_splits", [1, 2, 5, 8])
def test_any_number_of_splits_is_right(variant: str, num_splits: int) -> None:
    splitting = OPS["paged_decode"].variants[variant]
    config = splitting.default_config("interpreter").pinned({"num_splits": num_splits})
    result = check_case(splitting, case_with_contexts((72, 0, 17), Hq=2, Hkv=1), config)
    assert result.status == "ok", result


def launched(variant: str, inputs: dict[str, Any], num_splits: int = 8) -> int:
    """Programs of the first kernel; the interpreter counts as a device of 4 multiprocessors."""
    splitting = OPS["paged_decode"].variants[variant]
    grids: list[tuple[int, ...]] = []

    def noting_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        grids.append(grid)

    Kernel(splitting, NEAREST, {"num_splits": num_splits}, noting_door)(**inputs)
    return math.prod(grids[0])


@pytest.mark.parametrize("variant", SPLITTING)
def test_splits_follow_the_device_and_the_hosts_bound_but_never_the_batch(variant: str) -> None:
    alone = case_with_contexts((72,), Hkv=1).inputs
    assert launched(variant, alone, num_splits=5) == 5  # five blocks of 16 keys
    assert launched(variant, alone, num_splits=128) == 5
    assert launched(variant, {**alone, "max_context_len": 33}) == 3
    assert launched(variant, {**alone, "window": 17}) == 2
    assert launched(variant, case_with_contexts((72,), N=32).inputs) == 2 * 4  # two programs for each multiprocessor
    assert launched(variant, case_with_contexts((72, 8, 1), N=9).inputs) == 3 * 2 * 4


def backwards(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Runs the programs in the opposite order, so that another one of a sequence's arrives last."""
    place = interpreter_builder.set_grid_idx
    last = [size - 1 for size in (*grid, 1, 1)[:3]]
    with replaced_methods(set_grid_idx=lambda *program: place(*(n - i for n, i in zip(last, program, strict=True)))):
        jit_door(kernel, grid, arguments, config)


def test_the_last_arriver_leaves_its_counts_at_zero_and_the_same_bits_whoever_is_last() -> None:
    decode = OPS["paged_decode"].variants["last_arriver"]
    inputs = case_with_contexts((72, 0, 17), Hkv=1).inputs
    first, again = decode(**inputs), decode(**inputs)
    for out, lse in (again, Kernel(decode, NEAREST, {}, backwards)(**inputs)):
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
    assert decode.zeroed.not_zero() == []


def test_a_combined_context_of_one_split_is_that_split() -> None:
    inputs = case_with_contexts((72, 5, 17), Hkv=1).inputs
    one_pass = OPS["paged_decode"].variants["one_pass"]
    expected = Kernel(one_pass, NEAREST, {"BLOCK_N": 16})(**inputs)
    for name in SPLITTING:
        got = Kernel(OPS["paged_decode"].variants[name], NEAREST, {"num_splits": 1})(**inputs)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("variant", list(OPS["paged_decode"].variants))
@pytest.mark.parametrize("contexts", [(9,), (72,), (9, 0, 33)])
def test_logits_far_below_zero_weigh_against_each_other_alone(variant: str, contexts: tuple[int, ...]) -> None:
    """One part or several, none with a weight that fp32 could hold beside that of a logit of 0."""
    inputs = case_with_contexts(contexts, Hq=2, Hkv=1).inputs
    inputs["q"].fill_(1.0)
    live = inputs["k_cache"].isfinite()
    inputs["k_cache"][live] = -32.0
    logit = -32.0 * 32 * inputs["scale"]
    assert logit / math.log(2) < -250
    out, lse = OPS["paged_decode"].variants[variant](**inputs)
    v = gather_context(inputs["v_cache"], inputs["block_tables"], inputs["context_lens"])
    for sequence, length in enumerate(contexts):
        mean = v[sequence, :length, 0].double().sum(0) / max(length, 1)
        torch.testing.assert_close(out[sequence].double(), mean.expand(2, -1), rtol=2e-6, atol=2e-6)
        expected = logit + math.log(length) if length else -math.inf
        assert lse[sequence].tolist() == pytest.approx([expected] * 2, rel=1e-6)


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
    case = case_with_contexts((72, 1, 17), activation="float16", kv="float8_e4m3fn", k_scale=True, v_scale=True)
    inputs = case.inputs
    wide = dict(inputs)
    for name, scale in (("k_cache", "k_scale"), ("v_cache", "v_scale")):  # powers of two: the products are exact
        wide[name], wide[scale] = inputs[name].half() * inputs[scale][:, None].half(), None
    decode = OPS["paged_decode"].variants[variant]
    (out, lse), (out_wide, lse_wide) = decode(**inputs), decode(**wide)
    torch.testing.assert_close(out, out_wide, rtol=2.0**-9, atol=2.0**-9)
    torch.testing.assert_close(lse, lse_wide, rtol=2e-6, atol=2e-6)


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


@pytest.mark.slow
def test_the_loop_over_keys_issues_few_instructions_a_byte_and_over_e4m3_at_most_half_as_many_more(
    tmp_path: Path,
) -> None:
    """As the op's default is compiled for Qwen3-4B's heads, where a block took 643 instructions, 9 barriers and 12
    shuffles, and 921 over e4m3 for half the bytes."""
    rows = compile_for(["sm_90"], ["paged_decode.last_arriver"], points=("engine", "fp8"), dump=tmp_path)
    a_byte = {}
    for row in rows:
        assert (row.status, row.spill_bytes) == ("ok", 0), row
        code = sass.parse((tmp_path / f"paged_decode.last_arriver.{row.point}.0.sm_90.sass").read_text())
        (loop,) = [loop for loop in code.main_loops() if any(one.matrix for one in loop)]
        counts = Counter(one.opcode.partition(".")[0] for one in loop)
        assert counts["BAR"] <= 6
        assert counts["SHFL"] <= 8  # 3 for each of the 2 heads that a lane has, and 2 between warps
        a_byte[row.point] = len(loop) / sum(one.loads for one in loop if one.loads == 16)  # the rest are pages' ids
    assert a_byte["engine"] <= 643 / 256 * 0.7
    assert a_byte["fp8"] <= 1.5 * a_byte["engine"]
