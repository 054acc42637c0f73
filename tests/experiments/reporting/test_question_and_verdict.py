"""What was asked, and what came out, in sentences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.reporting.arms import count_processes, merge_processes
from experiments.reporting.question import question_of
from experiments.reporting.rendering import as_html
from experiments.reporting.report import report_of
from experiments.reporting.tables import check_table, parity_table, tables_of
from experiments.reporting.verdict import Verdict, verdict_of
from experiments.runs.reading import read_run
from experiments.runs.rows import Row
from tests.experiments.reporting.recorded import QUANTILES, check, everything, kernel, parity, record, served


@pytest.mark.parametrize(
    ("source", "heading", "text", "asked"),
    [
        ("# Is it? It is.\n# Or not.\n#\n# Two.\nname: a\n# no more\n", "Is it?", ("It is. Or not.", "Two."), True),
        ("\n# One line without an end\nname: a\n", "One line without an end", (), True),
        ("---\n# At 1.5 bits? Yes.\nname: a", "At 1.5 bits?", ("Yes.",), True),
        (
            "# Question: how large?\n# Read: the table,\n#   twice.\n# Takes: a minute.\nname: a",
            "How large?",
            ("Read: the table, twice.", "Takes: a minute."),
            True,
        ),
        ("name: a\n# a comment further down\n", "a-run", (), False),
        ("", "a-run", (), False),
        ("# " + "so long " * 40 + ".\nname: a", "a-run", (("so long " * 40).strip() + " .",), True),
    ],
)
def test_the_question_is_the_comment_at_the_top(source: str, heading: str, text: tuple[str, ...], asked: bool) -> None:
    found = question_of(source, "a-run")
    assert (found.heading, found.text, found.asked) == (heading, text, asked)


def judge(rows: Sequence[Row], finished: bool = True, **environment: Any) -> Verdict:
    """The verdict without a test of arms, as of a run with few processes."""
    return verdict_of(merge_processes(rows), count_processes(rows), finished, None, environment)


def verdict(rows: Sequence[Row], finished: bool = True, **environment: Any) -> str:
    found = judge(rows, finished, **environment)
    return " ".join([found.sentence, *found.notes])


def test_of_one_process_an_arm_the_range_is_told_and_no_winner() -> None:
    arms = [served("engine", 1000.0, ""), served("engine", 1500.0, "", arm={"swiglu": "fused"})]
    rows = [check("swiglu", "torch"), check("swiglu", "fused"), *arms, parity({"swiglu": "fused"}, 4)]
    found = judge(rows)
    assert found.good
    assert found.sentence == "All 2 variants were right at the 1 point of this run and all 2 arms gave the same tokens."
    assert found.notes == (
        "2 of 2 arms timed; not judged: one process an arm; 1,000 tokens/s (torch) to 1,500 tokens/s (fused).",
    )


def test_few_processes_are_no_test_either() -> None:
    assert verdict(repeated({"torch": 1000.0, "fused": 1500.0}, count=4)) == (
        "2 of 2 arms timed; not judged: 4 processes an arm, and a test needs 5; 1,005 tokens/s (torch) to 1,508 "
        "tokens/s (fused)."
    )


def test_speeds_of_other_sizes_dtypes_and_models_are_not_compared() -> None:
    sizes = {"torch": {1: 100.0, 256: 6000.0}, "fused": {1: 150.0, 256: 7200.0}}
    rows: list[Row] = [
        served("engine", speed, "", arm={"swiglu": name}, settings={"workload.num_requests": size})
        for name, speeds in sizes.items()
        for size, speed in speeds.items()
    ]
    assert verdict(rows) == (
        "4 of 4 arms timed; with “num_requests=1”, not judged: one process an arm; 100 tokens/s (torch) to 150 "
        "tokens/s (fused). With “num_requests=256”, not judged: one process an arm; 6,000 tokens/s (torch) to "
        "7,200 tokens/s (fused)."
    )
    for key, names in (("dtype", ("float32", "bfloat16")), ("model", ("small", "large"))):
        rows = [
            served("engine", speed, "", settings={key: name}, **({"dtype": name} if key == "dtype" else {}))
            for name, speed in zip(names, (10.0, 1000.0), strict=True)
        ]
        text = verdict(rows)
        for name, speed in zip(names, ("10", "1,000"), strict=True):
            assert f"ith “{key}={name}”, not judged: one process an arm; {speed} tokens/s." in text


def test_a_peer_stands_in_the_range_of_its_place() -> None:
    sizes: list[dict[str, Any]] = [{"workload.num_requests": size} for size in (1, 2)]
    rows: list[Row] = [
        *(served("engine", 1000.0, "chat", settings=one) for one in sizes),
        served("peers", 500.0, "chat", arm={}, settings=sizes[1], peer="transformers_padded"),
    ]
    text = verdict(rows)
    assert "With “num_requests=2”, not judged: one process an arm; 500 tokens/s (peer transformers_padded) to" in text
    assert "with “num_requests=1”, not judged: one process an arm; 1,000 tokens/s. " in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([{}], "all 2 arms gave the same tokens. 2 of 2"),
        ([{"workload.input_len": 8}, {"workload.input_len": 9}], "the same tokens at each of 2 workloads or models."),
        ([{"model": "a"}, {"model": "b"}], "all 2 arms gave the same tokens at each of 2 workloads or models."),
        (
            [{"model": name, "workload.input_len": size} for name in "ab" for size in (8, 9)],
            "all 2 arms gave the same tokens at each of 4 workloads or models.",
        ),
    ],
)
def test_only_arms_that_were_compared_gave_the_same_tokens(settings: list[dict[str, Any]], said: str) -> None:
    rows: list[Row] = []
    for one in settings:
        rows += [served("engine", 1000.0, "chat", arm={"swiglu": name}, settings=one) for name in ("torch", "fused")]
        rows.append(parity({"swiglu": "fused"}, 4, settings=one))
    assert said in verdict(rows).lower()
    lines = tables_of(rows)["engine"].lines
    assert [line[-2].text for line in lines if not isinstance(line, str)] == ["first arm", "yes"] * len(settings)
    parities, engines = ([row for row in rows if row.stage == stage] for stage in ("parity", "engine"))
    caption = parity_table(parities, engines).caption
    whose = "(swiglu torch)." if len(settings) == 1 else "of the same model, workload and sizes (swiglu torch)."
    assert caption.startswith(f"Beside the first arm {whose}")


def test_requests_that_failed_are_said_everywhere(tmp_path: Path) -> None:
    whole = served("engine", 1000.0, "", arm={"swiglu": "torch"})
    short = served(
        "engine", 5000.0, "", arm={"swiglu": "fused"}, requests_failed=3, requests_error="the prompt is too long"
    )
    rows: list[Row] = [whole, short, parity({"swiglu": "fused"}, 4, workload="", requests=1, requests_equal=1)]
    found = judge(rows)
    assert not found.good
    assert found.sentence == (
        "3 of 4 requests failed (fused) and all 2 arms gave the same tokens to the requests that both served."
    )
    line = tables_of(rows)["engine"].lines[1]
    assert [cell.text for cell in line[1:2]] == ["3 of 4 failed"]  # type: ignore[union-attr]
    assert line[-2].text == "1 of 1 both served"  # type: ignore[union-attr]
    report = report_of(read_run(record(tmp_path / "mine", rows)))
    assert [(one.status, one.about, one.reason) for one in report.failures] == [
        ("failed", "swiglu=fused", "3 of 4 requests failed: the prompt is too long")
    ]
    assert "3 of 4 failed" in as_html(report, {})
    others = [short.model_copy(update={"settings": {"block_size": size}}) for size in (8, 16)]
    assert "Requests failed in 2 of 3 servings (the most: 3 of 4, fused, block_size 8)" in verdict([whole, *others])


def test_an_arm_whose_requests_all_failed_has_no_speed(tmp_path: Path) -> None:
    rows: list[Row] = []
    for replicate in range(5):
        torch, fused = (served("engine", 1000.0, "", arm={"swiglu": name}, replicate=replicate) for name in "ab")
        nothing = {"tokens_per_s": 0.0, "tokens_per_s_iqr": 0.0, "output_tokens": 0, "requests_failed": 4}
        rows += [torch, fused.model_copy(update=nothing)]
    found = report_of(read_run(record(tmp_path / "run", rows))).verdict
    assert found.sentence == "4 of 4 requests failed (b)."
    assert found.notes[0].startswith("1 of 2 arms timed")


def test_what_is_wrong_comes_first_and_a_cut_run_says_so() -> None:
    text = verdict(everything(), finished=False)
    assert text.startswith(
        "2 of 4 variants are not right at the 1 point of this run (swiglu.crash, swiglu.wrong) and 1 of 1 comparisons"
    )
    assert " The lowest perplexity is rtn's at 4 bits (27); the dense model's is 26.5." in text
    assert text.endswith("The run has not ended: what follows is what it knew when it was cut off.")
    assert not judge(everything()).good


def test_a_process_that_died_after_its_last_point_is_at_no_point() -> None:
    died = check("swiglu", "fused", "failed").model_copy(update={"point": None})
    rows = [check("swiglu", "torch"), check("swiglu", "fused"), died]
    assert verdict(rows).startswith("1 of 2 variants is not right at the 1 point of this run (swiglu.fused)")
    shown = [[cell.text for cell in line] for line in tables_of(rows)["kernels"].lines if not isinstance(line, str)]
    assert [line[1:3] for line in shown] == [["decode", "ok"], ["decode", "ok"], ["-", "failed"]]
    counts = [[cell.text for cell in line] for line in check_table(rows).lines if not isinstance(line, str)]
    assert [line[3:5] for line in counts] == [["ok", "1 of 1"], ["failed", "1 of 1"]]


def test_nothing_is_made_of_what_was_not_measured() -> None:
    interpreted = [served("engine", None, "")]
    assert verdict(interpreted) == "0 of 1 arm timed (swiglu interpreted on a CPU: not measured)."
    one = [served("engine", 1000.0, ""), served("engine", None, "", arm={"swiglu": "fused"})]
    assert verdict(one) == (
        "1 of 2 arms timed (swiglu interpreted on a CPU: not measured); not judged: one process an arm; 1,000 tokens/s."
    )
    both = "swiglu, paged_decode interpreted on a CPU: not measured"
    others = [
        served("engine", None, "", arm={"swiglu": "fused", "paged_decode": name}, speed_reason=both) for name in "ab"
    ]
    assert verdict([*one, *others]).startswith(f"1 of 4 arms timed ({both}; 1 other reason); not judged: ")
    assert verdict([kernel("swiglu", "fused", None, {"T": 1})]) == ("0 of 1 variant timed (interpreted: not measured).")
    assert verdict([]) == "Nothing was measured."
    assert not judge([]).good


def test_of_kernels_alone_no_variant_is_called_the_fastest_without_a_test() -> None:
    times = [("torch", 3.0, 1), ("fused", 2.0, 1), ("torch", 3.0, 2), ("fused", 4.5, 2), ("torch", 9.0, 4)]
    rows: list[Row] = [kernel("swiglu", name, us, {"T": size}) for name, us, size in (*times, ("fused", 3.0, 4))]
    assert verdict(rows) == (
        "2 of 2 variants timed; for swiglu, not judged: one process an arm; the slowest variant's time is 1.5 to 3 "
        "times the fastest's at a point, 2 to 9 us."
    )
    assert verdict(rows[:1]) == "1 of 1 variant timed; for swiglu, not judged: one process an arm; 3 us."


def test_a_busy_machine_is_said_beside_the_verdict() -> None:
    host = {"cpus": 2}
    rows = [served("engine", 1000.0, "", load_before=1.5, load_after=7.94)]
    assert "The machine was busy: 7.9 processes ran or waited on its 2 cores (before and after" in verdict(
        rows, host=host
    )
    assert "busy" not in verdict([rows[0].model_copy(update={"load_after": 2.1})], host=host)
    assert "busy" not in verdict(rows)  # nobody knows how many cores there were


def test_outside_variants_that_were_never_checked_are_named() -> None:
    text = verdict([served("engine", 1000.0, "")], unchecked=["swiglu.mine"])
    assert text.endswith(" Never put through `tk check`: swiglu.mine.")


def waiting(gap: float, ttft: float) -> dict[str, dict[str, float]]:
    return {"gap_s": {**QUANTILES, "p99": gap}, "ttft_s": {**QUANTILES, "p50": ttft}}


def test_of_five_processes_the_largest_real_difference_in_waiting_is_told(tmp_path: Path) -> None:
    rows = repeated({"torch": 1000.0, "fused": 1000.0}, {"fused": waiting(0.04, 0.0009)})
    sentence = report_of(read_run(record(tmp_path / "run", rows))).verdict.sentence
    assert "no arm's tokens per second differ from those of torch by more than noise (a change of " in sentence
    assert "; of what users wait for, the gap (p99) differs most: that of fused is 10 times that of torch (" in sentence


def test_of_five_processes_the_variants_that_are_really_faster_are_told_by_points(tmp_path: Path) -> None:
    rows = [
        kernel("swiglu", name, us * (1 + 0.01 * (index % 3)), {"T": size}, replicate=index)
        for index in range(5)
        for name, factors in {"torch": (1, 1, 1), "fused": (0.5, 0.4, 2)}.items()
        for size, us in zip((1, 2, 4), factors, strict=True)
    ]
    found = report_of(read_run(record(tmp_path / "run", rows))).verdict
    assert found.sentence == (
        "2 of 2 variants timed; for swiglu, of 3 points, torch is beaten by fused at 2, up to 2.5 times as fast "
        "(T=1 to T=2)."
    )
    assert found.notes == ("Of 3 kernel times beside the first variant's, 2 better, 1 worse.",)


def repeated(
    speeds: dict[str, float], waits: Mapping[str, dict[str, dict[str, float]]] | None = None, count: int = 5
) -> list[Row]:
    """So many processes of each arm, each a little off."""
    return [
        served(
            "engine",
            speed * (1 + 0.01 * (index % 3)),
            "",
            arm={"swiglu": name},
            replicate=index,
            task=f"{name}{index}",
            **(waits or {}).get(name, {}),
        )
        for index in range(count)
        for name, speed in speeds.items()
    ]


def test_with_five_processes_a_test_says_what_is_noise(tmp_path: Path) -> None:
    faster = report_of(read_run(record(tmp_path / "a", repeated({"torch": 1000.0, "fused": 1500.0}))))
    assert faster.verdict.sentence.startswith(
        "2 of 2 arms timed; the arm fused serves 1.5 times the tokens per second of torch ("
    )
    assert faster.verdict.notes == ()
    throughput = next(one for one in faster.pictures if one.name == "throughput")
    assert throughput.records[0]["samples"] == pytest.approx((1000, 1010, 1020, 1000, 1010))  # of each process one
    assert "small marks: what they are of. some CPU, 1 thread; wall clock; spread: quartiles of 5" in throughput.caption
    section = next(one for one in faster.sections if one.name == "differences")
    assert section.notes == ("The arms of a: of 4 figures, 1 better, 3 within noise.",)
    assert any(not isinstance(line, str) and line[-1].tone == "better" for line in section.tables[0].lines)
    same = report_of(read_run(record(tmp_path / "b", repeated({"torch": 1000.0, "fused": 1000.0}))))
    assert same.verdict.sentence.startswith(
        "2 of 2 arms timed; no arm's tokens per second differ from those of torch by more than noise (a change of "
    )
    wild = [row.model_copy(update={"tokens_per_s": 10.0 ** (row.replicate or 0)}) for row in repeated({"a": 1, "b": 1})]
    wild[1] = wild[1].model_copy(update={"tokens_per_s": 1000.0})
    noise = report_of(read_run(record(tmp_path / "d", wild)))
    assert "(a change of >999% would have been found)" in noise.verdict.sentence
    slower = report_of(read_run(record(tmp_path / "c", repeated({"torch": 1000.0, "fused": 500.0}))))
    assert slower.verdict.sentence == "2 of 2 arms timed; no arm is faster than torch, and 1 of 1 others are slower."
