"""qk_norm_rope_scatter: what is kept, what is left alone, and that one launch does what two do."""

import math
from typing import Any

import pytest
import torch

from tkernels import OPS, ContractError, Kernel
from tkernels.inputs import clone_inputs
from tkernels.tuning import NEAREST
from tkernels.verification.draws import chooser

OP = OPS["qk_norm_rope_scatter"]
FUSED = [name for name, variant in OP.variants.items() if variant.kind == "triton"]


def call_arguments(slots: tuple[int, ...] = (5, -1, 2), **axes: Any) -> dict[str, Any]:
    fixed = {
        "T": len(slots), "Hq": 3, "Hkv": 2, "D": 16, "Dv": 16, "R": 12, "L": 7, "P": 2, "S": 3, "layout": "fused",
        "activation": "float32", "kv": "float32", "values": "ordinary", "k_scale": False, "v_scale": False, **axes,
    }  # fmt: skip
    arguments = OP.contract.case(OP.contract.draw_axes(chooser(0), fixed), seed=0).inputs
    return {**arguments, "slots": torch.tensor(slots)}


@pytest.mark.parametrize("variant", list(OP.variants))
def test_it_is_its_parts_one_after_the_other(variant: str) -> None:
    arguments = call_arguments(k_scale=True, v_scale=True)
    one, two = clone_inputs(arguments), clone_inputs(arguments)
    assert OP.variants[variant](**one) is None
    options = {name: two[name] for name in ("q_weight", "k_weight", "eps", "interleaved")}
    OPS["qk_norm_rope"].variants["torch"](*(two[n] for n in ("q", "k", "cos", "sin", "positions")), **options)
    scales = {name: two[name] for name in ("k_scale", "v_scale")}
    OPS["kv_scatter"].variants["torch"](*(two[n] for n in ("k", "v", "k_cache", "v_cache", "slots")), **scales)
    for name in ("q", "k_cache", "v_cache"):
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert one["k_cache"].isfinite().all(dim=(2, 3)).sum() == 2


@pytest.mark.parametrize("variant", list(OP.variants))
def test_a_skipped_row_still_has_its_queries_rotated_and_no_slot_written(variant: str) -> None:
    arguments = call_arguments((-1, -1))
    before = arguments["q"].clone()
    OP.variants[variant](**arguments)
    assert (arguments["q"] != before).any(dim=-1).all()
    assert arguments["k_cache"].isnan().all()
    assert arguments["v_cache"].isnan().all()


@pytest.mark.parametrize("variant", FUSED)
def test_keys_and_values_stay_as_they_were(variant: str) -> None:
    arguments = call_arguments()
    before = {name: arguments[name].clone() for name in ("k", "v")}
    OP.variants[variant](**arguments)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("variant", FUSED)
def test_it_is_one_launch(variant: str) -> None:
    launched = []

    def counting_door(kernel: Any, grid: tuple[int, ...], arguments: Any, config: Any) -> None:
        launched.append((kernel.__name__, math.prod(grid)))

    Kernel(OP.variants[variant], NEAREST, {}, counting_door)(**call_arguments())
    assert [name for name, _ in launched] == [f"qk_norm_rope_scatter_{variant}"]


def test_the_queries_bytes_and_the_kept_rows_are_what_it_moves() -> None:
    axes = {**OP.contract.benchmarks["T=64,Hq=32,Hkv=8,D=128"], "T": 4, "P": 1, "L": 8}
    case = OP.contract.case(OP.contract.draw_axes(lambda name, candidates: candidates[0], axes), seed=0)
    row = 2 * 128 * (2 * 32 + 2 * (8 + 8))  # bf16: queries read and written, keys and values read and written
    angles = 2 * 64 * 4 * int(case.inputs["positions"].unique().numel())
    assert case.bytes_moved == 4 * row + angles + 4 * 16 + 2 * 2 * 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_weight": None}, "q_weight == k_weight does not hold"),
        ({"v": torch.ones(3, 1, 16)}, "'v' gives Hkv = 1, but Hkv = 2"),
        ({"v_cache": torch.ones(2, 4, 2, 16)}, "'v_cache' gives S = 4, but S = 3"),
        ({"k_cache": torch.ones(2, 3, 2, 16).half()}, "'v_cache' gives kv = float32, but kv = float16"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "'slots' must be int64"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "'slots' gives T = 2, but T = 3"),
    ],
)
def test_a_bad_call_is_refused_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    for variant in OP.variants.values():
        arguments = {**call_arguments(q_weight=True), **change}
        before = arguments["q"].clone()
        with pytest.raises(ContractError, match=message):
            variant(**arguments)
        assert torch.equal(arguments["q"], before)
