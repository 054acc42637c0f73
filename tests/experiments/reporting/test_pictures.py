"""Pictures: their figures, their looks in both themes, and names that would break them."""

import csv
import io
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from experiments.reporting.curves import curves_of, varying_factors
from experiments.reporting.dots import MOST, dots_of, pictures_of
from experiments.reporting.drawing import MARKERS, format_tick, printable, series_style
from experiments.reporting.measured import Plot, engine_plots, kernel_plots, label_factors
from experiments.reporting.pictures import COLOURS, SERIES, Picture, for_file, for_page
from experiments.reporting.quantization import quantization_picture
from experiments.reporting.report import report_of
from experiments.reporting.roofline import NO_ROOFLINE, roofline_pictures
from experiments.reporting.steps import ranges_table, steps_of, steps_picture
from experiments.runs.reading import read_run
from experiments.runs.rows import Row
from tests.experiments.reporting.recorded import EVIL, everything, kernel, record, served

SVG = "{http://www.w3.org/2000/svg}"


def rows_of(*stages: str) -> list[Any]:
    return [row for row in everything() if row.stage in stages]


def curves(plots: list[Plot]) -> list[Picture]:
    return [picture for plot in plots for picture in curves_of(plot)[0]]


def dots(plots: list[Plot]) -> list[Picture]:
    return [picture for plot in plots if (picture := dots_of(plot)) is not None]


def kernel_curves(rows: list[Any], asked: dict[str, Any]) -> list[Picture]:
    return curves(kernel_plots(rows, asked, "some CPU"))


def engine_curves(rows: list[Any]) -> list[Picture]:
    return curves(engine_plots(rows, "", ""))


def engine_dots(rows: list[Any]) -> list[Picture]:
    """The throughput first, then what users wait for."""
    return dots(engine_plots(rows, "", ""))


def records(picture: Picture) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(picture.as_csv())))


def texts(picture: Picture) -> str:
    svg = for_file(picture.as_svg())
    return " ".join("".join(one.itertext()) for one in ElementTree.fromstring(svg).iter(f"{SVG}text"))


def test_every_timed_variant_is_on_the_roofline_and_a_cpu_says_that_none_is_known() -> None:
    roofline, bandwidth = roofline_pictures(rows_of("kernels"), "AMD EPYC", "AMD EPYC; perf_counter.")
    found = records(roofline)
    assert len(found) == 11
    assert {(row["op"], row["variant"]) for row in found} == {
        ("swiglu", "torch"), ("swiglu", "fused"), ("rms_norm", "torch"), ("rms_norm", "one_pass"),
        ("copy_pages", "torch"),
    }  # fmt: skip
    first = found[0]  # 2,000 FLOPs and 8,000 bytes in 3 us
    assert float(first["flops_per_byte"]) == 0.25
    assert float(first["gflop_per_s"]) == pytest.approx(2 / 3)
    assert float(first["gb_per_s"]) == pytest.approx(8 / 3)
    for picture in (roofline, bandwidth):
        assert NO_ROOFLINE in texts(picture)
        assert "swiglu.fused" in texts(picture)
        assert "matmul.tiled" in picture.caption
        assert "AMD EPYC; perf_counter." in picture.caption
    assert "none" in texts(bandwidth).split()
    assert "copy_pages" in texts(bandwidth)
    assert "copy_pages" not in texts(roofline)  # it computes nothing
    assert roofline_pictures([], "AMD EPYC", "") == []
    (only,) = roofline_pictures([kernel("copy_pages", "torch", 5.0, {"P": 8}, flops=0)], "AMD EPYC", "")
    assert only.name == "bandwidth"
    assert only.as_svg() is not None


def test_a_known_device_has_its_limits() -> None:
    roofline, bandwidth = roofline_pictures(rows_of("kernels"), "NVIDIA H200", "")
    assert NO_ROOFLINE not in texts(roofline) + texts(bandwidth)
    assert "67 TFLOP/s, float32" in texts(roofline)
    assert "4,800 GB/s of memory" in texts(bandwidth)
    assert "data sheet" in roofline.caption
    double, _ = roofline_pictures([kernel("swiglu", "torch", 5.0, {"T": 8}, dtype="float64")], "NVIDIA H200", "")
    assert "of memory" not in texts(double)
    assert "No peak is known for float64." in double.caption


def test_a_cpu_has_the_limits_that_were_measured_of_it() -> None:
    rates = {"copy_bytes_per_s": 9e9, "matmul_flops_per_s": 150e9}
    roofline, bandwidth = roofline_pictures(rows_of("kernels"), "AMD EPYC", "", rates)
    assert NO_ROOFLINE not in texts(roofline) + texts(bandwidth)
    assert "150 GFLOP/s, float32" in texts(roofline)
    assert "9 GB/s of memory" in texts(bandwidth)
    assert "measured on this machine" in roofline.caption


def test_a_curve_goes_over_the_number_that_varies() -> None:
    (picture,) = kernel_curves(rows_of("kernels"), {"swiglu": []})
    assert (picture.name, picture.title) == ("time-swiglu-by-T", "swiglu by tokens T")
    found = records(picture)
    assert [(row["series"], float(row["T"])) for row in found] == [
        (name, size) for name in ("torch", "fused") for size in (1, 2, 4, 64)
    ]
    assert float(found[0]["median"]) == 3.0
    assert float(found[0]["low"]) == pytest.approx(2.925)  # the samples' first quartile
    assert float(found[0]["high"]) == pytest.approx(3.15)


def test_pins_and_options_are_axes_too_and_two_sizes_need_to_be_asked_for() -> None:
    pinned = [kernel("swiglu", f"fused[num_warps={warps}]", 1.0 * warps, {"T": 4}) for warps in (4, 8)]
    (picture,) = kernel_curves(pinned, {})
    assert picture.name == "time-swiglu-by-num_warps"
    assert [row["series"] for row in records(picture)] == ["fused", "fused"]
    two = [kernel("swiglu", "torch", 1.0 * size, {"T": size}) for size in (4, 8)]
    assert kernel_curves(two, {}) == []
    assert len(kernel_curves(two, {"swiglu": []})) == 1
    swept = [served("engine", 100.0 * size, "chat", settings={"block_size": size}) for size in (16, 32)]
    names = ["engine-tokens-per-s-by-block_size", "engine-ttft-s-by-block_size", "engine-tpot-s-by-block_size"]
    assert [one.name for one in engine_curves(swept)] == names


def test_a_number_that_changes_along_with_a_policy_makes_no_curve() -> None:
    arms = [
        {"max_num_batched_tokens": 1024, "chunked_prefill": False},
        {"max_num_batched_tokens": 128, "chunked_prefill": True},
    ]
    rows = [served("engine", 100.0, "chat", settings=arm) for arm in arms]
    assert engine_curves(rows) == []
    named = engine_dots(rows)[0]
    assert records(named)[1]["name"] == "max_num_batched_tokens 128, chunked_prefill true"


def test_what_follows_from_other_axes_is_none_of_its_own() -> None:
    rows = [
        kernel("paged_decode", "torch", 1.0, {"B": batch, "P": batch * pages, "S": 16, "N": pages, "D": 64})
        for batch in (1, 8)
        for pages in (4, 8, 16)
    ]
    (plot,) = kernel_plots(rows, {}, "")
    assert varying_factors(plot.points) == {"B": [1, 8], "context": [64, 128, 256]}
    pool = [kernel("kv_scatter", "torch", 1.0, {"T": 16, "P": 16 // page, "S": page}) for page in (4, 8, 16)]
    assert varying_factors(kernel_plots(pool, {}, "")[0].points) == {"S": [4, 8, 16]}
    by_context = next(one for one in kernel_curves(rows, {}) if one.name.endswith("by-context"))
    assert {row["series"] for row in records(by_context)} == {"torch, B 1", "torch, B 8"}


def test_more_lines_than_can_be_told_apart_are_several_pictures() -> None:
    rows = [kernel("swiglu", f"v{number}", 1.0, {"T": size}) for number in range(40) for size in (1, 2, 4)]
    pictures = kernel_curves(rows, {})
    assert len(pictures) == 4
    assert pictures[-1].title == "swiglu by tokens T (4 of 5)"
    assert "8 more lines are in results.jsonl" in pictures[-1].caption


def test_many_lines_are_a_picture_for_each_batch() -> None:
    rows = [
        kernel("swiglu", name, 1.0 * size, {"T": size, "I": width})
        for name in ("torch", "fused", "tiled")
        for width in (64, 128)
        for size in (1, 2, 4)
    ]
    found = {one.title: {row["series"] for row in records(one)} for one in kernel_curves(rows, {})}
    names = {"torch", "fused", "tiled"}
    assert found == {"swiglu by tokens T, I 64": names, "swiglu by tokens T, I 128": names}


def test_an_arm_without_the_number_is_a_level_and_one_that_has_it_once_a_mark(tmp_path: Path) -> None:
    labels = ("torch", "split_kv[num_splits=4]", "split_kv[num_splits=8]")
    pinned: list[Row] = [served("engine", 1000.0, "w", arm={"paged_decode": label}) for label in labels]
    rates, *waits = engine_plots(pinned, "", "")
    assert [curves_of(plot)[1] for plot in (rates, *waits[:2])] == [[], [], []]  # every point is on one
    ((picture,), _) = curves_of(rates)
    assert [(row["series"], row["num_splits"]) for row in records(picture)] == [
        ("torch", ""), ("split_kv", "4.0"), ("split_kv", "8.0"),
    ]  # fmt: skip
    assert picture.caption.startswith("Dashed: what has no num_splits")
    assert {"torch", "split_kv"} <= set(texts(picture).split())
    one_left = [("torch", 8), ("torch", 16), ("fused", 8)]
    sizes = [served("engine", 1000.0, "w", arm={"swiglu": a}, settings={"block_size": n}) for a, n in one_left]
    ((picture,), _) = curves_of(engine_plots(sizes, "", "")[0])
    assert {row["series"] for row in records(picture)} == {"torch", "fused"}
    kernels = [kernel("paged_decode", label, 10.0, {"B": 1, "N": 8, "S": 16}) for label in labels]
    (picture,) = kernel_curves(kernels, {})
    assert {row["series"] for row in records(picture)} == {"torch", "split_kv"}
    names = {one.name for one in report_of(read_run(record(tmp_path / "run", [*pinned, *kernels]))).pictures}
    assert "engine-tokens-per-s-by-num_splits" in names
    assert not names & {"throughput", "waiting-ttft", "variants-paged_decode"}  # the curves have them all


def test_what_no_curve_can_show_is_among_the_dots(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"block_size": 8}, {"block_size": 16},
        *({"block_size": 8 * n, "order": order} for n, order in ((1, "fcfs"), (2, "priority"))),
    ]  # fmt: skip
    labels = ("torch", "torch", "fused", "fused")
    rows: list[Row] = [
        served("engine", 1000.0, "w", arm={"swiglu": label}, settings=one)
        for label, one in zip(labels, settings, strict=True)
    ]
    rows += [kernel("swiglu", f"v{number}", 1.0, {"T": size}) for number in range(40) for size in (1, 2, 4)]
    report = report_of(read_run(record(tmp_path / "run", rows)))
    named = {one.name: one for one in report.pictures}
    assert {row["series"] for row in records(named["engine-tokens-per-s-by-block_size"])} == {"torch"}
    assert len(records(named["throughput"])) == len(records(named["waiting-ttft"])) == 4
    assert len(records(named["variants-swiglu"])) == 120


def test_of_many_dots_the_best_and_the_first_are_drawn() -> None:
    arms = [served("engine", 100.0 + number, "w", arm={"swiglu": f"v{number:03}"}) for number in range(200)]
    picture = engine_dots(arms)[0]
    shown = {word for word in texts(picture).split() if word.startswith("v")}
    assert shown == {"v000", *(f"v{number:03}" for number in range(201 - MOST, 200))}
    _, waits, *_ = engine_dots([*arms[:50], *(arm.model_copy(update={"workload": "x"}) for arm in arms[:50])])
    assert texts(waits).split().count("v000") == 2
    assert "40 of 100: the best and the first of each group" in waits.caption


def test_a_workloads_field_is_called_the_same_everywhere() -> None:
    rows = [
        served("engine", 100.0, "w", arm={"swiglu": name}, settings={"workload.num_requests": size})
        for name in ("torch", "fused")
        for size in (1, 2)
    ]
    picture = engine_curves(rows)[0]
    assert picture.title == "Output tokens per second by num_requests"
    assert picture.name == "engine-tokens-per-s-by-num_requests"
    assert "workload." not in texts(picture)


def test_a_name_is_shown_as_it_is_whatever_it_holds() -> None:
    for odd in ('id="q"', 'href="#a', "url(#a)", "fill: #1c0a01", "font: bold 3px a", 'style="fill: #1c0a01"'):
        picture = engine_dots([served("engine", 9.0, "w", arm={"swiglu": name}) for name in (odd, "b")])[0]
        assert odd in texts(picture)
        assert odd in " ".join(ElementTree.fromstring(for_page(picture.as_svg())).itertext())


def test_labels_as_factors() -> None:
    assert label_factors("op", "split_kv[num_splits=4,num_warps=8]", False) == {
        "variant": "split_kv", "num_splits": 4, "num_warps": 8,
    }  # fmt: skip
    assert label_factors("op", "torch", True) == {"op": "torch"}


def test_arms_side_by_side() -> None:
    throughput, *waits = engine_dots(rows_of("engine", "peers"))
    assert [(row["name"], float(row["median"])) for row in records(throughput)] == [
        ("torch", 1000), ("fused", 1500), ("transformers padded", 500),
    ]  # fmt: skip
    assert [one.name for one in waits] == ["waiting-ttft", "waiting-tpot", "waiting-gap"]
    assert {(row["p50"], row["p99"]) for row in records(waits[0])} == {("1.0", "4.0")}
    assert engine_dots([served("engine", None, "chat")]) == []
    found = pictures_of(kernel_plots(rows_of("kernels"), {"swiglu": []}, ""))
    (variants,) = [one for one in found if one.name.startswith("variants")]
    assert variants.name == "variants-rms_norm"
    assert [row["name"] for row in records(variants)] == ["torch", "one_pass"]


def test_a_steps_parts_sum_up_to_the_step(tmp_path: Path) -> None:
    steps = steps_of(rows_of("step"), rows_of("engine"))
    assert [(one.arm, one.step_us) for one in steps] == [("torch", 1000.0), ("fused", 1000.0)]
    for one in steps:
        assert math.isclose(sum(one.parts.values()), one.step_us)
    assert "swiglu" in texts(steps_picture(steps, ""))
    line = next(line for line in ranges_table(steps).lines if not isinstance(line, str))
    assert [cell.text for cell in line] == ["swiglu.torch", "20", "600.0", "60.0%"]
    twice = [row.model_copy(update={"replicate": index}) for row in rows_of("step") for index in (0, 1)]
    again = steps_of(twice, rows_of("engine"))
    assert [(one.arm, one.step_us, one.steps) for one in again] == [("torch", 1000.0, 20), ("fused", 1000.0, 20)]
    assert (again[0].parts, again[0].whole) == (steps[0].parts, steps[0].whole)
    assert steps_of([], []) == []
    without = report_of(read_run(record(tmp_path / "run", rows_of("engine"))))
    (section,) = [one for one in without.sections if one.name == "step-time"]
    assert (section.notes, section.pictures) == (["Where a step's time goes: not measured."], ())


def all_pictures() -> list[Picture]:
    kernels, engines = rows_of("kernels"), rows_of("engine")
    odd = served("engine", 700.0, EVIL, settings={"prefix_cache": EVIL})
    return [
        *roofline_pictures([*kernels, kernel("swiglu", EVIL, 2.0, {"T": 9})], "some CPU", EVIL),
        *kernel_curves([*kernels, *(kernel("swiglu", "_x$y", 2.0, {"T": size}) for size in (1, 2))], {"swiglu": 1}),
        *engine_dots([*engines, odd]),
        steps_picture(steps_of(rows_of("step"), engines), ""),
        *[one for one in [quantization_picture(rows_of("quantization"), "some CPU")] if one is not None],
    ]


def test_pictures_are_whole_documents_with_texts_that_stay_texts() -> None:
    for picture in all_pictures():
        svg = picture.as_svg()
        root = ElementTree.fromstring(for_file(svg))
        assert root.tag == f"{SVG}svg"
        assert not list(root.iter(f"{SVG}script"))
        assert not list(root.iter(f"{SVG}image"))
        assert root.find(f"{SVG}title") is not None
        ids = [one.get("id") for one in root.iter() if one.get("id")]
        assert all(str(one).startswith(f"{picture.name}-") for one in ids)
        for mark, (variable, light, dark) in COLOURS.items():
            assert mark not in for_page(svg) + for_file(svg)
            if mark in svg:
                assert f"var({variable})" in for_page(svg)
                assert light in for_file(svg)
                assert dark in for_file(svg)
    assert "alert" in texts(all_pictures()[0])


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours."""

    def light(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [1, 2])
def test_colours_are_readable_on_their_paper(theme: int) -> None:
    named = {values[0]: values[theme] for values in COLOURS.values()}
    paper = named["--paper"]
    assert contrast(named["--ink"], paper) > 12
    assert contrast(named["--soft"], paper) > 4.5
    assert all(contrast(named[name], paper) > 4.5 for name in ("--s1", "--s2", "--s4"))  # the page's texts in colour
    assert all(contrast(named[f"--s{index}"], paper) >= 3 for index in range(len(SERIES)))


def test_series_are_told_apart_by_colour_and_marker() -> None:
    looks = [tuple(series_style(index).values()) for index in range(len(SERIES) * len(MARKERS))]
    assert len(set(looks)) == len(looks)


def test_numbers_and_names_as_a_picture_shows_them() -> None:
    assert [format_tick(value) for value in (0.25, 16, 4096, 16_777_216, 2e9)] == ["0.25", "16", "4,096", "16.8M", "2G"]
    assert printable("a\x00b") == "a\ufffdb"
    assert printable("_hidden") == " _hidden"
    assert len(printable("long" * 30)) == 40
