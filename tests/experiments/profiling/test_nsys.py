"""Exports of Nsight Systems, read by range: what was launched there, and what was captured there and replayed."""

import sqlite3
from pathlib import Path

import pytest

from experiments.document import ExperimentError
from experiments.profiling.nsys_export import read_export
from experiments.profiling.nsys_stats import read_stats
from experiments.profiling.range_table import category_of, range_table
from experiments.stages.steps import range_columns
from tests.experiments.profiling.nsys_files import GLOBAL_TID, NsysFile, two_steps
from tkernels.spans import Breakdown

HEADER = (
    "Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns),Proj Med (ns),Proj Min (ns),"
    "Proj Max (ns),Proj StdDev (ns),Total GPU Ops,Avg GPU Ops,Avg Range Lvl,Avg Num Child\n"
)


def by_clock(found: Breakdown, clock: str) -> dict[str, tuple[int, float, float | None]]:
    """range -> (calls, total us, own us)."""
    return {
        total.name: (total.calls, total.total_ns / 1000, None if total.self_ns is None else total.self_ns / 1000)
        for total in found.totals
        if total.clock == clock
    }


def test_work_is_in_the_range_of_its_launch_or_of_its_capture(tmp_path: Path) -> None:
    found = read_export(two_steps(tmp_path / "report.sqlite"))
    assert (found.steps, found.step_ns) == (2, 150_000)
    assert by_clock(found, "device") == {
        "forward": (2, 24, 0),
        "layer 0": (2, 17, 0),
        "paged_prefill.packed_gqa": (1, 10, 10),
        "lm_head": (1, 4, 0),
        "matmul.persistent": (1, 4, 4),
        "layer 1": (1, 3, 0),
        "paged_decode.one_pass": (2, 10, 10),
        "prepare": (1, 2, 2),
        "device idle": (2, 124, 124),
    }
    assert by_clock(found, "host") == {
        "step": (2, 150, 31),
        "schedule": (1, 5, 5),
        "prepare": (1, 4, 4),
        "forward": (2, 110, 80),
        "layer 0": (1, 20, 10),
        "paged_prefill.packed_gqa": (1, 10, 10),
        "lm_head": (1, 10, 2),
        "matmul.persistent": (1, 8, 8),
    }
    for clock in ("host", "device"):
        assert sum(own or 0 for _, _, own in by_clock(found, clock).values()) == 150
    assert {total.category for total in found.totals} == {"step", "phase", "layer", "part", "op", "gap"}


def test_without_graphs_there_are_no_tables_of_graphs(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "report.sqlite")
    file.range("step", 0, 100)
    file.range("swiglu.fused", 10, 20)
    file.kernel(12, 30, 70)
    file.drop("CUDA_GRAPH_NODE_EVENTS")
    file.drop("CUPTI_ACTIVITY_KIND_MEMCPY")
    file.db.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN graphNodeId")
    found = read_export(file.close())  # no range is called steady: all steps count
    assert by_clock(found, "device") == {"swiglu.fused": (1, 0.04, 0.04), "device idle": (1, 0.06, 0.06)}


def test_what_the_exporter_does_not_know_is_left_out(tmp_path: Path) -> None:
    """An activity that had not ended, a range of no thread or name, a call of no thread, a node of no time."""
    whole, file = read_export(two_steps(tmp_path / "whole.sqlite")), two_steps(tmp_path / "report.sqlite")
    unknown = (
        "NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES (101, 102, 59, 'step', NULL, 1)",
        "NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES (101, 102, 59, NULL, {tid}, 1)",
        "NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES (101, 'late', 59, 'step', {tid}, 1)",
        "CUPTI_ACTIVITY_KIND_RUNTIME VALUES (101, 102, 0, NULL, 7, 1, 0, NULL)",
        "CUPTI_ACTIVITY_KIND_KERNEL VALUES (101, 102, 0, 1, 7, NULL, NULL, 1, 1, NULL)",
        "CUDA_GRAPH_NODE_EVENTS VALUES ('', 0, 0, {tid}, 1, 77, NULL)",
    )
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE loose AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
        db.execute("INSERT INTO loose SELECT * FROM loose LIMIT 1")
        db.execute("UPDATE loose SET end = NULL WHERE rowid = (SELECT max(rowid) FROM loose)")
        db.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        db.execute("ALTER TABLE loose RENAME TO CUPTI_ACTIVITY_KIND_KERNEL")
        for row in unknown:
            db.execute(f"INSERT INTO {row.format(tid=GLOBAL_TID)}")
    assert read_export(file) == whole


def test_a_domain_whose_making_was_not_collected_is_known_by_its_ranges(tmp_path: Path) -> None:
    """The collection began after the process had made its domain."""
    file = two_steps(tmp_path / "report.sqlite")
    with sqlite3.connect(file) as db:
        db.execute("DELETE FROM NVTX_EVENTS WHERE eventType = 75 AND text = 'tkernels'")
    assert read_export(file).steps == 2


def test_a_file_that_is_none_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    def refused(file: Path) -> str:
        with pytest.raises(ExperimentError) as caught:
            read_export(file)
        return " ".join(caught.value.problems)

    assert "no such file" in refused(tmp_path / "nowhere.sqlite")
    (tmp_path / "text.sqlite").write_text("not a database at all, but long enough to be looked at" * 20)
    assert "is no export of Nsight Systems: file is not a database" in refused(tmp_path / "text.sqlite")
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE people (name TEXT)")
    assert "has no NVTX ranges: there is no table NVTX_EVENTS" in refused(tmp_path / "other.sqlite")
    foreign = NsysFile(tmp_path / "foreign.sqlite", domain="vllm")
    foreign.range("step", 0, 10)
    assert "no ranges in the domain 'tkernels'; its domains: CCCL, vllm" in refused(foreign.close())
    for name, change, problem in (
        ("nameless", "DELETE FROM StringIds WHERE value = 'forward'", "ranges are missing in its table StringIds"),
        ("bytes", "UPDATE StringIds SET value = x'ff00' WHERE value = 'step'", "are missing in its table StringIds"),
        ("threads", "UPDATE NVTX_EVENTS SET globalTid = NULL WHERE eventType = 59", "no range has its thread and its"),
    ):
        file = two_steps(tmp_path / f"{name}.sqlite")
        with sqlite3.connect(file) as db:
            db.execute(change)
        assert problem in refused(file)


def test_nsys_stats_csv_gives_host_and_projected_times(tmp_path: Path) -> None:
    file = tmp_path / "stats.csv"
    file.write_text(
        "Processing [report.sqlite] with [nvtx_gpu_proj_sum.py]...\n\n" + HEADER
        + "tkernels:steady,PushPop,9,9,1,9,9,9,9,0,9,9,0,2\n"
        + "tkernels:step,PushPop,140000,150000,2,1,1,1,1,0,9,9,1,3\n"
        + "tkernels:paged_decode.one_pass,PushPop,10000,3000,4,1,1,1,1,0,4,1,3,0\n"
        + "tkernels:schedule,PushPop,0,5000,2,1,1,1,1,0,0,0,2,0\n"
        + ":forward,PushPop,7,7,7,1,1,1,1,0,7,1,0,0\n"
    )  # fmt: skip
    found = read_stats(file)
    assert (found.steps, found.step_ns) == (2, 150_000)
    assert by_clock(found, "device") == {"paged_decode.one_pass": (4, 10, None)}
    assert by_clock(found, "host") == {
        "step": (2, 150, None), "paged_decode.one_pass": (4, 3, None), "schedule": (2, 5, None),
    }  # fmt: skip
    assert [row["share"] for row in range_columns(found) if row["clock"] == "device"] == [10 / 150]
    host_only = tmp_path / "host.csv"
    host_only.write_text(
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range\n"
        "60.0,90000,3,1,1,1,1,0,PushPop,tkernels:step\n40.0,60000,6,1,1,1,1,0,PushPop,tkernels:forward\n\n"
        "Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...\nTime (%),Name\n1,tkernels:step\n"
    )
    assert by_clock(read_stats(host_only), "host") == {"step": (3, 90, None), "forward": (6, 60, None)}
    assert by_clock(read_stats(host_only), "device") == {}
    marked = tmp_path / "marked.csv"
    marked.write_text(HEADER + file.read_text().partition(HEADER)[2], encoding="utf-8-sig")  # as Windows writes it
    assert read_stats(marked) == found
    in_us = tmp_path / "us.csv"
    in_us.write_text(file.read_text().replace("(ns)", "(us)"))
    assert read_stats(in_us).step_ns == 150_000_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Time (%),Total Time (ns),Instances,Name\n", "has no table of NVTX ranges"),
        ("Range,Style\ntkernels:step,PushPop\n", "has no table of NVTX ranges"),
        (HEADER, "no ranges in the domain 'tkernels'"),
        (HEADER + ":step,PushPop,1,1,1,1,1,1,1,0,1,1,0,0\n", "no ranges in the domain 'tkernels'"),
        (HEADER + "tkernels:step,PushPop,1,,2,1,1,1,1,0,1,1,0,0\n", "line 2: '' is no figure"),
        (HEADER + "tkernels:step,PushPop,N/A,1,2,1,1,1,1,0,1,1,0,0\n", "line 2: 'N/A' is no figure"),
        (HEADER + 'tkernels:step,PushPop,1,1,"1,234",1,1,1,1,0,1,1,0,0\n', "line 2: '1,234' is no figure"),
        (HEADER + "tkernels:step,PushPop,1,inf,2,1,1,1,1,0,1,1,0,0\n", "line 2: 'inf' is no figure"),
        (HEADER + "tkernels:step,PushPop,1,1,2\ntkernels:forward,PushPop,1,1\n", "line 3: has 4 cells of at least 5"),
        (HEADER + "x" * 200_000, "line 2: field larger than field limit"),
    ],
)
def test_a_csv_of_something_else_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(ExperimentError) as caught:
        read_stats(tmp_path / "other.csv")
    assert problem in " ".join(caught.value.problems)


def test_the_table_has_sections_in_order_and_the_device_leads(tmp_path: Path) -> None:
    table = range_table(read_export(two_steps(tmp_path / "report.sqlite")), "report")
    assert table.title == "report: 2 steps of 75.0 us"
    headings = [line for line in table.lines if isinstance(line, str)]
    assert headings == ["Step", "Phases", "Layers", "Parts of the model", "Ops", "Gaps"]
    lines = [[cell.text for cell in line] for line in table.lines if not isinstance(line, str)]
    assert ["layer 0", "1", "10.0", "8.5", "0.0", "11.3%"] in lines
    assert ["paged_decode.one_pass", "1", "-", "5.0", "5.0", "6.7%"] in lines
    assert ["schedule", "0.5", "2.5", "-", "2.5", "3.3%"] in lines
    assert [line[0] for line in lines][1:4] == ["schedule", "prepare", "forward"]


def test_a_name_alone_tells_its_category() -> None:
    names = ("step", "commit", "layer 31", "lm_head", "q_proj+k_proj+v_proj", "dequant_gemm.split_k[BLOCK_K=64]",
             "moe_mlp sort")  # fmt: skip
    assert [category_of(name) for name in names] == ["step", "phase", "layer", "part", "part", "op", "section"]
