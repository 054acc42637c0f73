"""From a kernel alone to tokens: one table of what a swap did at every level, and the rest of the step by name."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.reporting.arms import merge_processes
from experiments.reporting.effects import Ratio, effects_of, effects_table
from experiments.reporting.steps import GEMMS, steps_of
from experiments.reporting.tables import tables_of
from experiments.runs.comparison import MIN_REPLICATES, Effect, Outcome
from experiments.runs.reading import read_run
from experiments.runs.rows import COLUMNS, Row
from experiments.runs.verdicts import Paired, compare_arms
from tests.experiments.conftest import Run, checkpoint
from tests.experiments.reporting.recorded import record
from tkernels import OPS
from tkernels.contract import Tensor
from tkernels.ops.grouped_matmul._argument import ExpertWeights

__all__ = ["checkpoint"]

COMMON: dict[str, Any] = {"run_id": "r", "dtype": "float32", "device": "cuda", "status": "ok"}


def kernel(variant: str, point: str, median_us: float | None, **settings: Any) -> Row:
    names = COLUMNS["kernels"]["ok"]
    nothing = dict.fromkeys(set(names) - {"median_us"}) | {"roofline_reason": "no figures"}
    nothing |= {"point": point, "bytes_moved": 1, "speed_reason": None if median_us else "interpreted"}
    about = {"arm": {"swiglu": variant}, "op": "swiglu", "variant": variant, "settings": settings}
    return Row(stage="kernels", **COMMON, **about, **nothing, median_us=median_us)


def engine(swiglu: str, decode: str, rate: float | None, **settings: Any) -> Row:
    nothing = dict.fromkeys(set(COLUMNS["engine"]["ok"]) - {"tokens_per_s", "workload", "speed_reason"})
    arm = {"swiglu": swiglu, "paged_decode": decode, "rms_norm": "torch"}
    reason = None if rate else "interpreted"
    return Row(
        stage="engine",
        **COMMON,
        arm=arm,
        settings=settings,
        workload="w",
        tokens_per_s=rate,
        speed_reason=reason,
        **nothing,
    )


def step(of: Row, name: str, category: str, self_us: float, total_us: float, clock: str = "device") -> Row:
    op, _, variant = name.partition(".")
    about = {"op": op, "variant": variant} if category == "op" else {}
    return Row(stage="step",
        **COMMON, arm=of.arm, settings=of.settings, workload=of.workload, range=name, category=category, clock=clock,
        calls=10, total_us=total_us, self_us=self_us, steps=10, step_us=1000.0, share=total_us / 1000,
        speed_reason=None, **about,
    )  # fmt: skip


def check(variant: str, point: str, error: float) -> Row:
    about = {"arm": {"swiglu": variant}, "op": "swiglu", "variant": variant, "point": point, "seed": 0}
    return Row(stage="check", **COMMON, **about, max_error_ratio=error, rms_error_ratio=None)


TORCH, FUSED = engine("torch", "torch", 1000.0), engine("fused", "torch", 1030.0)
ROWS: list[Row] = [
    kernel("torch", "decode", 28.0), kernel("fused", "decode", 20.0),
    kernel("torch", "prefill", 56.0), kernel("fused", "prefill", 40.0),
    check("fused", "decode", 0.4), check("fused", "prefill", 0.7), check("torch", "decode", 0.9),
    TORCH, FUSED,
    step(TORCH, "swiglu.torch", "op", 150, 150), step(FUSED, "swiglu.fused", "op", 110, 110),
    step(FUSED, "swiglu.fused", "op", 20, 20, "host"),
    Row(stage="parity",
        **COMMON, arm=FUSED.arm, workload="w", first_arm=TORCH.arm, tokens_equal=False, requests_equal=3, requests=4,
        first_divergence={"request": 2, "place": 5, "margin": 0.01}, logprob_drift=2e-4,
    ),
]  # fmt: skip


def test_one_line_says_alone_of_the_step_and_end_to_end() -> None:
    first, effect = effects_of(ROWS, ["swiglu"])
    assert (first.variant, first.alone, first.share, first.end_to_end, first.error) == (
        "torch", Ratio(1), 0.15, Ratio(1), 0.9,
    )  # fmt: skip
    assert effect.alone is not None
    assert effect.alone.value == pytest.approx(1.4)
    assert effect.share == 0.11
    assert effect.end_to_end == Ratio(pytest.approx(1.03))
    assert (effect.error, effect.parity) == (0.7, ROWS[-1])  # whose drift and first difference the table shows
    table = effects_table(ROWS, ["swiglu"])
    assert table is not None
    heading, before, line = table.lines
    assert [cell.text for cell in before if not isinstance(cell, str)][-3:] == ["0.90", "-", "-"]
    assert heading == "w: swiglu"
    same = effects_table([*ROWS[:-1], ROWS[-1].model_copy(update={"first_divergence": None})], ["swiglu"])
    assert same is not None
    assert getattr(same.lines[-1][-1], "text", None) == "never"
    assert [cell.text for cell in line if not isinstance(cell, str)] == [
        "fused", "1.40x", "11.0%", "1.03x", "0.70", "2e-04", "2/5",
    ]  # fmt: skip


def test_a_ratio_has_the_spread_of_both_sides_and_of_every_point() -> None:
    assert Ratio.mean([((103.0, 3.09), (50.0, 2.0))]) == Ratio(pytest.approx(2.06), pytest.approx(2.06 * 0.05))
    points = [((8.0, 0.4), (2.0, 0.0)), ((1.0, 0.0), (1.0, 0.12))]
    assert Ratio.mean(points) == Ratio(pytest.approx(2.0), pytest.approx(2.0 * 0.13 / 2))
    assert Ratio.mean([((8.0, 0.4), (2.0, None))]) == Ratio(pytest.approx(4.0))
    fast, slow = (one.model_copy(update={"tokens_per_s_iqr": iqr}) for one, iqr in ((FUSED, 30.9), (TORCH, 40.0)))
    table = effects_table([slow, fast, *ROWS[-4:]], ["swiglu"])
    assert table is not None
    assert [line[3].text for line in table.lines if not isinstance(line, str)] == ["1.00x", "1.03x (0.05)"]


def test_a_speed_is_as_sure_as_the_time_that_it_is_of() -> None:
    spreads = {"torch": 2.8, "fused": 0.0}
    rows = [row.model_copy(update={"iqr_us": spreads[row.arm["swiglu"]]}) for row in ROWS[:2]]
    (_, effect) = effects_of([*rows, TORCH, FUSED], ["swiglu"])
    assert effect.alone == Ratio(pytest.approx(1.4), pytest.approx(0.14))


def test_alone_is_of_the_arms_own_points_and_of_others_where_there_are_none() -> None:
    two, eight = ([{"workload": "w", "workload.num_requests": number}] for number in (2, 8))
    kernels: list[Row] = []
    for variant, times in {"torch": (10.0, 10.0, 10.0, 10.0), "fused": (5.0, 20.0, 40.0, 80.0)}.items():
        for (point, serves), time in zip({"a": two, "b": eight, "c": eight, "T=1": None}.items(), times, strict=True):
            kernels.append(kernel(variant, point, time).model_copy(update={"serves": serves}))

    def alone(rows: list[Row], **settings: Any) -> list[Ratio | None]:
        arms = [engine(variant, "torch", 100.0, **settings) for variant in ("torch", "fused")]
        return [effect.alone for effect in effects_of([*rows, *arms], ["swiglu"])[1:]]

    assert alone(kernels, **{"workload.num_requests": 2}) == [Ratio(2.0)]
    assert alone(kernels, **{"workload.num_requests": 8}) == [Ratio(pytest.approx((0.5 * 0.25) ** 0.5))]
    assert alone(kernels, **{"workload.num_requests": 3}) == [Ratio(pytest.approx(0.125))]  # no workload asks for it
    assert alone(kernels) == [Ratio(pytest.approx((2 * 0.5 * 0.25) ** (1 / 3)))], "the arms share what is not swept"
    served = [row for row in kernels if row.stage == "kernels" and row.serves]
    assert alone([*served], **{"workload.num_requests": 3}) == [None]


def test_an_arm_that_failed_has_no_effect() -> None:
    about = {**COMMON, "status": "failed", "reason": "crash", "workload": "w"}
    failed = Row(stage="engine", arm={**TORCH.arm, "swiglu": "fused"}, **about)
    assert effects_of([*ROWS, failed], ["swiglu"]) == effects_of(ROWS, ["swiglu"])


def test_five_processes_are_enough_for_a_test_and_four_are_not() -> None:
    rows = replicated(1.2, 0.001)
    for count, said in ((MIN_REPLICATES, "better"), (MIN_REPLICATES - 1, None)):
        some = [row for row in rows if (row.replicate or 0) < count]
        (_, effect) = effects_of(merge_processes(some), ["swiglu"], some)
        assert effect.end_to_end is not None
        assert effect.end_to_end.outcome == said


def replicated(ratio: float, swing: float) -> list[Row]:
    """Two arms in six processes, of which the second is so many times as fast, and its kernel twice as much."""
    rows: list[Row] = []
    for replicate, noise in enumerate((1.0, 1.1, 0.9, 1.05, 0.95, 1.0)):
        own = 1 + swing * (-1) ** replicate
        for variant, factor in (("torch", 1.0), ("fused", ratio * own)):
            time = 10.0 * noise / factor
            timing = kernel(variant, "decode", time).model_copy(update={"min_us": time, "max_us": time})
            parts = (engine(variant, "torch", 1000.0 * noise * factor), timing)
            rows += [one.model_copy(update={"replicate": replicate}) for one in parts]
    return [*rows, *(step(arm, f"swiglu.{arm.arm['swiglu']}", "op", 150, 150) for arm in (TORCH, FUSED))]


@pytest.mark.parametrize(("ratio", "swing", "mark"), [(1.2, 0.001, ""), (0.8, 0.001, ""), (1.001, 0.3, "~")])
def test_a_ratio_is_the_one_that_was_tested_and_says_what_the_test_said(
    ratio: float, swing: float, mark: str, tmp_path: Path
) -> None:
    rows = replicated(ratio, swing)
    run = read_run(record(tmp_path / "run", rows))
    verdicts = {one.figure: one.effect for one in compare_arms(run).verdicts}
    (_, effect) = effects_of(merge_processes(rows), ["swiglu"], rows)
    assert effect.end_to_end is not None
    assert effect.alone is not None
    assert effect.end_to_end.value == pytest.approx(verdicts["tokens_per_s"].ratio)
    said = "within noise" if mark else "better" if ratio > 1 else "worse"
    assert effect.end_to_end.outcome == verdicts["tokens_per_s"].outcome == said
    assert effect.alone.value == pytest.approx(1 / verdicts["median_us"].ratio)
    assert effect.alone.outcome == verdicts["median_us"].outcome == said
    table = tables_of(rows)["effects"]
    assert table.lines[-1][3].text.startswith(f"{mark}{verdicts['tokens_per_s'].ratio:.2f}x (")  # type: ignore[union-attr]
    assert (
        "in brackets the ratio's IQR. Both ratios are those that were tested, of means over processes, beside the "
        "yardstick's; ~: within noise, of several points at each; the others are real differences. error: over"
    ) in table.caption


def test_a_pair_that_the_runs_arms_are_not_compared_by_is_judged_all_the_same() -> None:
    rows: list[Row] = []
    for replicate, noise in enumerate((1.0, 1.1, 0.9, 1.05, 0.95, 1.0)):
        for decode, swiglu in ((d, s) for d in "ab" for s in ("torch", "fused")):
            rate = 1000.0 * noise * (1.2 if swiglu == "fused" else 1.0) * (1.5 if decode == "b" else 1.0)
            rows.append(engine(swiglu, decode, rate).model_copy(update={"replicate": replicate}))
    found = [
        effect.end_to_end for effect in effects_of(merge_processes(rows), ["swiglu"], rows) if effect.variant == "fused"
    ]
    assert found == [Ratio(pytest.approx(1.2), pytest.approx(0), "better")] * 2
    few = effects_of(merge_processes(rows[:8]), ["swiglu"], rows[:8])[1].end_to_end
    assert few is not None
    assert few.outcome is None  # of two processes no test is made


def in_processes(rows: Sequence[Row], count: int) -> list[Row]:
    """So many processes of each row, on a machine that is slower in every other one."""
    return [
        row.model_copy(update={"replicate": replicate} | {
            name: value * (1 + 0.1 * (replicate % 2))
            for name in ("median_us", "tokens_per_s") if (value := getattr(row, name)) is not None
        })
        for replicate in range(count) for row in rows
    ]  # fmt: skip


def test_what_some_processes_lack_cannot_be_told_beside_what_can() -> None:
    arms = in_processes([engine("torch", "torch", 1000.0), engine("fused", "torch", 1200.0)], 6)
    timings = in_processes([kernel("torch", "decode", 28.0), kernel("fused", "decode", 20.0)], 2)
    rows = [*arms, *timings, step(TORCH, "swiglu.torch", "op", 150, 150), step(FUSED, "swiglu.fused", "op", 110, 110)]
    (_, effect) = effects_of(merge_processes(rows), ["swiglu"], rows)
    assert effect.end_to_end == Ratio(pytest.approx(1.2), pytest.approx(0), "better")
    assert effect.alone is not None
    assert (effect.alone.value, effect.alone.outcome) == (pytest.approx(1.4), "cannot tell")
    table = effects_table(merge_processes(rows), ["swiglu"], rows)
    assert table is not None
    assert [cell.text.partition(" ")[0] for cell in table.lines[-1][1:4]] == ["?1.40x", "11.0%", "1.20x"]  # type: ignore[union-attr]
    assert " the others are real differences. ?: of too few processes to tell. error: over" in table.caption
    assert [[getattr(line[place], "tone", None) for place in (1, 3)] for line in table.lines[1:]] == [
        ["", ""], ["cannot tell", "better"],
    ]  # fmt: skip


def test_two_rows_of_one_process_leave_the_medians_without_a_test() -> None:
    rows = in_processes([engine("torch", "torch", 1000.0), engine("fused", "torch", 1200.0)], 6)
    twice = [*rows, *rows[-2:]]
    (_, effect) = effects_of(merge_processes(twice), ["swiglu"], twice)
    assert effect.end_to_end is not None
    assert (effect.end_to_end.value, effect.end_to_end.outcome) == (pytest.approx(1.2), None)


def test_of_several_points_the_spread_and_the_outcome_are_those_of_all() -> None:
    def paired(outcome: Outcome, *ratios: float) -> Paired:
        effect = Effect(outcome, math.exp(math.fsum(map(math.log, ratios)) / len(ratios)))
        return Paired(effect, {place: math.log(ratio) for place, ratio in enumerate(ratios)})

    noise, real = paired("within noise", 2.0, 2.0, 2.0), paired("better", 0.5, 0.5, 0.125, 0.5)
    found = Ratio.judged([noise, real], -1)
    assert found == Ratio(pytest.approx((2 * 0.5**1.5) ** -0.5), pytest.approx((1.0 + 2.0) / 2 - 1.0), "better")
    assert Ratio.judged([noise, noise], 1) == Ratio(pytest.approx(2.0), pytest.approx(0.0), "within noise")


def test_only_arms_that_differ_in_nothing_else_are_compared() -> None:
    arms = [engine(s, d, 100.0, block_size=size) for size in (8, 16) for d in ("a", "b") for s in ("torch", "fused")]
    found = effects_of([*arms, kernel("torch", "decode S=16", 3.0, model="x")], ["swiglu", "paged_decode"])
    assert [(e.op, e.first.arm[e.op], e.variant, e.row.settings["block_size"]) for e in found] == [
        *[("swiglu", "torch", variant, size) for size in (8, 8, 16, 16) for variant in ("torch", "fused")],
        *[("paged_decode", "a", variant, size) for size in (8, 8, 16, 16) for variant in "ab"],
    ]
    assert all(e.row.arm[name] == e.first.arm[name] for e in found for name in e.row.arm if name != e.op)
    assert all(e.row.settings == e.first.settings for e in found)


def test_what_was_not_measured_is_none_and_no_step_is_no_table() -> None:
    rows: list[Row] = [kernel("torch", "decode", 28.0), kernel("fused", "decode", None), engine("torch", "a", 100.0)]
    rows.append(engine("fused", "a", None))
    _, effect = effects_of(rows, ["swiglu"])
    assert (effect.alone, effect.share, effect.end_to_end, effect.parity) == (None, None, None, None)
    assert effects_table(rows, ["swiglu"]) is None
    assert steps_of(rows, rows) == []


def test_the_whole_step_has_a_name_and_adds_up() -> None:
    parts = [
        ("step", "step", 0), ("schedule", "phase", 10), ("prepare", "phase", 40), ("forward", "phase", 50),
        ("sample", "phase", 100), ("wait", "phase", 5), ("commit", "phase", 15), ("layer 0", "layer", 30),
        ("lm_head", "part", 20), ("matmul.persistent", "op", 400), ("dequant_gemm.auto", "op", 80),
        ("swiglu.fused", "op", 110), ("device idle", "gap", 140),
    ]  # fmt: skip
    rows = [step(FUSED, name, category, own, own) for name, category, own in parts]
    found = steps_of(rows, [FUSED])[0].whole
    assert found == pytest.approx(
        {
            "ops": 0.11, "GEMMs": 0.48, "model": 0.1, "sample": 0.1, "prepare": 0.04, "schedule": 0.01, "commit": 0.02,
            "gaps": 0.14,
        }
    )  # fmt: skip
    assert sum(found.values()) == pytest.approx(1)
    table = tables_of([FUSED, *rows])["steps"]
    (line,) = table.lines
    assert [cell.text for cell in line if not isinstance(cell, str)][:4] == ["w, this engine", "100", "11%", "48%"]


def test_every_product_with_a_weight_is_a_gemm() -> None:
    products = {
        name
        for name, op in OPS.items()
        for argument, rule in op.contract.arguments.items()
        if isinstance(rule, ExpertWeights)
        or (argument == "weight" and not (isinstance(rule, Tensor) and len(rule.shape) == 1))
    }
    assert products == set(GEMMS)


def test_a_run_records_the_steps_of_every_arm_that_it_timed(run: Run, checkpoint: Path) -> None:
    workload = {"kind": "synthetic", "num_requests": 3, "input_len": 5, "output_len": 4, "seed": 0}
    folder = run(
        model={"path": str(checkpoint)}, repeats=2, workload=workload, kernels={"swiglu": ["torch", "fused"]},
        scheduler={"kv_cache_bytes": 1 << 16},
    )  # fmt: skip
    engines = [row for row in folder.rows if row.stage == "engine"]
    steps = [row for row in folder.rows if row.stage == "step"]
    timed = [row for row in steps if row.arm["swiglu"] == "torch"]
    assert {row.clock for row in timed} == {"host"}
    by_range = {str(row.range): row for row in timed}
    assert by_range["swiglu.torch"].op == "swiglu"
    assert by_range["swiglu.torch"].calls == 2 * by_range["step"].calls
    assert by_range["step"].steps == by_range["step"].calls == 2 * (engines[0].steps or 0)
    assert sum(row.self_us or 0 for row in timed) == pytest.approx(by_range["step"].step_us)
    assert {"schedule", "prepare", "forward", "sample", "wait", "commit", "layer 0", "layer 1"} <= set(by_range)
    (untimed,) = [row for row in steps if row.arm["swiglu"] == "fused"]
    assert (untimed.total_us, untimed.range) == (None, "step")
    assert untimed.speed_reason == "swiglu interpreted on a CPU: not measured"
    table = tables_of(folder.rows)["effects"]
    line = table.lines[-1]
    assert [cell.text for cell in line if not isinstance(cell, str)][:2] == ["fused", "n/m"]


def test_the_table_says_what_its_columns_are_and_what_an_arm_has_besides() -> None:
    arms = [
        engine(name, "torch", 9.0, **{"workload.num_requests": size}) for name in ("torch", "fused") for size in (8, 16)
    ]
    rows = [*arms, *(step(arm, f"swiglu.{arm.arm['swiglu']}", "op", 150, 150) for arm in arms)]
    table = effects_table(rows, ["swiglu"])
    assert table is not None
    assert table.title == "From a kernel alone to tokens"
    assert table.caption == (
        "alone: speed of the kernel over the first variant's, the geometric mean over the points of the arm's own "
        "workload; of step: its share of a step; tokens/s: over those with the first variant; in brackets the ratio's "
        "IQR. error: over what is allowed; drift, differs: of log-probabilities, and request/token of the first other "
        "token, beside the first arm of the same model and workload. n/m: not measured."
    )
    names = ["variant", "with", "alone", "of step", "tokens/s", "error", "drift", "differs"]
    assert [column.name for column in table.columns] == names
    lines = [[cell.text for cell in line] for line in table.lines if not isinstance(line, str)]
    assert lines == [
        [variant, f"num_requests {size}", "n/m", "15.0%", "1.00x", "-", "-", "-"]
        for size in (8, 16) for variant in ("torch", "fused")
    ]  # fmt: skip
