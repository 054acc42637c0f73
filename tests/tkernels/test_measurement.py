"""One variant at one point: no time without a right answer, none that means nothing, and points that fit a CPU."""

from pathlib import Path

import pytest
import torch

from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.contract import ContractError, Int
from tkernels.measurement import (
    CPU_BYTES,
    CPU_SIZE,
    INTERPRETED,
    Method,
    benchmark_points,
    cut_axes,
    measure,
    realistic_point,
    region_points,
    storage_bytes,
)
from tkernels.timing import Timing

CPU = torch.device("cpu")
AXES = {"T": 4, "I": 64, "activation": "float32", "layout": "contiguous", "values": "ordinary"}
FEW = Method(samples=2)


def test_a_right_variant_has_figures_and_none_that_a_cpu_does_not_give() -> None:
    row = measure(OPS["swiglu"].variants["torch"], "small", AXES, CPU, method=FEW)
    assert (row.status, row.config, row.config_source) == ("ok", None, None)
    assert isinstance(row.timing, Timing)
    assert row.bytes_moved == 3 * 4 * 64 * 4
    assert row.bytes_per_s == pytest.approx(row.bytes_moved / row.timing.median_us * 1e6)
    figures = row.as_dict()
    assert figures["roofline_fraction"] is None
    assert figures["roofline_reason"] == "no roofline is known for a CPU"
    assert figures["clocks"]["before"]["reason"] == "a CPU's clocks are not read"
    assert len(figures["samples_us"]) == 2


def test_an_interpreted_kernel_has_no_time() -> None:
    row = measure(OPS["swiglu"].variants["fused"], "small", AXES, CPU, method=FEW)
    assert (row.status, row.reason, row.timing) == ("not measured", INTERPRETED, None)
    assert row.config_source == "default"
    assert row.as_dict()["median_us"] is None
    assert row.as_dict()["roofline_reason"] == INTERPRETED


LIBRARY = """
import torch
from tkernels import Variant

def function(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    BODY

VARIANT = Variant(wins="never", function=function, deterministic=True, batch_invariant=True)
"""


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return torch.nn.functional.silu(gate) * up", "ok", None),
        ("return torch.nn.functional.silu(up) * gate", "wrong", "replay: tk check"),
        ("raise RuntimeError('not today')", "failed", "not today"),
        ("raise __import__('tkernels').UnsupportedError('odd lengths')", "unsupported", "odd lengths"),
    ],
)
def test_only_a_right_library_variant_is_timed(tmp_path: Path, body: str, status: str, said: str | None) -> None:
    (tmp_path / "swiglu").mkdir()
    (tmp_path / "swiglu" / "peer.py").write_text(LIBRARY.replace("BODY", body))
    variant = OPS.with_variants_from(tmp_path)["swiglu"].variants["peer"]
    row = measure(variant, "small", AXES, CPU, method=FEW)
    assert row.status == status
    assert (row.timing is not None) == (status == "ok")
    assert said is None or said in str(row.reason)


def test_an_outside_variant_is_measured_like_any_other(tmp_path: Path) -> None:
    variant = OPS.with_variants_from(write_variant(tmp_path))["swiglu"].variants["doubled"]
    assert measure(variant, "small", AXES, CPU).status == "not measured"


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_points_for_a_cpu(op: str) -> None:
    contract = OPS[op].contract
    points = benchmark_points(contract, CPU)
    assert 1 <= len(points) <= 2
    for axes in points.values():
        assert set(axes) == set(contract.axis_by_name)
        assert all(int(axes[a.name]) <= CPU_SIZE for a in contract.axes if isinstance(a, Int))
        assert storage_bytes(contract.case(axes, 0, torch.device("meta")).inputs) <= CPU_BYTES
    assert len(benchmark_points(contract, torch.device("cuda"))) == len(contract.benchmarks) > 0


def test_a_region_that_no_point_lies_in_has_one_of_its_own(tmp_path: Path) -> None:
    folder = write_variant(tmp_path, ('wins="never"', 'wins="never", region={"T": (3, 3), "I": (20000, 30000)}'))
    op = OPS.with_variants_from(folder)["swiglu"]
    contract, variants = op.contract, list(op.variants.values())
    for device in (CPU, torch.device("cuda")):
        usual, points = benchmark_points(contract, device), benchmark_points(contract, device, variants)
        ((name, own),) = (one for one in points.items() if one[0] not in usual)
        assert name.startswith("T=3,I=20000 for doubled")
        assert (own["T"], own["I"]) == (3, 20000)
        assert set(own) == set(contract.axis_by_name)
        assert list(points)[: len(usual)] == list(usual)


@pytest.mark.parametrize("op", OPS)
def test_the_points_of_an_op_lie_in_its_own_variants_regions(op: str) -> None:
    assert region_points(OPS[op].contract, OPS[op].variants.values()) == {}


@pytest.mark.parametrize("op", OPS)
def test_axes_that_are_left_open_are_those_of_the_typical_point(op: str) -> None:
    contract = OPS[op].contract
    *_, typical = contract.benchmarks.values()
    whole = realistic_point(contract, {}, torch.device("cuda"))
    assert typical.items() <= whole.items()
    assert whole.get("kv", "bfloat16") == "bfloat16"
    assert not any(whole[axis] for axis in ("permuted", "window", "k_scale") if axis in whole)
    small = realistic_point(contract, {}, CPU)
    assert storage_bytes(contract.case(small, 0, torch.device("meta")).inputs) <= CPU_BYTES
    kinds = [axis.name for axis in contract.axes if not isinstance(axis, Int) and axis.name not in ("layout", "step")]
    assert {name: small[name] for name in kinds} == {name: whole[name] for name in kinds}


def test_a_point_that_does_not_go_with_what_is_held_gives_way_to_an_earlier_one() -> None:
    contract = OPS["moe_mlp"].contract
    published = realistic_point(contract, {"T": 4, "coding": "e2m1"}, torch.device("cuda"))
    assert (published["H"], published["gate_up_group_size"], published["limit"]) == (2880, 32, 7)
    narrow = realistic_point(OPS["paged_decode"].contract, {"kv": "float8_e4m3fn"}, torch.device("cuda"))
    assert narrow["k_scale"]
    coded = realistic_point(contract, {"T": 4, "bits": 4}, torch.device("cuda"))
    assert (coded["T"], coded["bits"], coded["H"], coded["gate_up_group_size"]) == (4, 4, 2048, 128)
    odd = realistic_point(contract, {"bits": 3, "H": 64, "I": 64}, torch.device("cuda"))
    assert (odd["bits"], odd["H"], odd["I"]) == (3, 64, 64)
    with pytest.raises(ContractError, match="K <= E"):
        realistic_point(contract, {"K": 9, "E": 8}, CPU)


def test_cutting_a_point_down_may_break_a_rule() -> None:
    contract = OPS["paged_decode"].contract
    assert cut_axes(contract, contract.benchmarks["B=64,context=8192"], CPU_SIZE) is None  # 64 x 512 pages of 1024
    only_batch = cut_axes(OPS["rms_norm"].contract, {"T": 4096, "H": 2560}, 1024, only_batch=True)
    assert only_batch is not None
    assert (only_batch["T"], only_batch["H"]) == (1024, 2560)
