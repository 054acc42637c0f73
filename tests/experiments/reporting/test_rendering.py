"""A report as HTML, Markdown and JSON, and the folder that it is written into."""

import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from experiments.reporting.rendering import (
    MOST_LINES,
    as_html,
    as_json,
    as_markdown,
    draw_pictures,
    shorten_table,
    write_report,
)
from experiments.reporting.report import Section, report_of
from experiments.reporting.table_style import Column, PlainTable, cells
from experiments.runs.reading import read_run
from tests.experiments.reporting.recorded import QUESTION, check, everything, record


class Page(HTMLParser):
    """Which elements a page has, with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "mine", everything())


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    report = report_of(read_run(folder))
    return Page(as_html(report, draw_pictures(report)))


def test_a_report_holds_all_that_it_should(page: Page) -> None:
    text = " ".join(page.text.split())
    for words in (
        "Which of these <b>is</b> faster?", "The second paragraph's first half.", "Another.",
        "2 of 4 variants are not right", "Bandwidth achieved", "no roofline known for this device", "by tokens T",
        "Where a step's time goes", "swiglu.torch", "Checks and parity", "request 2, token 5, by a margin of 0.25 nats",
        "What the kernels compile to", "tk check --op swiglu", "tk repeat", "git checkout cccc", "Perplexity by size",
        "transformers padded", "some CPU, 1 thread; wall clock; spread: quartiles of 3 rounds, one process each.",
    ):  # fmt: skip
        assert words in text, words
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(pictures) == 10
    assert all(one.get("aria-label") for one in pictures)


def test_texts_of_a_run_come_out_as_text(page: Page) -> None:
    assert '<script>alert("1")</script>' in page.text
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "b", "img", "iframe", "object", "link"}


def test_code_in_a_question_is_code_and_still_no_markup(tmp_path: Path) -> None:
    source = "# Is `<i>a</i>` it? Or `<u>b</u>`.\n#\n# An ` open <u>one</u>.\nname: a\n"
    report = report_of(read_run(record(tmp_path / "mine", [check("swiglu", "fused")], source=source)))
    html = as_html(report, {})
    assert "<h1>Is <code>&lt;i&gt;a&lt;/i&gt;</code> it?</h1>" in html
    assert "<p>Or <code>&lt;u&gt;b&lt;/u&gt;</code>.</p>" in html
    assert "<p>An ` open &lt;u&gt;one&lt;/u&gt;.</p>" in html


def test_a_report_needs_nothing_else(page: Page) -> None:
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action"):
            assert str(attributes.get(name) or "#").startswith("#"), attributes
        assert not any(name.startswith("on") for name in attributes)
    css = page.text
    assert "@import" not in css
    assert not re.search(r"url\((?!#)", css)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    anchors = {a["href"] for tag, a in page.tags if tag == "a"}
    assert {str(one).removeprefix("#") for one in anchors} <= set(map(str, ids))


def test_figures_are_files_too(folder: Path) -> None:
    report = report_of(read_run(folder))
    (folder / "figures").mkdir(exist_ok=True)
    assert write_report(report, folder) == folder / "report.html"
    names = {path.name for path in (folder / "figures").iterdir()}
    stems = {picture.name for picture in report.pictures}
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "csv")}
    assert "roofline" in stems
    header, *lines = (folder / "figures" / "throughput.csv").read_text().splitlines()
    assert header == "group,name,median,low,high,unit,samples"
    assert len(lines) == 3
    samples = [float(sample) for sample in lines[0].rpartition(",")[2].split()]
    assert samples == pytest.approx([1000 / 0.9, 1000, 1000 / 1.1])  # as many as the picture has small marks


def test_without_matplotlib_the_tables_are_there_and_the_lack_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = report_of(read_run(folder))
    assert draw_pictures(report) == {}
    without = Page(as_html(report, {}))
    assert "pictures need matplotlib" in without.text
    assert "tkernels[plot]" in without.text
    assert not any(tag == "svg" for tag, _ in without.tags)
    assert "1,500" in without.text
    assert "pictures need matplotlib" in as_markdown(report)


def test_markdown_has_the_same_and_no_markup_of_a_run(folder: Path) -> None:
    text = as_markdown(report_of(read_run(folder)))
    assert text.startswith("# Which of these &lt;b&gt;is&lt;/b&gt; faster?\n")
    assert "![FLOP/s achieved](figures/roofline.svg)" in text
    assert "<script" not in text
    (header,) = [line for line in text.splitlines() if line.startswith("| op | variant | dtype | result")]
    assert header.count("|") == 9
    bodies = [line for line in text.splitlines() if "| float32 |" in line]
    assert len(bodies) == 5
    assert {line.replace("\\|", "").count("|") for line in bodies} == {9}


def test_a_text_is_no_emphasis_and_no_link_of_its_own(tmp_path: Path) -> None:
    said = (
        "# Is _this_ ~~it~~, on www.a.org or https://b.org/c or me@d.org? The *paged_decode* and __init__.\nname: a\n"
    )
    text = as_markdown(report_of(read_run(record(tmp_path / "mine", [check("swiglu", "fused")], source=said))))
    assert text.startswith(
        "# Is \\_this\\_ \\~\\~it\\~\\~, on www\\.a.org or https\\://b.org/c or me\\@d.org?\n\n"
        "The \\*paged_decode\\* and \\_\\_init\\_\\_.\n"
    )


def test_json_has_every_word_and_figure(folder: Path) -> None:
    data = json.loads(as_json(report_of(read_run(folder))))
    assert data["question"]["heading"] == "Which of these <b>is</b> faster?"
    assert data["verdict"]["good"] is False
    sections = {section["name"]: section for section in data["sections"]}
    assert list(sections) == ["end-to-end", "kernels", "step-time", "quantization", "numerics", "compiled"]
    engine = sections["end-to-end"]["tables"][0]
    assert engine["rows"][1]["tokens/s"] == "1,500"
    roofline = sections["kernels"]["pictures"][0]
    assert roofline["rows"][0]["flops_per_byte"] == 0.25
    assert {one["status"] for one in data["failures"]} == {"failed", "wrong", "unsupported"}
    assert data["source"] == QUESTION
    assert data["environment"]["device.name"] == "some CPU"
    assert data["environment"]["versions.torch"] == "2.13"


def test_json_has_no_figures_that_json_has_not(tmp_path: Path) -> None:
    first, second = (row for row in everything() if row.stage == "quantization")
    rows = [first, second.model_copy(update={"perplexity": math.inf})]

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(as_json(report_of(read_run(record(tmp_path / "mine", rows)))), parse_constant=refuse)
    (picture,) = next(one["pictures"] for one in data["sections"] if one["name"] == "quantization")
    assert [row["perplexity"] for row in picture["rows"]] == [26.5, None]
    assert [row.get("not_finite") for row in picture["rows"]] == [None, "perplexity is infinite"]


def test_json_loses_no_column_of_a_table_that_has_two_of_a_name(folder: Path) -> None:
    table = PlainTable("t", (Column("over"), Column("a"), Column("a")), ("head", cells("1", "2", "3")))
    report = replace(report_of(read_run(folder)), sections=(Section("s", "S", tables=(table,)),))
    (rows,) = [one["rows"] for one in json.loads(as_json(report))["sections"][0]["tables"]]
    assert rows == [{"over": "head", "over (1)": "1", "a": "2", "a (3)": "3"}]


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    report = report_of(read_run(record(tmp_path / "mine", [check("swiglu", "fused")], source="name: a\n")))
    assert not report.question.asked
    assert report.question.heading == "test"
    html = Page(as_html(report, {})).text
    assert "No kernel's time was measured" in html
    assert "Nothing is asked" in html
    assert "None: everything that was asked for is right" in html


def test_commands_lead_to_the_run_from_wherever_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(tmp_path / "runs" / "mine", [check("swiglu", "fused")])

    def repeat() -> str:
        return dict(report_of(read_run(folder)).commands)["Run it again, and hear what changed"]

    monkeypatch.chdir(tmp_path)
    assert repeat() == "tk repeat runs/mine"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert repeat() == f"tk repeat {folder}"
    monkeypatch.chdir(folder)
    assert repeat() == f"tk repeat {folder}"


def test_a_run_that_was_cut_off_has_a_report(tmp_path: Path) -> None:
    path = record(tmp_path / "mine", everything())
    meta = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**meta, "finished": None}))
    with (path / "results.jsonl").open("a") as file:
        file.write('{"run_id": "01')
    html = Page(as_html(report_of(read_run(path)), {})).text
    assert "half written" in html
    assert "The run has not ended" in html


def test_a_long_table_says_what_it_leaves_out() -> None:
    table = PlainTable("t", (Column("a"),), tuple(cells(str(index)) for index in range(MOST_LINES + 5)), "What.")
    short = shorten_table(table)
    assert len(short.lines) == MOST_LINES
    assert short.caption == "What. 5 more of 405 lines are in results.jsonl."
    assert shorten_table(short) is short


def test_a_name_that_figures_leave_no_room_for_is_broken_at_a_dot_or_an_underscore() -> None:
    figures = [Column(f"figure {index}", right=True) for index in range(6)]
    names = ("max_chunk_tokens 32", "[bold]paged_decode.torch")
    lines = tuple(cells(name, *("12,345" for _ in figures)) for name in names)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(PlainTable("Where", (Column("arm"), *figures), lines, "Shares.").as_rich())
    shown = [line.split()[:2] for line in console.export_text(clear=False).splitlines()]
    broken = ["max_chunk_tokens", "32", "[bold]paged_", "decode.torch"]
    assert [one[0] for one in shown if one][-5:] == [*broken, "Shares."]
    assert ["[bold]paged_", "12,345"] in shown
    console.print(PlainTable("Where", (Column("arm"), *figures[:3]), tuple(line[:4] for line in lines)).as_rich())
    assert "max_chunk_tokens 32" in console.export_text()


def test_a_long_name_may_be_broken_on_the_page(tmp_path: Path) -> None:
    rows = [check("qk_norm_rope_scatter", "head_tile[num_warps=4]", point="B=1, T=4, lengths=full, values=ordinary")]
    html = as_html(report_of(read_run(record(tmp_path / "mine", rows))), {})
    assert "head_<wbr>tile[num_<wbr>warps=4]" in html


def test_every_figure_is_in_one_long_table_beside_the_report(tmp_path: Path) -> None:
    folder = record(tmp_path / "mine", everything())
    report = report_of(read_run(folder))
    write_report(report, folder)
    with (folder / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    (one,) = [line for line in lines if line["arm"] == "fused" and (line["figure"], line["place"]) == (
        "median_us", "swiglu, T=64,I=8, float32")]  # fmt: skip
    assert one == {
        "stage": "kernels", "place": "swiglu, T=64,I=8, float32", "arm": "fused", "figure": "median_us",
        "value": "65.5", "unit": "us", "replicate": "0",
    }  # fmt: skip
    assert {"tokens_per_s", "ttft_s.p50", "max_error_ratio", "self_us", "perplexity", "logprob_drift", "speedup"} <= {
        line["figure"] for line in lines
    }
    table = json.loads(as_json(report))["table"]
    assert [str(entry["figure"]) for entry in table] == [line["figure"] for line in lines]
