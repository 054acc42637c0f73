"""Comparisons of recorded runs and of the arms of one."""

import io
import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from experiments.document import ExperimentError
from experiments.reporting.comparison_tables import print_comparison
from experiments.runs.comparison import LEVEL, POWER, Sample, judge
from experiments.runs.differences import changed_facts, share_yardstick
from experiments.runs.drift import drift_of, slope_of, slope_spread
from experiments.runs.reading import RecordedRun, read_run
from experiments.runs.table import times_of
from experiments.runs.verdicts import Comparison, beside_the_first, compare_arms, compare_runs, judge_pairs
from tests.experiments.reporting.recorded import parity, record, served
from tests.experiments.runs.folders import ENVIRONMENT, RESOLVED, kernel_row, write_run


def timed(seed: int, replicates: int = 8, *, yardstick: bool = False, **factors: float) -> list[dict[str, Any]]:
    """Rows of variants that take `factors` times 10 us, 1% of noise each; every process is up to half slower, which the
    yardstick shows.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for replicate in range(replicates):
        slow = 1 + 0.5 * generator.random()
        for variant, factor in factors.items():
            noise = np.exp(0.01 * generator.standard_normal(2))
            extra = {"yardstick_us": 90.0 * slow * noise[0]} if yardstick else {}
            rows.append(kernel_row(10 * factor * slow * noise[1], variant, replicate, **extra))
    return rows


def failed(row: dict[str, Any]) -> dict[str, Any]:
    keep = ("run_id", "stage", "task", "replicate", "arm", "op", "variant", "dtype", "device", "point")
    return {**{key: row[key] for key in keep}, "status": "failed", "reason": "out of memory"}


def recorded(tmp_path: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> RecordedRun:
    return read_run(write_run(tmp_path / name, rows, **more))


def outcomes(found: Comparison) -> dict[str, str]:
    return {verdict.arm: verdict.effect.outcome for verdict in found.verdicts}


def test_two_runs_of_the_same_are_within_noise_and_a_slower_variant_is_worse(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, yardstick=True, torch=1, fused=2))
    same = recorded(tmp_path, "b", timed(1, yardstick=True, torch=1, fused=2))
    slower = recorded(tmp_path, "c", timed(2, yardstick=True, torch=1, fused=2.3))
    assert outcomes(compare_runs(first, same)) == {"torch": "within noise", "fused": "within noise"}
    found = compare_runs(first, slower)
    assert outcomes(found) == {"torch": "within noise", "fused": "worse"}
    fused = found.verdicts[1]
    assert fused.effect.low is not None
    assert fused.effect.high is not None
    assert fused.effect.low < 1.15 < fused.effect.high
    assert fused.effect.smallest is not None
    assert fused.effect.smallest < 0.15
    assert fused.beside_yardstick
    assert fused.processes == (8, 8)
    assert (fused.place, fused.figure, fused.unit) == ("swiglu, decode, float32", "median_us", "us")
    assert outcomes(compare_runs(slower, first))["fused"] == "better"


def test_without_a_yardstick_the_machine_hides_it_and_the_smallest_change_says_so(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, torch=1, fused=2))
    slower = recorded(tmp_path, "c", timed(2, torch=1, fused=2.3))
    found = compare_runs(first, slower)
    assert outcomes(found)["fused"] == "within noise"
    smallest = found.verdicts[1].effect.smallest
    assert smallest is not None
    assert smallest > 0.15
    assert not found.verdicts[1].beside_yardstick


@pytest.mark.parametrize(
    "other",
    [
        {"environment": {**ENVIRONMENT, "versions": {"torch": "2.14", "triton": "3.5"}}},
        {"environment": {**ENVIRONMENT, "host": {"torch_threads": 2}}},
    ],
    ids=["torch", "threads"],
)
def test_yardsticks_of_other_work_are_left_out(tmp_path: Path, other: dict[str, Any]) -> None:
    first = recorded(tmp_path, "a", timed(0, yardstick=True, torch=1, fused=2))
    second = recorded(tmp_path, "b", timed(1, yardstick=True, torch=1, fused=2), **other)
    found = compare_runs(first, second, across=["threads"])
    assert not any(verdict.beside_yardstick for verdict in found.verdicts)


def test_yardsticks_of_other_versions_of_rows_are_other_work(tmp_path: Path) -> None:
    run = recorded(tmp_path, "a", timed(0, torch=1))
    older = replace(run, meta={**run.meta, "rows_version": 1})
    assert share_yardstick(run, run)
    assert share_yardstick(older, older)
    assert not share_yardstick(run, older)


def test_on_one_thread_slopes_are_known_better_and_smaller_changes_are_seen(tmp_path: Path) -> None:
    smallest = []
    for threads in (1, 2):
        environment = changed(dict(ENVIRONMENT), "host", "torch_threads", to=threads)
        first, second = (
            recorded(tmp_path, f"{seed} of {threads}", timed(seed, yardstick=True, torch=1), environment=environment)
            for seed in range(2)
        )
        smallest.append(compare_runs(first, second).verdicts[0].effect.smallest or 0.0)
    assert 0 < smallest[0] < smallest[1]


def test_figures_are_geometric_means_over_processes(tmp_path: Path) -> None:
    times = {"torch": (1.0, 4.0, 2.0, 2.0, 2.0), "fused": (9.0, 1.0, 3.0, 3.0, 3.0)}
    rows = [kernel_row(us, name, replicate) for name, each in times.items() for replicate, us in enumerate(each)]
    run = recorded(tmp_path, "a", rows)
    (verdict,) = compare_arms(run).verdicts
    assert (verdict.arm, verdict.beside, verdict.unit, verdict.reason) == ("fused", "torch", "us", None)
    assert (verdict.first, verdict.second, verdict.effect.ratio) == tuple(map(pytest.approx, (2.0, 3.0, 1.5)))
    other = recorded(tmp_path, "b", [{**row, "median_us": 3 * row["median_us"]} for row in rows])
    torch, fused = compare_runs(run, other).verdicts
    assert (torch.first, torch.second, fused.first, fused.second) == tuple(map(pytest.approx, (2.0, 6.0, 3.0, 9.0)))
    assert (torch.beside, fused.beside) == ("", "")


def test_a_comparison_of_arms_has_nothing_of_a_second_run(tmp_path: Path) -> None:
    found = compare_arms(recorded(tmp_path, "a", timed(0, torch=1, fused=1))).as_json()
    assert (found["first"], found["second"], found["across"], found["level"], found["power"]) == (
        "a",
        "",
        {},
        0.005,
        0.95,
    )
    nothing = ("circumstances", "changed", "only_first", "only_second", "repairs", "cut_off")
    assert [found[name] for name in nothing] == [()] * len(nothing)


def test_what_the_yardstick_explains_of_arms_is_as_sure_as_its_slope(tmp_path: Path) -> None:
    """One arm takes as long as the other, but the yardstick beside it a tenth longer, by what nobody can tell."""
    rows = [
        kernel_row(us * (1 + 1e-4 * (replicate % 2)), name, replicate, yardstick_us=yardstick)
        for replicate in range(6)
        for name, us, yardstick in (("torch", 10.0, 100.0), ("fused", 10.0 + 1e-3 * replicate, 110.0))
    ]
    (fused,) = compare_arms(recorded(tmp_path, "a", rows)).verdicts
    assert fused.beside_yardstick
    assert fused.effect.ratio == pytest.approx(1 / 1.1, rel=1e-3)
    assert fused.effect.outcome == "within noise"
    error, quantile = 0.5 * math.log(1.1), NormalDist().inv_cdf  # half of a slope of 1 is unknown, of what it explains
    edge, found = quantile(1 - LEVEL / 2) * error, quantile(POWER) * error
    assert fused.effect.low == pytest.approx(math.exp(-edge) / 1.1, rel=0.01)
    assert fused.effect.smallest == pytest.approx(math.expm1(edge + found), rel=0.01)


def test_what_was_learnt_of_the_slope_is_no_longer_known_of_its_processes(tmp_path: Path) -> None:
    moved, noise = (0.3, -0.2, 0.1, -0.3, 0.2, -0.1), (0.01, 0.02, -0.03, 0.01, -0.02, 0.01)
    rest = [1.5 * yardstick + own for yardstick, own in zip(moved, noise, strict=True)]
    rows = [kernel_row(1.0, "torch", place, yardstick_us=1.0) for place in range(6)]
    for place, (yardstick, figure) in enumerate(zip(moved, rest, strict=True)):
        rows.append(kernel_row(math.exp(figure), "fused", place, yardstick_us=math.exp(yardstick)))
    (verdict,) = compare_arms(recorded(tmp_path, "a", rows)).verdicts
    slope = slope_of([(rest, moved)], slope_spread())
    assert slope.spent > 0.9
    left = slope.take_off(rest, moved)
    counted, free = (Sample([left], spent=spent).difference(drift_of([left])) for spent in (slope.spent, 0.0))
    assert counted.df < free.df
    expected = judge({"fused": counted}, {"fused": "lower"})["fused"]
    assert verdict.effect.low == pytest.approx(expected.low)
    assert verdict.effect.high == pytest.approx(expected.high)


def test_arms_of_one_run_are_paired_by_their_processes(tmp_path: Path) -> None:
    found = compare_arms(recorded(tmp_path, "a", timed(0, torch=1, fused=1.15, same=1)))
    assert outcomes(found) == {"fused": "worse", "same": "within noise"}
    smallest = found.verdicts[0].effect.smallest
    assert smallest is not None
    assert smallest < 0.15


def test_few_processes_tell_nothing_and_it_is_said_how_to_get_more(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, 4, torch=1))
    second = recorded(tmp_path, "b", timed(1, 5, torch=3))
    (verdict,) = compare_runs(first, second).verdicts
    assert verdict.effect.outcome == "cannot tell"
    assert verdict.effect.ratio == pytest.approx(3, rel=0.3)
    assert verdict.effect.low is None
    assert verdict.reason == "4 and 5 processes; 5 each are needed: put `replicates: 5` or more into the YAML"


def test_a_replicate_that_failed_is_one_less(tmp_path: Path) -> None:
    rows = timed(0, 6, torch=1, fused=1)
    rows[3] = failed(rows[3])
    found = compare_arms(recorded(tmp_path, "a", rows))
    assert found.verdicts[0].processes == (5, 5)
    assert found.verdicts[0].effect.outcome == "within noise"


def changed(environment: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(environment))
    inside = copy
    for key in path[:-1]:
        inside = inside.setdefault(key, {})
    inside[path[-1]] = to
    return copy


WORKLOAD = {"kind": "synthetic", "num_requests": 4}


@pytest.mark.parametrize(
    ("what", "environment", "resolved", "message"),
    [
        ("device", ("device", "name"), None, "device of a and b: name: some CPU, then other"),
        ("device", ("device", "type"), None, "device of a and b: type: cpu, then other"),
        ("device", ("device", "arch"), None, "device of a and b: arch: null, then other"),
        ("device", ("device", "triton"), None, "device of a and b: triton: null, then other"),
        ("threads", ("host", "torch_threads"), None, "threads of a and b: 1, then other"),
        ("dtype", None, ("dtype",), "dtype of a and b: float32, then other"),
        ("model", None, ("model", "preset"), 'model of a and b: null, then {"preset": "other"}'),
        ("model", ("model", "files", "config.json"), None, "model of a and b"),
        ("workload", None, ("workload", "num_requests"), "workload of a and b: num_requests: 4, then other"),
    ],
)
def test_what_decides_speeds_is_not_compared_across_without_being_told(
    tmp_path: Path, what: str, environment: Any, resolved: Any, message: str
) -> None:
    base = {**RESOLVED, "workload": WORKLOAD}
    first = recorded(tmp_path, "a", timed(0, torch=1), resolved=base)
    other = {
        "environment": changed(dict(ENVIRONMENT), *environment, to="other") if environment else ENVIRONMENT,
        "resolved": changed(base, *resolved, to="other") if resolved else base,
    }
    second = recorded(tmp_path, "b", timed(1, torch=1), **other)
    with pytest.raises(ExperimentError) as caught:
        compare_runs(first, second)
    (problem,) = caught.value.problems
    assert problem.startswith(message)
    assert problem.endswith(f"(--across {what} compares them all the same)")
    found = compare_runs(first, second, [what])
    assert list(found.across) == [what]
    assert len(found.verdicts) == 1


def test_across_dtypes_the_same_arms_are_compared_under_the_title_that_both_runs_give(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, torch=1, fused=1))
    rows = [{**row, "dtype": "bfloat16"} for row in timed(1, torch=1)]
    second = recorded(tmp_path, "b", rows, resolved={**RESOLVED, "dtype": "bfloat16"})
    found = compare_runs(first, second, ["dtype"])
    assert [one.arm for one in found.verdicts] == ["torch"], "not swiglu torch: the first run swept it"
    assert [one.partition(", median")[0] for one in found.only_first] == ["swiglu, decode: fused"]
    assert found.only_second == ()


def test_across_dtypes_that_each_run_has_as_its_only_setting_the_same_arms_are_compared(tmp_path: Path) -> None:
    first, second = (
        recorded(
            tmp_path,
            name,
            [{**row, "dtype": name, "settings": {"dtype": name}} for row in timed(seed, torch=1)],
            resolved={**RESOLVED, "dtype": [name]},
        )
        for seed, name in enumerate(("float32", "bfloat16"))
    )
    found = compare_runs(first, second, ["dtype"])
    assert [(one.place, one.arm) for one in found.verdicts] == [("swiglu, decode", "torch")]
    assert found.only_first == found.only_second == ()


def test_yardsticks_that_were_not_the_same_work_are_no_yardstick_of_either_run(tmp_path: Path) -> None:
    rows = [timed(seed, yardstick=True, torch=1) for seed in range(2)]
    first = recorded(tmp_path, "a", rows[0])
    other = recorded(tmp_path, "b", rows[1], environment=changed(dict(ENVIRONMENT), "versions", "torch", to="2.14"))
    same = compare_runs(first, recorded(tmp_path, "c", rows[1])).verdicts[0]
    found = compare_runs(first, other).verdicts[0]
    assert same.beside_yardstick
    assert not found.beside_yardstick
    bare = [[{**row, "yardstick_us": None} for row in each] for each in rows]
    without = compare_runs(recorded(tmp_path, "d", bare[0]), recorded(tmp_path, "e", bare[1])).verdicts[0]
    assert found.effect == without.effect


FACTS = {
    "engine": {"texts": ["other"], "requests_failed": 1, "output_tokens": 101, "steps": 10, "preemptions": 1,
               "peak_running": 3, "hit_tokens": 9, "evicted_blocks": 2, "weight_bytes": 7},
    "parity": {"tokens_equal": False, "requests_equal": 3, "first_divergence": {"request": 1, "place": 2}},
}  # fmt: skip


@pytest.mark.parametrize(("stage", "fact"), [(stage, fact) for stage, facts in FACTS.items() for fact in facts])
def test_each_fact_that_is_another_when_run_again_is_said(tmp_path: Path, stage: str, fact: str) -> None:
    row = served("engine", 1000.0, "chat") if stage == "engine" else parity({"swiglu": "torch"}, 4)
    again = row.model_copy(update={fact: FACTS[stage][fact]})
    runs = [read_run(record(tmp_path / name, [one])) for name, one in (("a", row), ("b", again))]
    (line,) = changed_facts(*runs)
    assert line.startswith(f"{stage}, ")
    assert f": {fact}" in line
    assert ", then " in line
    assert changed_facts(runs[0], runs[0]) == []


def test_a_trace_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    runs = []
    for name, code in (("a", "1"), ("b", "1"), ("c", "2")):
        resolved = {**RESOLVED, "workload": [{"kind": "trace", "file": f"/{name}.jsonl"}]}
        environment = {**ENVIRONMENT, "files": {"workload": {"file": f"{name}.jsonl", "sha256": code}}}
        runs.append(recorded(tmp_path, name, timed(0, torch=1), resolved=resolved, environment=environment))
    assert compare_runs(runs[0], runs[1]).circumstances == ()
    with pytest.raises(ExperimentError, match="workload of a and c: file's sha256: 1, then 2"):
        compare_runs(runs[0], runs[2])
    across = compare_runs(runs[0], runs[2], ["workload"])
    assert across.across == {"workload": "file's sha256: 1, then 2"}
    assert across.circumstances == ()


@pytest.mark.parametrize("what", ["name", "device", "dtype", "model", "workload"])
def test_what_is_said_where_it_forbids_a_comparison_is_not_said_again(tmp_path: Path, what: str) -> None:
    environment = {**ENVIRONMENT, "run_id": "0"}
    first = recorded(tmp_path, "a", timed(0, torch=1), environment=environment)
    value = [{"name": "chat"}] if what == "workload" else "other"
    other = {"resolved": {**RESOLVED, what: value}, "environment": {**environment, "run_id": "1"}}
    second = recorded(tmp_path, "b", timed(1, torch=1), **other)
    found = compare_runs(first, second, ["dtype", "model", "workload"])
    assert found.circumstances == ()
    assert list(found.across) == ([what] if what in ("dtype", "model", "workload") else [])


def test_other_files_of_a_model_are_said_once(tmp_path: Path) -> None:
    first, second = (
        recorded(tmp_path, code, timed(0, torch=1), environment={**ENVIRONMENT, "model": {"m": {"config.json": code}}})
        for code in "ab"
    )
    found = compare_runs(first, second, ["model"])
    assert (found.across, found.circumstances) == ({"model": "config.json: a, then b"}, ())


def test_what_a_run_did_not_record_is_no_fault_of_it(tmp_path: Path) -> None:
    bare, other = (recorded(tmp_path, name, timed(0, torch=1), environment={}) for name in "ab")
    assert compare_runs(bare, other).circumstances == ()
    with pytest.raises(ExperimentError) as caught:
        compare_runs(bare, recorded(tmp_path, "c", timed(0, torch=1)))
    assert [problem.partition(" (--")[0] for problem in caught.value.problems] == [
        "device of a and c: name: null, then some CPU; type: null, then cpu",
        "threads of a and c: null, then 1",
    ]


def test_a_date_in_an_experiment_is_said_as_it_was_written(tmp_path: Path) -> None:
    first, second = (
        recorded(tmp_path, str(day), timed(0, torch=1), resolved={**RESOLVED, "until": date(2026, 1, day)})
        for day in (1, 2)
    )
    assert compare_runs(first, second).circumstances == ('until: "2026-01-01", then "2026-01-02"',)


def test_long_values_are_cut(tmp_path: Path) -> None:
    first, second = (
        recorded(tmp_path, str(count), timed(0, torch=1), resolved={**RESOLVED, "about": "x" * count})
        for count in (60, 61)
    )
    assert compare_runs(first, second).circumstances == (f"about: {'x' * 60}, then {'x' * 57}...",)


def test_that_a_text_is_another_one_is_said(tmp_path: Path) -> None:
    files = [{"quantization.text": {"file": "a.txt", "sha256": code}} for code in ("1", "2")]
    first, second = (
        recorded(tmp_path, str(number), timed(0, torch=1), environment={**ENVIRONMENT, "files": one})
        for number, one in enumerate(files)
    )
    assert compare_runs(first, second).circumstances == ("files.quantization.text.sha256: 1, then 2",)


def test_of_several_dtypes_those_that_both_runs_have_are_compared(tmp_path: Path) -> None:
    def rows(seed: int, *dtypes: str) -> list[dict[str, Any]]:
        return [
            {**row, "dtype": dtype, "settings": {"dtype": dtype}, "task": f"{row['task']} {dtype}"}
            for dtype in dtypes
            for row in timed(seed, torch=1)
        ]

    both = {**RESOLVED, "dtype": ["float32", "bfloat16"]}
    first = recorded(tmp_path, "a", rows(0, "float32", "bfloat16"), resolved=both)
    second = recorded(
        tmp_path, "b", rows(1, "bfloat16", "float16"), resolved={**RESOLVED, "dtype": ["bfloat16", "float16"]}
    )
    found = compare_runs(first, second)
    assert [verdict.place for verdict in found.verdicts] == ["swiglu, decode, dtype=bfloat16"]
    assert len(found.only_first) == len(found.only_second) == 1
    with pytest.raises(ExperimentError, match="a has no two arms"):
        compare_arms(first)
    across = compare_arms(first, ["dtype"])
    assert outcomes(across) == {"torch, dtype=bfloat16": "within noise"}
    assert (across.verdicts[0].place, across.verdicts[0].beside) == ("swiglu, decode", "torch, dtype=float32")


def test_of_dtypes_of_which_the_runs_share_none_all_are_said(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, torch=1), resolved={**RESOLVED, "dtype": ["float32", "float64"]})
    for dtypes, said in (("float16", "float16"), (["float16", "bfloat16"], "float16, bfloat16")):
        second = recorded(tmp_path, said, timed(0, torch=1), resolved={**RESOLVED, "dtype": dtypes})
        message = rf"^dtype of a and {said}: float32, float64, then {said} \(--across"
        with pytest.raises(ExperimentError, match=message):
            compare_runs(first, second)


def several(what: str, *codes: str) -> dict[str, Any]:
    """A run of the workloads, or models, that are called after their place, each with its code."""
    names = [(f"{what}{place}", code) for place, code in enumerate(codes)]
    if what == "workload":
        workloads = [{"name": name, "kind": "synthetic", "seed": code} for name, code in names]
        return {"resolved": {**RESOLVED, "workload": workloads}}
    return {"environment": {**ENVIRONMENT, "model": {name: {"config.json": code} for name, code in names}}}


@pytest.mark.parametrize(("what", "part"), [("model", "config.json"), ("workload", "seed")])
def test_of_several_models_or_workloads_those_that_both_runs_have_must_be_the_same(
    tmp_path: Path, what: str, part: str
) -> None:
    first, more, other = (
        recorded(tmp_path, name, timed(0, torch=1), **several(what, *name)) for name in ("ab", "abc", "adc")
    )
    assert compare_runs(first, more).across == {}
    with pytest.raises(ExperimentError, match=rf"^{what} of ab and adc: {what}1.{part}: b, then d \(--across"):
        compare_runs(first, other)


def test_the_same_weights_under_another_name_are_the_same_model(tmp_path: Path) -> None:
    runs = []
    for number, (name, code) in enumerate((("tiny", "a"), ("copy", "a"), ("copy", "b"))):
        environment = {**ENVIRONMENT, "model": {name: {"config.json": code}}}
        runs.append(recorded(tmp_path, str(number), timed(number, torch=1), environment=environment))
    assert len(compare_runs(runs[0], runs[1]).verdicts) == 1
    with pytest.raises(ExperimentError, match="model of 0 and 2: config.json: a, then b"):
        compare_runs(runs[0], runs[2])


def test_the_order_of_a_models_keys_is_no_other_model(tmp_path: Path) -> None:
    model = {"path": "m", "revision": "r"}
    first, second = (
        recorded(tmp_path, preset, timed(0, torch=1), resolved={**RESOLVED, "model": [{"preset": preset}, dict(keys)]})
        for preset, keys in (("tiny", model.items()), ("small", reversed(model.items())))
    )
    assert compare_runs(first, second).across == {}


def test_replicates_of_two_runs_have_nothing_in_common(tmp_path: Path) -> None:
    figures = times_of(recorded(tmp_path, "a", timed(0, torch=1, fused=2)).rows)
    pairs = {key: (figures[first], figures[key]) for first, key in beside_the_first(figures)}
    (of_arms,), (of_runs,) = (judge_pairs(pairs, of_runs=of_runs)[0].values() for of_runs in (False, True))
    assert (list(of_arms.values), of_runs.values) == ([*range(8)], {})


def test_all_that_forbids_a_comparison_is_said_at_once(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, torch=1))
    environment = changed(changed(dict(ENVIRONMENT), "device", "type", to="cuda"), "host", "torch_threads", to=2)
    with pytest.raises(ExperimentError) as caught:
        compare_runs(first, recorded(tmp_path, "b", timed(1, torch=1), environment=environment))
    assert [problem.split()[0] for problem in caught.value.problems] == ["device", "threads"]


def test_what_else_differs_is_said_and_so_are_figures_that_one_lacks(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, torch=1, fused=1))
    environment = changed(changed(dict(ENVIRONMENT), "versions", "torch", to="2.14"), "git", "dirty", to=True)
    environment = changed(environment, "git", "untracked", to={"a.bin": "5 bytes"})
    rows = [*timed(1, torch=1, two_pass=1)]
    second = recorded(tmp_path, "b", rows, environment=environment, resolved={**RESOLVED, "repeats": 9})
    found = compare_runs(first, second)
    assert found.circumstances == (
        "versions.torch: 2.13, then 2.14",
        "git.dirty: false, then true",
        "repeats: nothing, then 9",
        'git.untracked: nothing, then {"a.bin": "5 bytes"}',
    )
    assert found.only_first == ("swiglu, decode, float32: fused, median_us",)
    assert found.only_second == ("swiglu, decode, float32: two_pass, median_us",)


def test_rows_whose_status_changed_are_said(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", [*timed(0, torch=1), kernel_row(1.0, "fused")])
    second = recorded(tmp_path, "b", [*timed(1, torch=1), failed(kernel_row(1.0, "fused"))])
    (line,) = compare_runs(first, second).changed
    assert line == "kernels, swiglu, decode, float32, fused, process 0: ok, then failed (out of memory)"


def test_nothing_in_common_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    first = recorded(tmp_path, "a", timed(0, torch=1))
    with pytest.raises(ExperimentError, match="no figure of time in common: there is swiglu, decode, float32: torch"):
        compare_runs(first, recorded(tmp_path, "b", timed(0, fused=1)))
    with pytest.raises(ExperimentError, match="a has no two arms with a figure of time in common"):
        compare_arms(first)
    with pytest.raises(ExperimentError, match=r"in common: nothing was timed \(an interpreted kernel is not\)$"):
        compare_arms(recorded(tmp_path, "c", []))


@pytest.mark.parametrize(("count", "named", "more"), [(4, 4, ""), (5, 4, " and 1 more")])
def test_four_of_the_figures_that_there_are_instead_are_named(
    tmp_path: Path, count: int, named: int, more: str
) -> None:
    run = recorded(tmp_path, "a", [kernel_row(1.0, point=f"T={size}", task=str(size)) for size in range(count)])
    with pytest.raises(ExperimentError) as caught:
        compare_arms(run)
    listed = "; ".join(f"swiglu, T={size}, float32: torch, median_us" for size in range(named))
    assert caught.value.problems[0] == f"a has no two arms with a figure of time in common: there is {listed}{more}"


def test_that_runs_were_cut_off_is_said_beside_whatever_is_wrong(tmp_path: Path) -> None:
    first, second, third = (
        recorded(tmp_path, name, timed(0, 1, **{arm: 1}), finished=None, tasks=2, **more)
        for name, arm, more in (
            ("a", "torch", {}), ("b", "fused", {}), ("c", "torch", {"resolved": {**RESOLVED, "dtype": "float16"}}),
        )
    )  # fmt: skip
    said = {run.name: f"{run.name} was cut off after 1 of 2 tasks" for run in (first, second, third)}
    for other in (second, third):
        with pytest.raises(ExperimentError) as caught:
            compare_runs(first, other)
        assert caught.value.problems[1:] == (said["a"], said[other.name])
    with pytest.raises(ExperimentError) as caught:
        compare_arms(first)
    assert caught.value.problems[1:] == (said["a"],)
    assert compare_runs(first, third, ["dtype"]).cut_off == (said["a"], said["c"])


def test_two_rows_of_one_process_cannot_be_told_apart(tmp_path: Path) -> None:
    run = recorded(tmp_path, "a", [kernel_row(1.0), kernel_row(2.0, task="another")])
    with pytest.raises(ExperimentError, match="process 0 has two rows of median_us of torch"):
        compare_arms(run)


def test_the_arms_of_a_run_are_one_table_whose_names_are_broken_at_an_underscore(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    long = "split_kv[num_splits=4]"
    print_comparison(console, compare_arms(recorded(tmp_path, "a", timed(0, torch=1, fused=2, **{long: 1}))))
    lines = [line.strip() for line in console.export_text().splitlines()]
    judged = [line.split()[0] for line in lines if line.endswith(("worse", "within noise"))]
    assert judged[-2:] == ["fused", "split_kv[num_"]
    assert "splits=4]" in lines
    assert len([line for line in lines if line.startswith("arm ")]) == 1
