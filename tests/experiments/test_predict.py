"""`tk inspect --predict`, how its order is judged by measured times, and a run's modelled rows and tables."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.commands import predict
from experiments.foretelling.agreement import agreements, kendall_tau, mean_regret
from experiments.foretelling.points import quickstart_points
from experiments.foretelling.published import FURTHER, STAND_INS, Residual, residuals
from experiments.gpu_report.marks import PUBLISHED
from experiments.reporting.modelled import modelled_arms_table, modelled_kernels_table, modelled_winners
from experiments.reporting.verdict import verdict_of
from experiments.runs.rows import Row
from experiments.stages.foretold import GPU, kept_rows
from tests.experiments.runs.folders import kernel_row, write_run
from tkernels import OPS
from tkernels.prediction import kept
from tkernels.prediction.foretell import foretell
from tkernels.prediction.gpus import find_gpu


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments])


def test_an_unknown_gpu_and_flags_that_do_not_go_together_are_refused() -> None:
    result = asked("--predict", "H100,H900")
    assert result.exit_code == 2
    assert "'H900'; known are H100" in result.output
    assert "--arch" in asked("--predict", "H100", "--op", "swiglu", "--arch", "sm_90").output
    assert "name a GPU" in asked("--against", "run").output


@pytest.mark.usefixtures("own_cache")
def test_what_is_kept_is_predicted_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "compile_facts", lambda *args: pytest.fail("it compiles"))
    result = asked("--predict", "H200", "--op", "swiglu", "--json")
    rows = json.loads(result.stdout)
    assert {row["variant"] for row in rows} == {"fused", "grid_stride"}
    assert all(row["gpu"] == "H200" and row["predicted_us"] > row["predicted_limit_us"] > 0 for row in rows)
    assert not any("median_us" in row for row in rows)


def test_a_damaged_table_of_the_users_own_costs_its_damaged_lines_alone(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "compile_facts", lambda *args: pytest.fail("it compiles"))
    own = own_cache / "tkernels" / "predicted" / "sm_90.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text('{"kernel":\n')
    with pytest.warns(UserWarning, match=rf"{own}: left out: line 1: Expecting value.*is compiled again when"):
        result = asked("--predict", "H200", "--op", "swiglu", "--json")
    assert result.exit_code == 0, result.output
    assert all(row["predicted_us"] > 0 for row in json.loads(result.stdout))


@pytest.mark.usefixtures("own_cache")
def test_a_call_that_takes_no_time_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "compile_facts", lambda *args: pytest.fail("it compiles"))
    result = asked("--predict", "H100", "--op", "matmul", "--variant", "gemv", "--axes", "M=0,N=64,K=64", "--json")
    assert result.exit_code == 0, result.output
    assert [row["predicted_us"] for row in json.loads(result.stdout)] == [0.0]


@pytest.mark.usefixtures("own_cache")
def test_axes_that_are_left_open_are_as_tk_bench_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "compile_facts", lambda *args: ([], []))
    named = ["--op", "swiglu", "--axes", "T=4,I=1024"]
    rows = json.loads(asked("--predict", "H100", *named, "--json").stdout)
    timed = json.loads(CliRunner().invoke(app, ["bench", *named, "--variant", "torch", "--json"]).stdout)
    assert [row["axes"] for row in rows] == [timed[0]["axes"]] * 2
    assert "The other axes are activation=bfloat16, limit=0, layout=" in asked("--predict", "H100", *named).output


def test_every_published_figure_has_a_residual() -> None:
    found = residuals(OPS, kept_rows, "paged_decode")
    of_decode = [one for one in (*PUBLISHED, *(one for one, _ in FURTHER)) if one.op == "paged_decode"]
    assert [(one.peer, one.point, one.published) for one in found] == [(p.peer, p.point, p.value) for p in of_decode]
    assert all(one.ratio is not None and 0.5 < one.ratio < 2 for one in found)
    assert {(one.op, one.peer) for one in (*PUBLISHED, *(one for one, _ in FURTHER))} <= STAND_INS.keys()


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [30, 20, 10], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 2 / 3),
        ([1, 1, 2], [1, 2, 3], 2 / (2**0.5 * 3**0.5)),
        ([1, 1], [1, 2], None),
        ([1], [1], None),
    ],
)
def test_kendalls_tau(first: Sequence[float], second: Sequence[float], tau: float | None) -> None:
    assert kendall_tau(first, second) == (None if tau is None else pytest.approx(tau))


def timed(variant: str, point: str, median_us: float) -> dict[str, Any]:
    return kernel_row(median_us, variant, point=point)


def in_report(times: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Rows of swiglu's variants, (variant, point) -> microseconds."""
    return [timed(variant, point, us) for (variant, point), us in times.items()]


def test_regret_is_what_choosing_by_the_model_costs() -> None:
    measured = {("x", "a"): 10.0, ("y", "a"): 12.0, ("z", "a"): 20.0, ("x", "b"): 5.0, ("y", "b"): 5.5}
    rows = [Row.model_validate(row) for row in in_report({**measured, ("torch", "c"): 1.0})]
    predicted: Mapping[tuple[str, str, str], float] = {
        ("swiglu", "x", "a"): 3.0, ("swiglu", "y", "a"): 2.0, ("swiglu", "z", "a"): 4.0,
        ("swiglu", "x", "b"): 1.0, ("swiglu", "y", "b"): 2.0,
    }  # fmt: skip
    first, second, third = agreements(rows, predicted)
    assert (first.chosen, first.best, first.variants) == ("y", "x", 3)
    assert first.regret == pytest.approx(0.2)
    assert first.tau == pytest.approx(1 / 3)
    assert (second.regret, second.tau) == (0.0, 1.0)
    assert (third.variants, third.regret) == (0, None)
    assert mean_regret([first, second, third]) == pytest.approx(1.2**0.5 - 1)
    assert mean_regret([third]) is None


def foretold(variant: str, us: float | None, point: str = "decode", **changes: Any) -> Row:
    figures = {
        "gpu": "H100", "predicted_us": us, "predicted_limit_us": 1.0 if us else None,
        "predicted_bound": "chain" if us else None, "predicted_from": None,
        "predicted_reason": None if us else "its code is not there", "model_version": 1,
    }  # fmt: skip
    base = {"stage": "foretold", "status": "ok", "run_id": "0", "op": "swiglu", "variant": variant, "point": point}
    more = {"arm": {"swiglu": variant}, "dtype": "float32", "device": "cpu", "serves": [{"workload": ""}]}
    return Row.model_validate({**base, **more, **figures, **changes})


def arm(swiglu: str) -> Row:
    return Row.model_construct(
        stage="engine", status="ok", arm={"swiglu": swiglu, "rms_norm": "torch"}, settings={}, workload="",
        dtype="float32",
    )  # fmt: skip


def test_the_tables_say_that_nothing_in_them_was_measured_and_why_a_time_is_not_there() -> None:
    rows = [foretold("fused", 3.2), foretold("fused", 9.0, "prefill"), foretold("own", None)]
    kernels = modelled_kernels_table(rows)
    assert "no figure here was measured" in kernels.caption
    assert "swiglu.own: its code is not there" in kernels.caption
    arms = modelled_arms_table(rows, [arm("torch"), arm("fused")], ["swiglu"])
    assert arms is not None
    assert [[cell.text for cell in line] for line in arms.lines] == [["fused", "3.2", "swiglu 3.2"]]
    assert modelled_arms_table(rows, [arm("torch")], ["swiglu"]) is None
    near = modelled_kernels_table([foretold("fused", 3.2, predicted_from={"BLOCK": 128})])
    assert "swiglu.fused (BLOCK=128)" in near.caption


def at(variant: str, point: str, us: float | None, **changes: Any) -> Row:
    """A modelled time at a point of `shapes`."""
    return foretold(variant, us, point, **{"serves": None, **changes})


def test_the_variant_that_a_model_finds_the_fastest_is_told_where_and_what_runs_others_code_is_not() -> None:
    few, many = {"few": 2.0, "tall": 9.0, "chooses": 2.0, "never": 3.0}, {"few": 30.0, "tall": 8.0, "chooses": 8.0}
    by_point = {"T=1": few, "T=2": few, "T=8": {**many, "never": 8.5}, "T=9": {**many, "never": 9.5}}
    rows = [at(variant, point, us) for point, times in by_point.items() for variant, us in times.items()]
    (said,) = modelled_winners(rows)
    assert said == (
        "modelled on H100, not measured: for swiglu the fastest is few at T=1 to T=2; tall at T=8 to T=9"
        " (by less than a tenth, which the model does not tell, at T=8)"
    )
    assert modelled_winners([row for row in rows if row.variant != "chooses"]) == [said]
    assert modelled_winners([*(row for row in rows if row.variant == "chooses"), *rows]) == [said]  # whatever the order
    assert verdict_of(rows, 1, True, None, {}).sentence == said[:1].upper() + said[1:] + "."


def test_no_winner_is_told_of_one_variant_of_served_points_or_of_other_code() -> None:
    assert modelled_winners([at("fused", "T=1", 2.0), at("fused", "T=2", 2.0)]) == []
    assert modelled_winners([at("fused", "T=1", 2.0), at("own", "T=1", None)]) == []
    assert modelled_winners([foretold("fused", 2.0), foretold("own", 3.0)]) == []
    assert modelled_winners([at("fused", "T=1", 2.0), at("own", "T=1", 1.0, predicted_from={"BLOCK": 128})]) == []


@pytest.mark.usefixtures("own_cache")
def test_a_report_is_what_the_models_order_is_judged_by(tmp_path: Path) -> None:
    points = OPS["swiglu"].contract.benchmarks
    point = next(iter(points))
    rows = in_report({("fused", point): 8.0, ("grid_stride", point): 9.0})
    folder = write_run(tmp_path / "report", rows)
    result = asked("--predict", "H100", "--op", "swiglu", "--against", str(folder))
    assert result.exit_code == 0, result.output
    assert "Kendall's tau" in result.output
    empty = write_run(tmp_path / "empty", [])
    assert "not measured" in asked("--predict", "H100", "--op", "swiglu", "--against", str(empty)).output


@pytest.mark.usefixtures("own_cache")
def test_every_triton_variant_of_the_quickstart_has_a_modelled_time() -> None:
    gpu = find_gpu(GPU)
    found = {
        f"{variant.contract.name}.{variant.name}": foretell(
            variant, variant.contract.case(axes, 0), gpu, kept_rows(gpu.facts.arch)
        )
        for variant, _, axes in quickstart_points()
    }
    assert found.keys() == {"paged_decode.one_pass", "paged_decode.split_kv", "swiglu.fused"}
    assert all(one.us is not None and one.compiled_for is None for one in found.values()), found


def test_the_pages_table_of_published_figures_is_what_the_model_says_today() -> None:
    found: dict[str, list[Residual]] = {}
    for one in residuals(OPS, lambda arch: kept.read(kept.table_path(arch))):
        found.setdefault(one.peer, []).append(one)
    page = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text()
    whole, rows = page[page.index("| others measured |") :].split("\n\n")[0], []
    for line in whole.splitlines()[2:]:
        _, _, peer, *figures, _ = [cell.strip() for cell in line.split("|")]
        rows.append(peer)
        wanted = [(f"{one.published:.2f}", f"{one.predicted:.2f}", f"{one.ratio:.2f}") for one in found[peer.lower()]]
        assert [re.findall(r"\d\.\d\d", cell) for cell in figures] == [
            [*column] for column in zip(*wanted, strict=True)
        ]
    assert {peer.lower() for peer in rows} == found.keys()
    ratios = [one.ratio for ones in found.values() for one in ones if one.ratio is not None]
    assert f"the ratio is {min(ratios):.2f} to {max(ratios):.2f}:" in page
