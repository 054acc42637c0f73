"""What was asked, and what came out, in sentences."""

import re
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
from experiments.runs import verdicts as judgement
from experiments.runs.comparison import Effect, Outcome
from experiments.runs.reading import read_run
from experiments.runs.rows import Row
from experiments.runs.verdicts import Comparison
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
    assert text.startswith("3 of 3 arms timed; ")
    assert not judge([*rows[:2], rows[2].model_copy(update={"requests_failed": 1})]).good


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


def test_where_places_have_other_numbers_of_arms_those_that_were_compared_are_counted() -> None:
    rows: list[Row] = []
    for model, others in {"a": ("fused", "other"), "b": ("fused",)}.items():
        about: dict[str, Any] = {"settings": {"model": model}}
        rows += [served("engine", 1000.0, "chat", arm={"swiglu": name}, **about) for name in ("torch", *others)]
        rows += [parity({"swiglu": name}, 4, **about) for name in others]
    said = "All 3 arms that stand beside the first of their workload and model gave the same tokens. "
    assert verdict(rows).startswith(said)


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


def test_what_was_checked_and_never_timed_counts() -> None:
    assert verdict([check("swiglu", "torch")]) == (
        "The variant was right at the 1 point of this run. 0 of 1 variant timed."
    )
    skipped = check("swiglu", "tma", "unsupported")
    assert verdict([skipped]).startswith("No variant could be checked. ")
    at_two = [check("swiglu", "torch"), check("swiglu", "torch", point="prefill"), skipped]
    assert verdict(at_two).startswith("The variant was right at the 2 points of this run. 0 of 2 variants timed")
    wrong = [check("swiglu", name, "wrong") for name in ("a", "b", "c", "d", "e")]
    assert verdict(wrong).startswith(
        "5 of 5 variants are not right at the 1 point of this run (swiglu.a, swiglu.b, swiglu.c and 2 more). "
    )
    assert verdict(wrong[:3]).startswith(
        "3 of 3 variants are not right at the 1 point of this run (swiglu.a, swiglu.b, s"
    )


def test_a_check_says_nothing_of_why_there_is_no_time_and_a_failure_does() -> None:
    assert verdict([check("swiglu", "torch", "failed")]).endswith("(swiglu.torch). 0 of 1 variant timed.")
    failed = Row(
        stage="engine", run_id="r", dtype="float32", device="cpu", arm={"swiglu": "torch"}, status="failed",
        reason="out of memory", workload="",
    )  # fmt: skip
    assert verdict([failed]) == "0 of 1 arm timed (out of memory)."


def test_the_method_with_the_lowest_perplexity_is_told_for_each_number_of_bits() -> None:
    (rtn,) = [row for row in everything() if row.method == "rtn"]
    found = [("rtn", 4, 27.0), ("rtn", 3, 29.0), ("gptq", 3, 28.14), ("gptq", 4, 27.5), ("gptq", 8, 26.5)]
    rows = [rtn.model_copy(update={"method": name, "bits": bits, "perplexity": value}) for name, bits, value in found]
    assert verdict(rows) == "The lowest perplexity is gptq's at 3, 8 bits (28.14, 26.5), rtn's at 4 bits (27)."


def test_of_several_reasons_the_most_common_is_told_and_the_others_are_counted() -> None:
    reasons = ["cold", "hot", "hot", "wet", "dry"]
    rows = [served("engine", None, "", arm={"swiglu": str(i)}, speed_reason=why) for i, why in enumerate(reasons)]
    assert verdict(rows) == "0 of 5 arms timed (hot; 3 other reasons)."
    assert verdict(rows[:3]) == "0 of 3 arms timed (hot; 1 other reason)."


def test_what_a_server_answered_is_judged_like_an_engine() -> None:
    rows = [served("http", speed, "chat", arm={"swiglu": name}) for name, speed in (("a", 100.0), ("b", 200.0))]
    assert verdict(rows) == ("2 of 2 arms timed; not judged: one process an arm; 100 tokens/s (a) to 200 tokens/s (b).")
    assert not judge([served("http", 100.0, "chat", requests_failed=1)]).good


def test_a_run_is_good_where_nothing_is_wrong_and_nothing_failed() -> None:
    right = check("swiglu", "torch")
    statuses = [check("swiglu", "fused", status) for status in ("ok", "unsupported", "wrong", "failed")]
    assert [judge([right, one]).good for one in statuses] == [True, True, False, False]


def test_the_worst_serving_is_the_one_with_the_largest_share_of_failed_requests() -> None:
    counts = {"a": (3, 8), "b": (1, 2), "c": (4, 9)}
    rows = [
        served("engine", 9.0, "", arm={"swiglu": name}, requests_failed=failed, requests=requests)
        for name, (failed, requests) in counts.items()
    ]
    assert verdict(rows).startswith("Requests failed in 3 of 3 servings (the most: 1 of 2, b)")
    assert verdict(rows[2:]).startswith("4 of 9 requests failed. ")
    chats = [one.model_copy(update={"workload": "chat"}) for one in rows]
    assert verdict(chats).startswith("Requests failed in 3 of 3 servings (the most: 1 of 2, chat, b)")


def test_comparisons_that_differ_are_counted() -> None:
    arms = [served("engine", 9.0, "chat", arm={"swiglu": name}) for name in ("torch", "a", "b")]
    one = [*arms, parity({"swiglu": "a"}, 3), parity({"swiglu": "b"}, 4)]
    assert verdict(one).startswith("1 of 2 comparisons with the first arm differs in some token. ")
    two = [*arms, parity({"swiglu": "a"}, 3), parity({"swiglu": "b"}, 2)]
    assert verdict(two).startswith("2 of 2 comparisons with the first arm differ in some token. ")


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
    at_most = [served("engine", 1000.0, "", load_before=2.5, load_after=7.94)]
    assert "(before and after tasks, 1 of 2 times more than 1.25 a core)" in verdict(at_most, host=host)
    assert "busy" not in verdict([at_most[0].model_copy(update={"load_after": 2.5})], host=host)


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
    noise = r"2 of 2 arms timed; no arm's tokens per second differ from those of torch by more than noise "
    assert re.match(noise + r"\(a change of \d+\.\d% would have been found\)", same.verdict.sentence)
    wild = [row.model_copy(update={"tokens_per_s": 10.0 ** (row.replicate or 0)}) for row in repeated({"a": 1, "b": 1})]
    wild[1] = wild[1].model_copy(update={"tokens_per_s": 1000.0})
    wildest = report_of(read_run(record(tmp_path / "d", wild)))
    assert "(a change of >999% would have been found)" in wildest.verdict.sentence
    slower = report_of(read_run(record(tmp_path / "c", repeated({"torch": 1000.0, "fused": 500.0}))))
    assert slower.verdict.sentence == "2 of 2 arms timed; no arm is faster than torch, and 1 of 1 others are slower."


def compared(
    arm: str,
    ratio: float,
    outcome: Outcome,
    ends: tuple[float, float] = (0.5, 4.0),
    place: str = "engine, chat, float32",
    figure: str = "tokens_per_s",
) -> judgement.Verdict:
    """What a test says of one figure of an arm, beside the arm torch."""
    effect = Effect(outcome, ratio, *ends, smallest=0.02)
    return judgement.Verdict(place, arm, figure, "", effect, 1.0, ratio, (5, 5), False, None, "torch")


def said_of(*verdicts: judgement.Verdict) -> str:
    """What the verdict makes of what was compared; nothing else is known of the run."""
    found = verdict_of([], 5, True, Comparison("run", "", verdicts, 0.0), {})
    return " ".join([found.sentence, *found.notes])


def test_a_peer_that_really_differs_is_told_from_the_first_arms_side() -> None:
    slow, fast = compared("peer a", 0.5, "worse", (0.4, 0.625)), compared("peer b", 2.0, "better", (1.6, 2.5))
    same, other = compared("peer c", 1.1, "within noise"), compared("fused", 0.9, "worse")
    text = said_of(slow, fast, same, other)
    assert "; torch serves 2 times the tokens per second of a (1.6 to 2.5)" in text
    assert "; torch serves 0.5 times the tokens per second of b (0.4 to 0.625)" in text
    assert text.count("torch serves ") == 2


def test_of_arms_that_are_really_faster_the_fastest_is_told_to_the_digit_that_shows_it() -> None:
    sure, wide = compared("fused", 1.00312, "better"), compared("wide", 1.4, "within noise")
    assert said_of(sure, wide) == ("The arm fused serves 1.003 times the tokens per second of torch (0.5 to 4).")
    assert said_of(compared("a", 1.25, "better"), compared("b", 2.126, "better")) == (
        "The arm b serves 2.13 times the tokens per second of torch (0.5 to 4)."
    )


def test_what_is_served_is_judged_and_what_cannot_be_told_comes_last() -> None:
    unknown = [compared(name, 1.5, "cannot tell") for name in "ab"]
    server = compared("b", 2.0, "better", place="http, chat")
    elsewhere = compared("rtn", 3.0, "better", place="quantization, float32")
    assert said_of(*unknown, server, elsewhere) == (
        "With “http”, the arm b serves 2 times the tokens per second of torch (0.5 to 4). "
        "With “engine, float32”, not judged: of 2 arms there are too few processes."
    )


def test_each_figure_that_users_wait_for_has_its_name_and_the_one_that_differs_most_is_told() -> None:
    names = {"ttft_s.p50": "first token (p50)", "tpot_s.p50": "time per token (p50)", "gap_s.p99": "gap (p99)"}
    for figure, name in names.items():
        others = [compared("near", 1.5, "worse", figure=one) for one in names]
        most = compared("far", 0.5, "better", (0.4, 0.6), figure=figure)
        text = said_of(compared("far", 1.0, "within noise"), *others, most)
        assert text.endswith(
            f"; of what users wait for, the {name} differs most: that of far is 0.5 times that of torch (0.4 to 0.6)."
        )
    assert "wait" not in said_of(
        compared("far", 1.0, "within noise"), compared("far", 9.0, "within noise", figure=figure)
    )


def test_places_are_told_by_all_that_not_all_share_and_the_best_comes_first() -> None:
    def place(*parts: str) -> str:
        return ", ".join(("engine", *parts, "float32"))

    text = said_of(
        compared("fused", 1.5, "better", place=place("a", "workload.input_len=8")),
        compared("fused", 2.5, "better", place=place("b", "workload.input_len=8")),
        compared("fused", 0.5, "worse", place=place("b", "workload.input_len=9")),
    )
    where = [text.lower().index(f"with “{one}”, ") for one in ("b, input_len=8", "a, input_len=8", "b, input_len=9")]
    assert where == sorted(where)


def points(outcomes: str, arm: str = "fused") -> list[judgement.Verdict]:
    """An arm's times at T=1, T=2 and so on: "f" where it is really faster, twice as fast, "s" slower, "n" noise and
    "w" wild noise.
    """
    kinds: dict[str, tuple[float, Outcome]] = {
        "f": (0.5, "better"), "s": (2.0, "worse"), "n": (0.9, "within noise"), "w": (0.1, "within noise"),
    }  # fmt: skip
    return [
        compared(arm, *kinds[one], place=f"swiglu, T={size}, float32", figure="median_us")
        for size, one in enumerate(outcomes, 1)
    ]


@pytest.mark.parametrize(
    ("outcomes", "which", "counted"),
    [
        ("fff", "torch is beaten by fused at 3, up to 2 times as fast.", "3 better"),
        ("fsf", "torch is beaten by fused at 2, up to 2 times as fast (T=1, T=3).", "2 better, 1 worse"),
        ("ffnf", "torch is beaten by fused at 3, up to 2 times as fast (T=1 to T=2, T=4).", "3 better, 1 within noise"),
        ("sn", "no variant is faster than torch.", "1 worse, 1 within noise"),
    ],
)
def test_points_at_which_a_variant_is_faster_are_named(outcomes: str, which: str, counted: str) -> None:
    count = len(outcomes)
    text = f"For swiglu, of {count} points, {which} Of {count} kernel times beside the first variant's, {counted}."
    assert said_of(*points(outcomes)) == text


def test_the_variant_that_is_the_fastest_at_the_most_points_is_told_first() -> None:
    many, few = "many at 2, up to 2 times as fast (T=2 to T=3)", "few at 1, up to 2 times as fast (T=1)"
    found = said_of(*points("fnss", "few"), *points("sffs", "many"), *points("wwww", "wild"))
    assert f"torch is beaten by {many}, {few}." in found
