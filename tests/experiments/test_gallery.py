"""Every experiment of the gallery at reduced size: what its rows must hold for its question to have an answer."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import experiments
from experiments.document import read_document
from experiments.planning.layout import lay_out
from experiments.planning.models import plan_model
from experiments.planning.plan import make_sweep
from experiments.planning.points import points_of
from experiments.planning.requests import requests_of
from experiments.reporting.modelled import modelled_winners
from experiments.reporting.question import question_of
from experiments.reporting.tables import tables_of
from experiments.runs.rows import Row
from experiments.sweep.runner import failures, run_experiment
from tests.experiments.in_process import InProcess
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.ops.paged_decode._attend import keys_per_block, launched_splits
from tmodel import kv_bytes_per_block

GALLERY = Path(experiments.__file__).parent / "gallery"
Rows = Sequence[Row]


def of_kind(rows: Rows, stage: str) -> Sequence[Any]:
    return [row for row in rows if row.stage == stage]


def checked(rows: Rows) -> dict[tuple[str, str], str]:
    """(variant, point) -> the status of its check."""
    return {(row.variant, row.point): row.status for row in of_kind(rows, "check")}


def by_setting(rows: Rows, key: str, figure: str) -> list[tuple[Any, Any]]:
    return [(row.settings[key], getattr(row, figure)) for row in of_kind(rows, "engine")]


def decode_by_context(rows: Rows) -> None:
    points = [f"B={sequences},N={pages}" for sequences in (1, 2) for pages in (4, 8)]
    variants = ["torch", "one_pass", "split_kv", "last_arriver"]
    assert checked(rows) == {(variant, point): "ok" for variant in variants for point in points}
    moved = {row.point: row.bytes_moved for row in of_kind(rows, "kernels")}
    assert moved["B=2,N=8"] > 3 * moved["B=1,N=4"]


def page_size(rows: Rows) -> None:
    waste = by_setting(rows, "block_size", "last_page_waste")
    assert [size for size, _ in waste] == [8, 64]
    assert waste[0][1] < waste[1][1]
    assert {row.axes["S"] for row in of_kind(rows, "kernels") if row.op == "paged_decode"} == {8, 64}
    assert all(row.tokens_equal for row in of_kind(rows, "parity"))


def split_count(rows: Rows) -> None:
    labels = ["one_pass", *(f"split_kv[num_splits={count}]" for count in (2, 4, 8))]
    assert checked(rows) == {(label, f"N={pages}"): "ok" for label in labels for pages in (2, 8)}


def fused_norm_rope_write(rows: Rows) -> None:
    found = checked([row for row in rows if row.op == "qk_norm_rope_scatter"])
    assert found == {(v, point): "ok" for v in ("composed", "head_tile") for point in ("decode", "prefill")}
    assert [row.arm["qk_norm_rope_scatter"] for row in of_kind(rows, "engine")] == ["composed", "head_tile"]
    assert [row.tokens_equal for row in of_kind(rows, "parity")] == [True]


def w4_by_tokens(rows: Rows) -> None:
    found = checked(rows)
    refused = {key for key, status in found.items() if status == "unsupported"}
    assert refused == {("gemv", "M=16"), ("gemlite", "M=1"), ("gemlite", "M=16")}
    assert {status for key, status in found.items() if key not in refused} == {"ok"}
    assert {variant for variant, _ in found} >= {"torch", "split_k", "tiled", "dequantize_then_matmul", "auto"}


def kv_dtype(rows: Rows) -> None:
    assert set(checked(rows).values()) == {"ok"}
    for op, wide, narrow in (
        ("paged_decode", "N=4,kv=bfloat16", "N=4,kv=float8_e4m3fn"),
        ("kv_scatter", "kv=bfloat16", "kv=float8_e4m3fn"),
    ):
        moved = {row.point: row.bytes_moved for row in of_kind(rows, "kernels") if row.op == op}
        assert moved[narrow] < 0.8 * moved[wide]
    scaled = {row.axes["kv"]: row.axes["k_scale"] for row in of_kind(rows, "check")}
    assert scaled == {"bfloat16": False, "float8_e4m3fn": True}


def prefix_cache_on_a_trace(rows: Rows) -> None:
    engines = of_kind(rows, "engine")
    hits = {tuple(row.settings[key] for key in ("prefix_cache", "kv_cache_bytes")): row.hit_tokens for row in engines}
    evicted = [row.evicted_blocks > 0 for row in engines if row.settings["prefix_cache"] != "none"]
    assert len(engines) == 6
    assert {hits["none", size] for size in (32768, 1048576)} == {0}
    assert hits["hash", 1048576] == hits["radix", 1048576] > 0
    assert evicted == [size == 32768 for _, size in hits if _ != "none"]
    assert all(row.tokens_equal for row in of_kind(rows, "parity"))


def chunk_size(rows: Rows) -> None:
    steps = by_setting(rows, "max_chunk_tokens", "steps")
    assert [size for size, _ in steps] == [8, 32]
    assert steps[0][1] > steps[1][1]
    for row in of_kind(rows, "engine"):
        assert row.tpot_s["p99"] > 0
        assert row.gap_s["p99"] > 0
    assert all(row.tokens_equal for row in of_kind(rows, "parity"))


def batch_invariance(rows: Rows) -> None:
    engines = of_kind(rows, "engine")
    assert [(row.arm["matmul"], row.peak_running) for row in engines] == [
        ("persistent", 1), ("persistent", 2), ("torch", 1), ("torch", 2)
    ]  # fmt: skip
    parities = of_kind(rows, "parity")
    assert len(parities) == 3
    assert all(row.tokens_equal and row.logprob_drift < 1e-4 for row in parities)


def sampling(rows: Rows) -> None:
    points = [f"asks={asks},inverse_cdf={policy}" for asks in ("nothing", "all") for policy in (False, True)]
    found = checked([row for row in rows if row.op == "sample"])
    variants = ("torch", "bisection", "candidates")
    assert found == {(variant, point): "ok" for variant in variants for point in (*points, "decode")}
    same = {(row.settings["sampling"], row.tokens_equal) for row in of_kind(rows, "parity")}
    assert same == {("gumbel", True), ("inverse_cdf", False)}


def shared_prefix(rows: Rows) -> None:
    points = [f"B={sharers},shared={pages},N={pages + own}" for pages in (1, 4) for sharers in (2, 4) for own in (1, 2)]
    variants = ("torch", "unshared", "one_launch")
    found = checked([row for row in rows if row.op == "cascade_decode"])
    assert found == {(variant, point): "ok" for variant in variants for point in (*points, "decode")}
    moved = {row.point: row.bytes_moved for row in of_kind(rows, "kernels") if row.op == "cascade_decode"}
    # Four sharers have the prefix once, and twice the keys of two alone.
    assert moved["B=4,shared=4,N=5"] < 1.5 * moved["B=2,shared=4,N=5"]
    assert all(row.tokens_equal and row.logprob_drift < 1e-4 for row in of_kind(rows, "parity"))


def modelled(rows: Rows) -> dict[tuple[str, str], float]:
    """(variant, point) -> its modelled time, at full sizes."""
    return {(row.variant, row.point): row.predicted_us for row in of_kind(rows, "foretold")}


MOE = ("composed", "gemv_per_pair", "padded_tiles", "persistent", "auto")


def best_by(times: dict[tuple[str, str], float]) -> dict[str, set[str]]:
    """Variant -> the points at which it is the fastest; what runs another's code is none."""
    found: dict[str, set[str]] = {}
    for point in dict.fromkeys(point for _, point in times):
        best = min((name for name in MOE if name != "auto"), key=lambda name: times[name, point])
        found.setdefault(best, set()).add(point)
    return found


def said_to_win(rows: Rows) -> dict[str, set[str]]:
    """Variant -> the points at which the page's sentence says that it is the fastest."""
    points = [*dict.fromkeys(row.point for row in of_kind(rows, "foretold"))]
    (said,) = modelled_winners(of_kind(rows, "foretold"))
    wins = said.partition("for moe_mlp the fastest is ")[2].partition(" (by less than a tenth")[0]
    found: dict[str, set[str]] = {}
    for name, where in (one.split(" at ") for one in wins.split("; ")):
        for run in where.split(", "):
            first, last = run.split(" to ")[0], run.split(" to ")[-1]
            found.setdefault(name, set()).update(points[points.index(first) : points.index(last) + 1])
    return found


def moe_by_tokens(rows: Rows) -> None:
    found, times = checked(rows), modelled(rows)
    assert found == {(variant, f"T={tokens}"): "ok" for variant in MOE for tokens in (1, 4, 16)}
    assert times.keys() == {(variant, f"T={tokens}") for variant in MOE for tokens in (64, 4096)}
    assert {row.axes["E"] for row in of_kind(rows, "foretold")} == {128}  # though eight run
    # A tile of 16 pairs reads its expert's weight 16 times at 4,096 tokens, once at 64.
    assert times["padded_tiles", "T=64"] < times["gemv_per_pair", "T=64"]
    assert times["persistent", "T=4096"] < times["padded_tiles", "T=4096"] < times["gemv_per_pair", "T=4096"]
    assert best_by(times) == said_to_win(rows)
    assert best_by(times)["persistent"] == {"T=4096"}


def moe_routing_skew(rows: Rows) -> None:
    routings = ("uniform", "zipf", "one_takes_all", "one_takes_none")
    found, times = checked(rows), modelled(rows)
    assert found == {(variant, f"routing={routing}"): "ok" for variant in MOE for routing in routings}
    assert times.keys() == found.keys()
    moved = {row.point: row.bytes_moved for row in of_kind(rows, "kernels") if row.variant == "padded_tiles"}
    assert moved["routing=one_takes_none"] <= moved["routing=uniform"]
    assert times["padded_tiles", "routing=zipf"] < times["padded_tiles", "routing=uniform"]  # fewer experts are met
    assert best_by(times) == said_to_win(rows)


FEW = "workload={kind: synthetic, num_requests: 2, input_len: 6, output_len: 2}"
SMALL = "S: 8, Hq: 2, Hkv: 1, D: 16, Dv: 16"
REDUCED: dict[Callable[[Rows], None], list[str]] = {
    decode_by_context: [f"shapes.paged_decode=[{{B: [1, 2], N: [4, 8], {SMALL}}}]"],
    page_size: ["scheduler.block_size=[8, 64]", "scheduler.kv_cache_bytes=1048576", FEW, "replicates=1"],
    split_count: [f"shapes.paged_decode=[{{B: 1, N: [2, 8], {SMALL}}}]"],
    fused_norm_rope_write: [FEW, "repeats=1"],
    w4_by_tokens: ["shapes.dequant_gemm.0.N=16", "shapes.dequant_gemm.0.K=64"],
    kv_dtype: [
        "shapes.paged_decode.0.N=[2, 4]", "shapes.paged_decode.0.B=1", "shapes.paged_decode.0.Hq=2",
        "shapes.kv_scatter.0.T=4", "shapes.kv_scatter.0.P=1",
    ],
    prefix_cache_on_a_trace: [
        "workload.block_tokens=4", "workload.num_requests=12", "scheduler.kv_cache_bytes=[32768, 1048576]",
        "scheduler.block_size=8", "scheduler.max_num_seqs=2", "replicates=1",
    ],
    chunk_size: [
        "scheduler.max_chunk_tokens=[8, 32]", "scheduler.max_num_batched_tokens=64", "replicates=1",
        "workload={kind: synthetic, num_requests: 2, input_len: 4, output_len: 12, "
        "late: {num_requests: 1, input_len: 64, output_len: 2, every: 4}}",
    ],
    batch_invariance: [FEW, "repeats=1"],
    shared_prefix: [
        *(f"shapes.cascade_decode.{i}.{size}" for i in (0, 1) for size in ("S=8", "D=16", "Dv=16")),
        "shapes.cascade_decode.0.shared=1", "shapes.cascade_decode.0.N=[2, 3]",
        "shapes.cascade_decode.1.shared=4", "shapes.cascade_decode.1.N=[5, 6]",
        "workload={kind: synthetic, num_requests: 2, input_len: 12, shared_prefix: 0.75, output_len: 2}",
    ],
    moe_by_tokens: [
        "full.shapes.moe_mlp=[{T: [64, 4096], K: 8, E: 128, H: 2048, I: 768, bits: 0, routing: uniform}]",
    ],
    moe_routing_skew: [
        "full.shapes.moe_mlp=[{T: 64, routing: [uniform, zipf, one_takes_all, one_takes_none], K: 8, E: 128, H: 2048, "
        "I: 768, bits: 0}]",
    ],
    sampling: [
        "shapes.sample.0.V=100", "replicates=1", "repeats=1",
        "workload={kind: synthetic, num_requests: 2, input_len: 6, output_len: 8, sampling: {temperature: 1.0}}",
    ],
}  # fmt: skip


def test_every_experiment_of_the_gallery_is_here() -> None:
    assert {file.stem for file in GALLERY.glob("*.yaml")} == {check.__name__ for check in REDUCED}


@pytest.mark.parametrize("check", REDUCED, ids=lambda check: check.__name__)
def test_an_experiment_answers_its_question(check: Callable[[Rows], None], checkpoint: Path, tmp_path: Path) -> None:
    file = GALLERY / f"{check.__name__}.yaml"
    document = read_document(file, ["device=cpu", *REDUCED[check]])
    if "model" in document.data:
        document = read_document(file, ["device=cpu", f"model={{path: {checkpoint}}}", *REDUCED[check]])
    folder = run_experiment(make_sweep(document), tmp_path / "run", [], Console(quiet=True), executor=InProcess())
    assert failures(folder) == []
    check(folder.rows)
    tables = tables_of(folder.rows).values()
    said = question_of(file.read_text(), "").text
    names = {column.name for table in tables for column in table.columns} | {"roofline"}  # which a CPU has not
    for text in said:
        for name in re.findall(r'"(.+?)"', text):
            assert any(table.title.startswith(name) for table in tables), f"there is no table {name!r}"
        for name in re.findall(r"`(.+?)`", text):
            assert name in names or name.startswith("tk "), f"there is no column {name!r}"


@pytest.mark.parametrize(
    ("full", "device"), [(False, INTERPRETER), (True, DeviceFacts("H100", "sm_90", 132))], ids=["reduced", "full"]
)
def test_every_split_count_is_a_launch_of_its_own(full: bool, device: DeviceFacts) -> None:
    (plan,) = make_sweep(read_document(GALLERY / "split_count.yaml", ["device=cpu"]), full=full).plans
    variant = plan.ops["paged_decode"].variants["split_kv"]
    asked = [dict(pick.pins) for pick in plan.picks["paged_decode"] if pick.variant == "split_kv"]
    for point in points_of(plan)["paged_decode"]:
        launched = []
        for pins in asked:
            config = variant.pinned(variant.default_config(device.arch), pins)
            most = variant.workspace(point.axes, config, device)["acc"].shape[2]
            block = keys_per_block(config["BLOCK_N"], int(point.axes["D"]), torch.bfloat16, False)
            context = int(point.axes["N"]) * int(point.axes["S"])
            launched.append(launched_splits(most, config["MIN_BLOCKS"] * block, block, context, None))
        assert launched == [pins["num_splits"] for pins in asked], point.name


@pytest.mark.parametrize("full", [False, True], ids=["small", "full"])
@pytest.mark.parametrize("file", sorted(GALLERY.glob("*.yaml")), ids=lambda file: file.stem)
def test_what_runs_at_once_fits_the_cache(file: Path, full: bool) -> None:
    """Or preemption, which nobody asked about, would be measured too."""
    document = read_document(file)
    document = document.full if full and document.full is not None else document
    for part in lay_out(document)[0].parts:
        for arm in part.arms if part.model is not None else ():
            config, page = plan_model(part.model, document.folder).config, arm.scheduler.get("block_size", 16)
            dtype = getattr(torch, part.dtype)
            pages = arm.scheduler["kv_cache_bytes"] // kv_bytes_per_block(config, page, dtype)
            for served in arm.workloads:
                requests = requests_of(served.workload, config.vocab_size)
                wanted = sorted(-(-(len(one.prompt) + one.params.max_tokens) // page) for one in requests)
                assert sum(wanted[-arm.scheduler["max_num_seqs"] :]) <= pages, (arm.title, served.title)


@pytest.mark.parametrize("file", sorted(GALLERY.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_says_what_it_asks_and_has_full_sizes(file: Path) -> None:
    text = file.read_text()
    for said in ("# Question: ", "# Read: ", "# Takes: "):
        assert said in text.partition("\nname: ")[0]
    document = read_document(file)
    assert document.full is not None
    assert sum(len(part.arms) for part in lay_out(document.full)[0].parts) >= 2
