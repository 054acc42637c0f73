"""`tk tune`: what it plans, that it goes on where it was, and what it says where there is no GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands import tune as command
from experiments.commands.requests import TuneRequest
from experiments.commands.tune import carry_out, plan, print_results
from experiments.document import ExperimentError
from tkernels import OPS
from tkernels.buckets import bucket
from tkernels.device import TARGETS
from tkernels.lockfile import lockfile
from tkernels.measurement import CPU_SIZE, cut_axes
from tkernels.tuning import Tuning
from tkernels.tuning_session import TuningPoint, tune

H200 = TARGETS["sm_90"]
CPU = torch.device("cpu")


def request(*shapes: str, op: str | None = "swiglu", variant: str | None = "fused") -> TuneRequest:
    return TuneRequest(op, variant, list(shapes))


def small(points: list[TuningPoint]) -> list[TuningPoint]:
    """The same, at sizes that can be made here; no launch of theirs is ever run."""
    cut = [(p, cut_axes(p.variant.contract, p.axes, CPU_SIZE)) for p in points]
    return [TuningPoint(p.variant, p.name, axes) for p, axes in cut if axes is not None]


class Measured:
    """A measure that never runs the launch, and counts: every next config is faster."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, launch: Callable[[], None]) -> float:
        self.count += 1
        return 100.0 / self.count


def test_the_plan_is_one_realistic_point_for_each_bucket_of_every_triton_variant() -> None:
    every = plan(request(op=None, variant=None), H200)
    assert {p.variant.kind for p in every} == {"triton"}
    buckets = [(p.variant.contract.name, p.variant.name, bucket(p.variant, p.axes)) for p in every]
    assert len(set(buckets)) == len(buckets)
    # Points of 9728 and of 14336 share a config: the largest batch decides.
    assert {p.name for p in every if p.variant.contract.name == "swiglu"} == {"T=8192,I=14336"}
    assert [p.name for p in plan(request("T=1,I=9728"), H200)] == ["T=1,I=9728"]
    (own,) = plan(request("T=5,I=640"), H200)
    assert (own.axes["T"], own.axes["I"], own.axes["activation"]) == (5, 640, "bfloat16")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("T=1,I=9729", op=None, variant=None), "did you mean 'T=1,I=9728'"),
        (request("X=3"), "no axis 'X'"),
        (request(variant="torch"), "none of these is a Triton variant"),
    ],
)
def test_what_is_no_point_is_named(asked: TuneRequest, said: str) -> None:
    with pytest.raises(ExperimentError) as error:
        plan(asked, H200)
    assert said in error.value.problems[0]


def test_the_dry_run_says_which_variant_refuses_the_point_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    words = ["tune", "--dry-run", "--op", "matmul", "--shapes", "M=3,N=64,K=64"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    of_gemv = [line for line in done.stdout.splitlines() if "matmul.gemv" in line]
    gemv = OPS["matmul"].variants["gemv"]
    reason = gemv.refusal({"M": 3, "N": 64, "K": 64, "activation": "bfloat16", "weight": "bfloat16"}, H200)
    assert of_gemv == [f"not tuned: matmul.gemv M=3,N=64,K=64: {reason}"]
    assert "matmul.split_k" in done.stdout


def test_a_second_run_times_nothing_and_the_first_is_what_frozen_finds(tmp_path: Path) -> None:
    points, measure = small(plan(request(), H200)), Measured()
    first = carry_out(points, CPU, H200, tmp_path, measure)
    assert measure.count == sum(result.timed for result in first) > 0
    assert all(result.entry is not None for result in first)
    again = carry_out(points, CPU, H200, tmp_path, measure)
    assert sum(result.timed for result in again) == 0
    variant, axes = points[0].variant, points[0].axes
    assert Tuning("frozen", tmp_path).match(variant, axes, H200) == "exact"
    assert lockfile(variant, H200, tmp_path).exists()


def test_it_stops_when_it_is_told_and_goes_on_from_there(tmp_path: Path) -> None:
    points, measure = small(plan(request(op="rms_norm", variant=None), H200)), Measured()
    done = list(tune(points, CPU, facts=H200, folder=tmp_path, measure=measure, stop=lambda: measure.count > 0))
    assert len(done) == 1
    rest = list(tune(points, CPU, facts=H200, folder=tmp_path, measure=measure))
    assert len(rest) == len(points)
    assert rest[0].timed == 0


def test_the_table_shows_the_default_beside_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Console", lambda **options: Console(width=160, **options))
    results = carry_out(small(plan(request(), H200)), CPU, H200, tmp_path, Measured())
    assert print_results(results, H200, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "swiglu.fused T=8192,I=14336" in shown
    assert "100.0" in shown  # the default is timed first
    assert str(tmp_path / "NVIDIA_H200.json") in shown


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["tune", "--op", "swiglu"])
    assert done.exit_code == 2
    assert "needs a CUDA device, and there is none here" in done.stderr
    assert CliRunner().invoke(app, ["tune", "--device", "cpu"]).exit_code == 2
