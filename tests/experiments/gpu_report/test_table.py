"""From facts to the table: marks met and missed, rows that are worth nothing, and cells without a run."""

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
from experiments.gpu_report.figures import Row, rows_of
from experiments.gpu_report.journal import Journal
from experiments.gpu_report.marks import MARKS, Mark
from experiments.gpu_report.table import empty_rows, markdown, report

ROOT = Path(__file__).parents[3]

DECODE = Mark("paged_decode", "B=64,context=8192", "read", 0.9, ("flashinfer", "sdpa_flash"))
QUANTIZED = Mark("dequant_gemm", "M=1,N=8192,K=8192,g=128", "peer", 3.0, ("cublas_16bit",), ideal=3.85)
GRAPH = "cuda graph, cold L2"


def fact(step: str, **fields: Any) -> dict[str, Any]:
    return {"step": step, "event": "fact", "at": 0.0, **fields}


DEVICE = [
    fact("device", kind="device", name="NVIDIA H200", arch="sm_90", multiprocessors=132, versions={"torch": "2.11"}),
    fact("device", kind="rates", copy_bytes_per_s=4.3e12, read_bytes_per_s=4.4e12, matmul_flops_per_s=7.9e14),
]


def timing(
    mark: Mark, variant: str, us: float, side: str = "ours", moved: float = 2.0e9, **more: Any
) -> dict[str, Any]:
    figures = {"median_us": us, "iqr_us": 0.1, "bytes_per_s": moved / us * 1e6, "timer": GRAPH, "reason": None}
    where = {"op": mark.op, "point": mark.point, "variant": variant, "side": side, "roofline_fraction": 0.8}
    return fact(f"time {variant}", kind="timing", **{**figures, **where, **more})


def row(mark: Mark, *lines: dict[str, Any]) -> Row:
    (found,) = rows_of([*DEVICE, *lines], [mark])
    return found


def test_a_mark_is_met_by_the_fastest_of_ours_beside_the_fastest_peer() -> None:
    found = row(
        DECODE,
        timing(DECODE, "one_pass", 600.0),
        timing(DECODE, "split_kv", 500.0),
        timing(DECODE, "torch", 10.0, "torch"),
        timing(DECODE, "flashinfer", 520.0, "peer"),
        timing(DECODE, "sdpa_flash", 700.0, "peer"),
    )
    assert (found.verdict, found.variant, found.peer) == ("met", "split_kv", "flashinfer")
    assert found.reached == pytest.approx(2.0e9 / 500.0 * 1e6 / 4.4e12)
    assert found.ratio == pytest.approx(520 / 500)
    assert row(DECODE, timing(DECODE, "split_kv", 510.0)).verdict == "missed"  # 89%, and a peer is not needed for it


def test_what_has_no_run_is_not_measured_and_says_why() -> None:
    assert row(DECODE).verdict == "not measured"
    refused = timing(DECODE, "split_kv", 1.0, median_us=None, reason="out of memory")
    assert row(DECODE, refused).note == "split_kv: out of memory"
    alone = row(QUANTIZED, timing(QUANTIZED, "gemv", 10.0))
    assert (alone.verdict, alone.microseconds) == ("not measured", 10.0)
    assert "cublas_16bit" in alone.note


def test_a_variant_that_is_wrong_on_the_device_has_no_figure() -> None:
    subject = {"op": "paged_decode", "variant": "split_kv", "signature": "D=128"}
    wrong = fact("check", kind="correctness", **subject, failures=["split_kv: wrong"])
    found = row(DECODE, wrong, timing(DECODE, "split_kv", 500.0), timing(DECODE, "one_pass", 600.0))
    assert found.variant == "one_pass"
    assert "wrong on this device" in row(DECODE, wrong, timing(DECODE, "split_kv", 500.0)).note
    right = fact("check", kind="correctness", **subject, failures=[])  # tried again
    assert row(DECODE, wrong, right, timing(DECODE, "split_kv", 500.0)).variant == "split_kv"


def test_what_was_found_of_old_code_is_no_fact_of_the_new() -> None:
    subject = {"kind": "correctness", "op": "paged_decode", "variant": "split_kv", "signature": "D=128"}
    wrong = fact("check paged_decode.split_kv@old", **subject, failures=["split_kv: wrong"])
    right = fact("check paged_decode.split_kv@new", **subject, failures=[])
    timed = timing(DECODE, "split_kv", 500.0)
    old, new = ({**timed, "step": f"time paged_decode.split_kv@{code} {DECODE.point}"} for code in ("old", "new"))
    assert row(DECODE, wrong, right, new).verdict == "met"
    assert row(DECODE, old, right).verdict == "not measured"


@pytest.mark.parametrize(
    ("ours_us", "peer_us", "verdict", "said"),
    [
        (10.0, 31.0, "met", ""),
        (10.0, 29.0, "missed", ""),
        (10.0, 39.0, "void", "3.90x is above the ideal of 3.85x"),
    ],
)
def test_a_ratio_above_the_ideal_is_void(ours_us: float, peer_us: float, verdict: str, said: str) -> None:
    found = row(QUANTIZED, timing(QUANTIZED, "gemv", ours_us), timing(QUANTIZED, "cublas_16bit", peer_us, "peer"))
    assert (found.verdict, found.note) == (verdict, said)


def test_more_than_the_card_was_measured_at_is_void() -> None:
    found = row(DECODE, timing(DECODE, "split_kv", 400.0))
    assert found.verdict == "void"
    assert "114% of what the card was measured at" in found.note


def test_a_peer_far_under_its_published_figure_voids_the_row() -> None:
    mark = Mark("dequant_gemm", QUANTIZED.point, "peer", 1.0, ("gemlite",))
    ours, dense = timing(mark, "gemv", 10.0), timing(mark, "cublas_16bit", 30.0, "peer")
    assert row(mark, ours, dense, timing(mark, "gemlite", 17.0, "peer")).verdict == "met"  # 1.76 times cuBLAS
    found = row(mark, ours, dense, timing(mark, "gemlite", 28.0, "peer"))
    assert found.verdict == "void"
    assert "gemlite reaches 1.07 here where 1.78 was published" in found.note


def test_figures_of_two_timers_are_not_compared() -> None:
    eager = timing(QUANTIZED, "cublas_16bit", 31.0, "peer", timer="cuda events, cold L2")
    found = row(QUANTIZED, timing(QUANTIZED, "gemv", 10.0), eager)
    assert found.verdict == "void"
    assert "timed differently" in found.note


def test_the_report_has_every_part_and_what_was_not_done(tmp_path: Path) -> None:
    engine = {"kind": "engine", "model": "Qwen3-4B", "work": "decode B=1, 1024 tokens"}
    checked = {"op": "swiglu", "variant": "fused", "signature": "I=64", "cases": 25, "ok": 25, "failures": []}
    lines = [
        *DEVICE,
        timing(DECODE, "split_kv", 500.0),
        fact("engine", **engine, ours_us=4000.0, ours_graph_us=2000.0, transformers_us=20000.0),
        fact("check", kind="correctness", **checked),
        fact("rerun", kind="rerun", op="swiglu", variant="fused", runs=1000, verdict="ok"),
        {"step": "stress x", "event": "begin", "at": 0.0},
        {"step": "stress x", "event": "end", "at": 1.0, "status": "failed", "reason": "its process died (exit -11)"},
        {"step": "check y", "event": "begin", "at": 2.0},
    ]
    text = report(lines)
    assert "NVIDIA H200, sm_90" in text
    assert "copy 4.30 TB/s" in text
    assert "| paged_decode B=64,context=8192 | >= 90% of read bandwidth | 91% | 500.0 (0.1), split_kv | 80% |" in text
    assert "| Qwen3-4B | decode B=1, 1024 tokens | 4,000 | 2,000 | 20,000 | 10.00 |" in text
    assert "| swiglu.fused | rerun | 1000 | ok |" in text
    assert "- stress x: its process died (exit -11)" in text
    assert "- check y: begun and not ended" in text


def test_every_cell_of_an_empty_table_says_so() -> None:
    lines = markdown(empty_rows()).splitlines()[2:]
    assert len(lines) == len(MARKS)
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2:] == ["not measured"] * 6


def test_results_make_the_pages_table(tmp_path: Path) -> None:
    assert "No GPU has run this code yet" in make_section(tmp_path)
    (tmp_path / "NVIDIA_H200").mkdir()
    journal = Journal(tmp_path / "NVIDIA_H200")
    for line in (*DEVICE, timing(DECODE, "split_kv", 500.0)):
        journal.append(line["step"], "fact", **{k: v for k, v in line.items() if k not in ("step", "event", "at")})
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
