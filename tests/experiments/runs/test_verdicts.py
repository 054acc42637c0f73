"""Comparisons of recorded runs and of the arms of one."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from experiments.document import ExperimentError
from experiments.reporting.comparison_tables import print_comparison
from experiments.runs.reading import RecordedRun, read_run
from experiments.runs.verdicts import Comparison, compare_arms, compare_runs
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


def test_the_same_weights_under_another_name_are_the_same_model(tmp_path: Path) -> None:
    runs = []
    for number, (name, code) in enumerate((("tiny", "a"), ("copy", "a"), ("copy", "b"))):
        environment = {**ENVIRONMENT, "model": {name: {"config.json": code}}}
        runs.append(recorded(tmp_path, str(number), timed(number, torch=1), environment=environment))
    assert len(compare_runs(runs[0], runs[1]).verdicts) == 1
    with pytest.raises(ExperimentError, match="model of 0 and 2: config.json: a, then b"):
        compare_runs(runs[0], runs[2])


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
    with pytest.raises(ExperimentError, match="nothing was timed"):
        compare_arms(recorded(tmp_path, "c", []))


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
