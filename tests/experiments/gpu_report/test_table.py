"""From facts to the table: marks met and missed, rows that are worth nothing, and cells without a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands.results_table import (
    BEGIN,
    END,
    ENGINE_BEGIN,
    RESULTS,
    make_section,
    replaced,
    updated,
)
from experiments.document import ExperimentError
from experiments.gpu_report.figures import MarkRow, mark_rows
from experiments.gpu_report.marks import MARKS, Mark
from experiments.gpu_report.steps import new_step
from experiments.gpu_report.table import marks_table, report
from experiments.runs.rows import Row
from tests.experiments.gpu_report.recorded import describe, time_step, timed
from tests.experiments.runs.folders import write_run

ROOT = Path(__file__).parents[3]

DECODE = Mark("paged_decode", "B=64,context=8192", "read", 0.9, ("flashinfer", "sdpa_flash"))
QUANTIZED = Mark("dequant_gemm", "M=1,N=8192,K=8192,g=128", "peer", 3.0, ("cublas_16bit",), ideal=3.85)
RATES = new_step("device", 1.0).row(
    "r1", "rates", copy_bytes_per_s=4.3e12, read_bytes_per_s=4.4e12, matmul_flops_per_s=7.9e14
)
H200 = describe("NVIDIA H200")


def timing(mark: Mark, variant: str, us: float, **more: Any) -> list[Row]:
    return timed(time_step(mark.op, variant, mark.point), us, **more)


def refused(mark: Mark, variant: str, reason: str) -> list[Row]:
    return [time_step(mark.op, variant, mark.point).row("r1", "kernels", "failed", reason, point=mark.point)]


def drawn(op: str, variant: str, runs: int, right: int) -> list[Row]:
    figures: dict[str, Any] = {"test": "drawn cases", "point": "D=128", "runs": runs, "runs_right": right}
    step = new_step("check", 1.0, op, variant, "0")
    if right < runs:
        return [step.row("r1", "hardware", "wrong", "it is wrong", **figures)]
    return [step.row("r1", "hardware", **figures)]


def row(mark: Mark, *found: list[Row]) -> MarkRow:
    (one,) = mark_rows([RATES, *(row for rows in found for row in rows)], [mark])
    return one


def test_a_mark_is_met_by_the_fastest_of_ours_beside_the_fastest_peer() -> None:
    found = row(
        DECODE,
        timing(DECODE, "one_pass", 600.0),
        timing(DECODE, "split_kv", 500.0),
        timing(DECODE, "torch", 10.0),
        timing(DECODE, "flashinfer", 520.0),
        timing(DECODE, "sdpa_flash", 700.0),
    )
    assert found.verdict == "met"
    assert found.ours is not None
    assert found.peer is not None
    assert (found.ours.variant, found.peer.variant) == ("split_kv", "flashinfer")
    assert found.reached == pytest.approx(2.0e9 / 500.0 * 1e6 / 4.4e12)
    assert found.ratio == pytest.approx(520 / 500)
    assert row(DECODE, timing(DECODE, "split_kv", 510.0)).verdict == "missed"  # 89%, and a peer is not needed for it


def test_what_has_no_run_is_not_measured_and_says_why() -> None:
    assert row(DECODE).verdict == "not measured"
    assert row(DECODE, refused(DECODE, "split_kv", "out of memory")).note == "split_kv: out of memory"
    assert row(DECODE, refused(DECODE, "flashinfer", "not installed")).note == ""
    alone = row(QUANTIZED, timing(QUANTIZED, "gemv", 10.0))
    assert alone.ours is not None
    assert (alone.verdict, alone.ours.median_us) == ("not measured", 10.0)
    assert "cublas_16bit" in alone.note


def test_a_variant_that_is_wrong_on_the_device_has_no_figure() -> None:
    wrong = drawn("paged_decode", "split_kv", 25, 24)
    found = row(DECODE, wrong, timing(DECODE, "split_kv", 500.0), timing(DECODE, "one_pass", 600.0))
    assert found.ours is not None
    assert found.ours.variant == "one_pass"
    assert "wrong on this device" in row(DECODE, wrong, timing(DECODE, "split_kv", 500.0)).note
    right = drawn("paged_decode", "split_kv", 25, 25)
    assert row(DECODE, right, timing(DECODE, "split_kv", 500.0)).verdict == "met"


@pytest.mark.parametrize(
    ("ours_us", "peer_us", "verdict", "said"),
    [
        (10.0, 31.0, "met", ""),
        (10.0, 29.0, "missed", ""),
        (10.0, 39.0, "void", "3.90x is above the ideal of 3.85x"),
    ],
)
def test_a_ratio_above_the_ideal_is_void(ours_us: float, peer_us: float, verdict: str, said: str) -> None:
    found = row(QUANTIZED, timing(QUANTIZED, "gemv", ours_us), timing(QUANTIZED, "cublas_16bit", peer_us))
    assert (found.verdict, found.note) == (verdict, said)


def test_more_than_the_card_was_measured_at_is_void() -> None:
    found = row(DECODE, timing(DECODE, "split_kv", 400.0))
    assert found.verdict == "void"
    assert "114% of what the card was measured at" in found.note


def test_a_peer_far_under_its_published_figure_voids_the_row() -> None:
    mark = Mark("dequant_gemm", QUANTIZED.point, "peer", 1.0, ("gemlite",))
    ours, dense = timing(mark, "gemv", 10.0), timing(mark, "cublas_16bit", 30.0)
    assert row(mark, ours, dense, timing(mark, "gemlite", 17.0)).verdict == "met"  # 1.76 times cuBLAS
    found = row(mark, ours, dense, timing(mark, "gemlite", 28.0))
    assert found.verdict == "void"
    assert "gemlite reaches 1.07 here where 1.78 was published" in found.note


def test_a_share_of_the_matmul_rate_counts_what_is_computed() -> None:
    mark = Mark("moe_mlp", "T=4096,Qwen3-30B-A3B", "matmul", 0.5, ("torch_grouped_mm",))
    assert mark.text == ">= 50% of the matmul rate"
    found = row(mark, timing(mark, "persistent", 1000.0, flops=4 * 10**11))
    assert (found.verdict, found.reached) == ("met", pytest.approx(4e14 / 7.9e14))
    assert row(mark, timing(mark, "persistent", 1000.0, flops=3 * 10**11)).verdict == "missed"
    assert row(mark, timing(mark, "persistent", 1000.0, flops=9 * 10**11)).verdict == "void"
    (unknown,) = mark_rows(timing(mark, "persistent", 1000.0), [mark])
    assert (unknown.verdict, unknown.note) == ("not measured", "no matmul rate was measured")
    assert "| >= 50% of the matmul rate | 51% |" in marks_table([found])


def test_peers_may_be_timed_at_another_point() -> None:
    dense = Mark("moe_mlp", "T=1", "peer", 1.0, ("gemv_per_pair",))
    mark = Mark("moe_mlp", "T=1,W4", "peer", 2.5, ("gemv_per_pair",), ideal=3.88, over="T=1")
    assert mark.text == ">= 2.5x gemv_per_pair at T=1"
    assert mark.places == [("moe_mlp", "T=1,W4"), ("moe_mlp", "T=1")]
    ours = timing(mark, "dequant_gemv", 10.0)
    assert row(mark, ours, timing(mark, "gemv_per_pair", 30.0)).note == "no time of gemv_per_pair here"
    found = row(mark, ours, timing(dense, "gemv_per_pair", 26.0), timing(dense, "padded_tiles", 9.0))
    assert (found.verdict, found.ratio) == ("met", 2.6)
    assert row(mark, ours, timing(dense, "gemv_per_pair", 39.0)).note == "3.90x is above the ideal of 3.88x"


def test_a_time_of_two_ops_is_the_sum_of_their_fastest() -> None:
    mark = Mark("route", "T=256,K=8,E=128", "time", 10, ("torch",), plus="sort_by_expert")
    other = Mark("sort_by_expert", mark.point, "time", 10)
    assert mark.text == "<= 10 us, sort_by_expert's included"
    assert mark.places == [("route", mark.point), ("sort_by_expert", mark.point)]
    ours = timing(mark, "rows_per_program", 4.0)
    assert row(mark, ours).note == "no time of sort_by_expert here"
    sorts = [*timing(other, "histogram", 5.5), *timing(other, "one_program", 9.0), *timing(other, "torch", 1.0)]
    found = row(mark, ours, sorts)
    assert (found.verdict, found.reached) == ("met", 9.5)
    assert row(mark, ours, sorts, drawn("sort_by_expert", "histogram", 25, 24)).verdict == "missed"


def test_figures_of_two_timers_are_not_compared() -> None:
    eager = timing(QUANTIZED, "cublas_16bit", 31.0, timer="cuda events, cold L2")
    found = row(QUANTIZED, timing(QUANTIZED, "gemv", 10.0), eager)
    assert found.verdict == "void"
    assert "timed differently" in found.note


def test_a_peer_under_its_published_share_of_the_bandwidth_voids_the_row() -> None:
    mark = Mark("add_rms_norm", "T=4096,H=2560", "peer", 1.0, ("liger",))
    ours = timing(mark, "row_per_program", 10.0)
    assert row(mark, ours, timing(mark, "liger", 12.0)).verdict == "met"
    found = row(mark, ours, timing(mark, "liger", 12.0, roofline_fraction=0.5))
    assert (found.verdict, "liger reaches 0.50 here where 0.87 was published" in found.note) == ("void", True)
    unknown = {"roofline_fraction": None, "roofline_bound": None, "roofline_reason": "no peaks are known"}
    assert row(mark, ours, timing(mark, "liger", 12.0, **unknown)).verdict == "met"


def test_the_report_has_every_part_and_what_was_not_done() -> None:
    engine, rerun = new_step("engine", 1.0, "Qwen3-4B"), new_step("rerun", 1.0, "swiglu", "fused", "0")
    work: dict[str, Any] = {"workload": "decode B=1, 1024 tokens", "peer": None, "iqr_us": 1.0}
    ours = [
        engine.row("r1", "forward", **work, settings={"model": "Qwen3-4B", "cuda_graphs": graphs}, median_us=us)
        for graphs, us in ((False, 4000.0), (True, 2000.0))
    ]
    theirs = {**work, "peer": "transformers", "settings": {"model": "Qwen3-4B"}}
    again: dict[str, Any] = {"test": "rerun", "point": "T=1", "runs": 1000, "runs_right": None}
    absent = "compute-sanitizer is not installed"
    rows = [
        RATES,
        *timing(DECODE, "split_kv", 500.0),
        *ours,
        engine.row("r1", "forward", **theirs, median_us=20000.0),
        *drawn("swiglu", "fused", 25, 25),
        rerun.row("r1", "hardware", **again),
        rerun.row("r1", "hardware", "unsupported", absent, test="sanitizer", point="4 drawn cases"),
        new_step("stress", 1.0, point="x").row("r1", "report", "failed", "killed by SIGSEGV"),
    ]
    text = report(rows, H200)
    assert "NVIDIA H200, sm_90, 132 multiprocessors; cuda 12.8, torch 2.11." in text
    assert "copy 4.30 TB/s" in text
    assert "| paged_decode B=64,context=8192 | >= 90% of read bandwidth | 91% | 500.0 (0.1), split_kv | 80% |" in text
    assert "| Qwen3-4B | decode B=1, 1024 tokens | 4,000 | 2,000 | 20,000 | 10.00 |" in text
    assert "| swiglu.fused | drawn cases, D=128 | 25 of 25 | ok |" in text
    assert "| swiglu.fused | rerun | 1000 | ok |" in text
    assert f"| swiglu.fused | sanitizer | 0 | not run: {absent} |" in text
    assert "- stress x: killed by SIGSEGV" in text
    assert "## Not done" not in report(rows[:-1], H200)
    assert "No GPU has run this yet." in report((), {})


def test_a_step_of_a_model_that_was_not_timed_says_why() -> None:
    engine = new_step("engine", 1.0, "Qwen3-4B")
    about: dict[str, Any] = {"settings": {"model": "Qwen3-4B", "cuda_graphs": True}, "workload": "w", "peer": None}
    text = report([engine.row("r1", "forward", "failed", "a capture was refused", **about)], H200)
    assert (
        "| Qwen3-4B | w | not measured | not measured (a capture was refused) | not measured | not measured |" in text
    )


def test_a_mark_in_microseconds_is_met_below_it() -> None:
    mark = Mark("sample", "B=256,V=151936,top_p", "time", 60, ("torch",))
    for median, verdict in ((59.9, "met"), (60.0, "met"), (60.1, "missed")):
        found = row(mark, timing(mark, "candidates", median), timing(mark, "torch", 600.0))
        assert (found.verdict, found.reached) == (verdict, median)
        text = marks_table([found])
        assert f"| <= 60 us | {median} us | {median}" in text
        assert "| torch 600.0 |" in text


def test_a_variant_is_judged_beside_a_plainer_one_of_ours() -> None:
    mark = Mark("cascade_decode", "B=32,prefix=4096,own=256", "peer", 1.5, ("unshared",))
    for median, verdict in ((100.0, "met"), (190.0, "missed"), (900.0, "missed")):
        found = row(mark, timing(mark, "one_launch", median), timing(mark, "unshared", 200.0))
        assert (found.verdict, found.reached) == (verdict, max(200.0 / median, 1.0))


def test_every_cell_of_an_empty_table_says_so() -> None:
    lines = marks_table(mark_rows(())).splitlines()[2:]
    assert len(lines) == len(MARKS)
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2:] == ["not measured"] * 6


def test_results_make_the_pages_table(tmp_path: Path) -> None:
    assert "No GPU has run this code yet" in make_section(tmp_path)
    rows = [RATES, *timing(DECODE, "split_kv", 500.0)]
    lines = [json.loads(row.model_copy(update={"task_rows": 1 + (row is not RATES)}).as_json()) for row in rows]
    write_run(tmp_path / "NVIDIA_H200", lines, environment=H200, name="gpu-report")
    section = make_section(tmp_path)
    assert section.startswith("NVIDIA H200 (`experiments/results/NVIDIA_H200`):")
    assert "91%" in section
    assert "not measured" in section


def test_the_pages_tables_are_what_the_command_makes() -> None:
    file = ROOT / "docs" / "speed.md"
    page = file.read_text(encoding="utf-8")
    assert replaced(page, make_section(RESULTS), file) == page
    assert ENGINE_BEGIN in page
    assert updated(page, RESULTS, file) == page


def test_the_engines_table_is_written_where_a_file_has_markers_for_it(tmp_path: Path) -> None:
    marked = f"a\n{BEGIN}\nold\n{END}\nb\n{ENGINE_BEGIN}\nold\n{END}\nc\n"
    text = updated(marked, tmp_path, tmp_path / "x.md")
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("c\n")
    assert "| nano-vllm's benchmark, Qwen3-0.6B | >= 25,000 tokens/s | not measured | not measured | `tk run " in text
    assert updated(text, tmp_path, tmp_path / "x.md") == text


def test_a_file_without_the_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError):
        replaced("nothing here", "", tmp_path / "x.md")
    (tmp_path / "x.md").write_text(f"a\n{BEGIN}\nold\n{END}\nb\n")
    done = CliRunner().invoke(app, ["results-table", "--update", str(tmp_path / "x.md")])
    assert done.exit_code == 0
    text = (tmp_path / "x.md").read_text()
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")
    assert "paged_decode" in text
