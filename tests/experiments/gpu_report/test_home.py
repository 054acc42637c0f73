"""What is brought home: few files, as the report stands, from which another machine goes on."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experiments.document import ExperimentError
from experiments.gpu_report import folder as report_folder
from experiments.gpu_report import home
from experiments.gpu_report.engine_marks import RUNS
from experiments.gpu_report.folder import ReportFolder, open_report, run_name
from experiments.gpu_report.steps import Step, new_step
from experiments.gpu_report.supervisor import Machine, OnEnded, run_steps
from experiments.sweep.tasks import Ended
from tests.experiments.gpu_report.recorded import describe

MARKS = [new_step("mark", 1.0, point=name, least=0.5) for name in RUNS]
STEPS = [*(new_step("time", 1.0, "swiglu", "fused", "0", f"T={size}", process="swiglu") for size in range(6)), *MARKS]


class Killed(BaseException):
    """The machine is gone."""


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_folder, "describe_device", lambda device: describe("NVIDIA H200"))


def begin(out: Path) -> ReportFolder:
    return open_report(out, torch.device("cuda", 0), STEPS)


def bring_home(out: Path, to: Path) -> Path:
    """A fresh machine's folder, which has the brought-home files and nothing else."""
    files = list((out / home.FOLDER).iterdir())
    assert len(files) <= home.MOST_FILES
    assert all(file.is_file() for file in files)
    shutil.copytree(out / home.FOLDER, to / home.FOLDER)
    return to


def command(out: Path, kill_at: int) -> list[str]:
    """Steps that write what steps write, until the machine is gone in the middle of one; returns what had ended."""
    report, ended = begin(out), list[str]()

    def run_step(steps: Sequence[Step], on_ended: OnEnded) -> None:
        for step in steps:
            if step.kind == "mark":
                run = out / home.RUNS / run_name(step.point)
                run.mkdir(parents=True, exist_ok=True)
                (run / "results.jsonl").write_text(step.key)
            (out / "NVIDIA_H200.lock").touch()
            with open(out / "worker.log", "a") as log:
                log.write(f"{step.key}\n")
            if len(ended) == kill_at:
                raise Killed
            on_ended(Ended(step, [step.row("r1", "report")], {"of": step.key}, doing=step.kind, seconds=1.0))
            ended.append(step.key)

    try:
        run_steps(STEPS, report, 1e6, run_step, Machine(1), now=lambda: 0.0)
    except Killed:
        pass
    finally:
        report.close()
    return ended


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_step_loses_that_step_alone_and_a_fresh_machine_goes_on(seed: int, tmp_path: Path) -> None:
    chosen, done, out = random.Random(seed), list[str](), tmp_path / "0"
    for number in range(1, 50):
        done += command(out, chosen.randrange(1, 5))
        assert len(set(done)) == len(done)  # nothing that had ended is done again
        out = bring_home(out, tmp_path / str(number))
        report = begin(out)
        assert report.journal.done == set(done)
        assert all(report.folder.samples(key)["of"] == key for key in done)
        report.close()
        if len(done) == len(STEPS):
            break
    assert set(done) == {step.key for step in STEPS}
    for step in MARKS:
        assert (out / home.RUNS / run_name(step.point) / "results.jsonl").read_text() == step.key
    assert {file.name for file in out.iterdir()} >= {"run.json", "results.jsonl", "worker.log", "samples", "home"}
    assert not list(out.glob("*.lock"))


def test_the_files_that_are_brought_home_are_few_however_many_marks_are_done(tmp_path: Path) -> None:
    report = begin(tmp_path)
    (tmp_path / home.TABLE).write_text("# GPU report")
    for step in MARKS:
        (tmp_path / home.RUNS / run_name(step.point)).mkdir(parents=True)
        report.keep(step, Ended(step, [step.row("r1", "report")], doing="mark"), None)
    report.close()
    names = {file.name for file in (tmp_path / home.FOLDER).iterdir()}
    assert names == {home.PACKED, home.TABLE, *(f"{run_name(step.point)}.tar.gz" for step in MARKS)}
    assert len(names) == home.MOST_FILES


def test_what_is_damaged_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / home.FOLDER).mkdir()
    (tmp_path / home.FOLDER / home.PACKED).write_bytes(b"half of")
    with pytest.raises(ExperimentError, match=r"report.tar.gz: cannot be unpacked: .*; bring it home again, or remove"):
        begin(tmp_path)
