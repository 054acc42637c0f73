"""What was asked, and what came out, in sentences."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.reporting.numerics import parity_table
from experiments.reporting.question import question_of
from experiments.reporting.rendering import as_html
from experiments.reporting.replicates import merged
from experiments.reporting.report import report_of
from experiments.reporting.tables import tables_of
from experiments.reporting.verdict import verdict_of
from experiments.runs.reading import read_run
from experiments.runs.rows import EngineRow, KernelRow, ParityRow, Row
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


def verdict(rows: list[Row], processes: int = 1, finished: bool = True) -> str:
    found = verdict_of(merged(rows), processes, finished)
    return " ".join([found.sentence, *found.notes])


def test_all_is_well() -> None:
    arms = [served(EngineRow, 1000.0, ""), served(EngineRow, 1500.0, "", arm={"swiglu": "fused"})]
    rows = [check("swiglu", "torch"), check("swiglu", "fused"), *arms, parity({"swiglu": "fused"}, 4)]
    found = verdict_of(rows, 1, True)
    assert found.good
    assert found.sentence == (
        "All 2 variants were right and all 2 arms gave the same tokens; the arm fused was the fastest: 1,500 "
        "tokens/s, 1.5 times the first arm's (torch)."
    )
    assert found.notes == (
        "One process each: no test says which of these differences are noise; with replicates: 5, tk compare does.",
    )


def test_speeds_of_other_sizes_dtypes_and_models_are_not_compared() -> None:
    sizes = {"torch": {1: 100.0, 256: 6000.0}, "fused": {1: 150.0, 256: 7200.0}}
    rows: list[Row] = [
        served(EngineRow, speed, "", arm={"swiglu": name}, settings={"workload.num_requests": size})
        for name, speeds in sizes.items()
        for size, speed in speeds.items()
    ]
    assert verdict(rows).startswith(
        "With “num_requests 1”, the arm fused was the fastest: 150 tokens/s, 1.5 times the first arm's (torch). "
        "With “num_requests 256”, the arm fused was the fastest: 7,200 tokens/s, 1.2 times the first arm's (torch). One"
    )
    told = []
    for key, names in (("dtype", ("float32", "bfloat16")), ("model", ("small", "large"))):
        rows = [
            served(EngineRow, speed, "", settings={key: name}, **({"dtype": name} if key == "dtype" else {}))
            for name, speed in zip(names, (10.0, 1000.0), strict=True)
        ]
        told.append(verdict(rows))
    assert told == [
        f"With “{one}”, this engine served 10 tokens/s. With “{other}”, this engine served 1,000 tokens/s."
        for one, other in (("dtype float32", "dtype bfloat16"), ("model small", "model large"))
    ]


def test_a_peer_is_told_beside_the_arm_of_its_sizes() -> None:
    (speedup,) = [row for row in everything() if row.stage == "speedup"]
    sizes: list[dict[str, Any]] = [{"workload.num_requests": size} for size in (1, 2)]
    rows: list[Row] = [
        *(served(EngineRow, 1000.0, "chat", settings=one) for one in sizes),
        speedup.model_copy(update={"settings": sizes[1]}),  # type: ignore[list-item]
    ]
    text = verdict(rows)
    assert "With “num_requests 2”, this engine served 1,000 tokens/s, 2 times the tokens per second of trans" in text
    assert "num_requests 1”, this engine served 1,000 tokens/s. " in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([{}], "all 2 arms gave the same tokens;"),
        ([{"workload.input_len": 8}, {"workload.input_len": 9}], "the same tokens with each of 2 workloads;"),
        ([{"model": "a"}, {"model": "b"}], "all 2 arms gave the same tokens with each of 2 models;"),
        (
            [{"model": name, "workload.input_len": size} for name in "ab" for size in (8, 9)],
            "all 2 arms gave the same tokens with each of 4 workloads and models;",
        ),
    ],
)
def test_only_arms_that_were_compared_gave_the_same_tokens(settings: list[dict[str, Any]], said: str) -> None:
    rows: list[Row] = []
    for one in settings:
        rows += [served(EngineRow, 1000.0, "chat", arm={"swiglu": name}, settings=one) for name in ("torch", "fused")]
        rows.append(parity({"swiglu": "fused"}, 4, settings=one))
    assert said in verdict(rows).lower()
    lines = tables_of(rows)["engine"].lines
    assert [line[-2].text for line in lines if not isinstance(line, str)] == ["first arm", "yes"] * len(settings)
    caption = parity_table([row for row in rows if isinstance(row, ParityRow)], []).caption
    whose = "(swiglu torch)." if len(settings) == 1 else "of the same model, workload and sizes (swiglu torch)."
    assert caption.startswith(f"Beside the first arm {whose}")


def test_requests_that_failed_are_said_everywhere(tmp_path: Path) -> None:
    whole = served(EngineRow, 1000.0, "", arm={"swiglu": "torch"})
    short = served(
        EngineRow, 5000.0, "", arm={"swiglu": "fused"}, requests_failed=3, requests_error="the prompt is too long"
    )
    rows: list[Row] = [whole, short, parity({"swiglu": "fused"}, 4, workload="", requests=1, requests_equal=1)]
    found = verdict_of(rows, 1, True)
    assert not found.good
    assert found.sentence == (
        "3 of 4 requests failed (fused) and all 2 arms gave the same tokens to the requests that both served; the arm "
        "torch served 1,000 tokens/s (1 that failed more requests left out)."
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


def test_what_is_wrong_comes_first_and_a_cut_run_says_so() -> None:
    text = verdict(everything(), finished=False)  # type: ignore[arg-type]
    assert text.startswith("2 of 4 variants are not right (swiglu.crash, swiglu.wrong) and 1 of 1 comparisons")
    assert "With “chat”, 2 times the tokens per second of transformers padded (IQR 0.10)." in text
    assert "; the lowest perplexity is rtn's at 4 bits (27); the dense model's is 26.5." in text
    assert text.endswith("The run has not ended: what follows is what it knew when it was cut off.")
    assert not verdict_of(everything(), 1, True).good  # type: ignore[arg-type]


def test_a_single_arm_is_told_beside_its_peers() -> None:
    rows = [row for row in everything() if row.stage in ("speedup", "peers")]
    text = verdict([served(EngineRow, 1000.0, "chat"), *rows])  # type: ignore[list-item]
    assert text.startswith(
        "This engine served 1,000 tokens/s, 2 times the tokens per second of transformers padded (IQR 0.10). One"
    )


def test_nothing_is_made_of_what_was_not_measured() -> None:
    interpreted = [served(EngineRow, None, "")]
    assert verdict(interpreted) == "No arm's speed was measured (swiglu interpreted on a CPU: not measured)."
    one = [served(EngineRow, 1000.0, ""), served(EngineRow, None, "", arm={"swiglu": "fused"})]
    assert verdict(one) == "The arm torch served 1,000 tokens/s, and the other arm was not timed."
    assert verdict([kernel("swiglu", "fused", None, {"T": 1})]) == (
        "No speed was measured (interpreted: not measured)."
    )
    assert verdict([]) == "Nothing was measured."
    assert not verdict_of([], 1, True).good


def test_medians_nearer_than_their_spreads_are_said_to_overlap() -> None:
    arms = [served(EngineRow, 1000.0, ""), served(EngineRow, 1050.0, "", arm={"swiglu": "fused"})]
    assert "1.05 times the first arm's (torch) (nearer than their spreads)" in verdict(arms)


def test_kernels_alone_by_op() -> None:
    times = [("torch", 3.0, 1), ("fused", 2.0, 1), ("torch", 3.0, 2), ("fused", 4.5, 2), ("torch", 9.0, 4)]
    rows: list[Row] = [kernel("swiglu", name, us, {"T": size}) for name, us, size in (*times, ("fused", 3.0, 4))]
    assert verdict(rows).startswith("For swiglu, fused was the fastest at 2 of 3 points, up to 3 times as fast as")


def test_the_fastest_variant_is_told_by_points_beside_the_first() -> None:
    times = {"torch": (3.0, 4.0, 5.0, 9.0, 9.0), "fused": (6.0, 2.0, 1.0, 8.0, 9.1), "tiled": (9.0, 9.0, 9.0, 2.0, 9.2)}
    rows: list[Row] = [
        kernel("swiglu", name, us, {"T": 2**power}) for name, some in times.items() for power, us in enumerate(some)
    ]
    assert verdict(rows).startswith(
        "For swiglu, torch was the fastest at 2 of 5 points, up to 2 times as fast as the next (T=1, T=16), "
        "fused at 2, up to 5 times as fast as torch (T=2 to T=4), tiled at 1, up to 4.5 times as fast as torch (T=8). "
    )
    alone = [row for row in rows if isinstance(row, KernelRow) and row.variant == "torch"]
    assert verdict([*alone]) == (
        "Swiglu.torch was timed, beside no other variant of the same op; swiglu.torch took 3 us (T=1) to 9 us (T=8)."
    )


def waiting(gap: float, ttft: float) -> dict[str, dict[str, float]]:
    return {"gap_s": {**QUANTILES, "p99": gap}, "ttft_s": {**QUANTILES, "p50": ttft}}


def test_what_users_wait_for_is_told_where_it_differs_more_than_the_throughput() -> None:
    chunks = {
        16: (1000.0, waiting(0.004, 0.012)),
        64: (1100.0, waiting(0.008, 0.01)),
        256: (900.0, waiting(0.04, 0.008)),
    }
    rows: list[Row] = [
        served(EngineRow, speed, "", settings={"max_chunk_tokens": size}, **waits)
        for size, (speed, waits) in chunks.items()
    ]
    assert verdict(rows).startswith(
        "The arm max_chunk_tokens 64 was the fastest: 1,100 tokens/s, 1.1 times the first arm's (max_chunk_tokens 16) "
        "(nearer than their spreads); the gap (p99) differs more: with max_chunk_tokens 256 it is 10 times that with "
        "max_chunk_tokens 16. One process each: no test"
    )


def test_of_five_processes_the_largest_real_difference_in_waiting_is_told(tmp_path: Path) -> None:
    rows = repeated({"torch": 1000.0, "fused": 1000.0}, {"fused": waiting(0.04, 0.0009)})
    sentence = report_of(read_run(record(tmp_path / "run", rows))).verdict.sentence
    assert sentence.startswith("No arm's tokens per second differ from those of torch by more than noise (a change of ")
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
        "For swiglu, of 3 points, torch is beaten by fused at 2, up to 2.5 times as fast (T=1 to T=2)."
    )
    assert found.notes == ("Of 3 kernel times beside the first variant's, 2 better, 1 worse.",)


def test_what_is_the_same_is_not_told_as_so_many_times() -> None:
    rows: list[Row] = [served(EngineRow, 1000.0, "", arm={"swiglu": name}) for name in ("torch", "fused")]
    assert "1,000 tokens/s, about the next one's (fused)" in verdict(rows)
    kernels: list[Row] = [kernel("swiglu", name, 3.0, {"T": 1}) for name in ("torch", "fused")]
    assert "torch was the fastest at 1 of 1 points, about as fast as the next" in verdict(kernels)
    (speedup,) = [row for row in everything() if row.stage == "speedup"]
    peers = [served(EngineRow, 1000.0, "chat"), speedup.model_copy(update={"speedup": 1.001})]
    assert "1,000 tokens/s, about the tokens per second of transformers padded" in verdict(peers)


def repeated(speeds: dict[str, float], waits: Mapping[str, dict[str, dict[str, float]]] | None = None) -> list[Row]:
    """Five processes of each arm, each a little off."""
    return [
        served(
            EngineRow,
            speed * (1 + 0.01 * (index % 3)),
            "",
            arm={"swiglu": name},
            replicate=index,
            task=f"{name}{index}",
            **(waits or {}).get(name, {}),
        )
        for index in range(5)
        for name, speed in speeds.items()
    ]


def test_with_five_processes_a_test_says_what_is_noise(tmp_path: Path) -> None:
    faster = report_of(read_run(record(tmp_path / "a", repeated({"torch": 1000.0, "fused": 1500.0}))))
    assert faster.verdict.sentence.startswith("The arm fused serves 1.5 times the tokens per second of torch (")
    assert faster.verdict.notes == ()
    throughput = next(one for one in faster.pictures if one.name == "throughput")
    assert throughput.records[0][-1] == pytest.approx((1000, 1010, 1020, 1000, 1010))  # of each process one
    assert "small marks: what they are of. some CPU, 1 thread; wall clock; spread: quartiles of 5" in throughput.caption
    section = next(one for one in faster.sections if one.name == "differences")
    assert section.notes == ("The arms of a: of 4 figures, 1 better, 3 within noise.",)
    assert any(not isinstance(line, str) and line[-1].tone == "better" for line in section.tables[0].lines)
    same = report_of(read_run(record(tmp_path / "b", repeated({"torch": 1000.0, "fused": 1000.0}))))
    assert same.verdict.sentence.startswith(
        "No arm's tokens per second differ from those of torch by more than noise (a change of "
    )
    slower = report_of(read_run(record(tmp_path / "c", repeated({"torch": 1000.0, "fused": 500.0}))))
    assert slower.verdict.sentence == "No arm is faster than torch, and 1 of 1 others are slower."
