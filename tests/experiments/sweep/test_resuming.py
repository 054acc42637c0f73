"""A run that was cut off goes on: what is whole is kept and not done again, what is not is cut away and said."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import experiments.runs.folder
import experiments.stages.check
from experiments.document import ExperimentError, read_document
from experiments.planning.plan import make_sweep
from experiments.runs.folder import RunFolder
from experiments.runs.reading import read_run
from experiments.sweep.runner import run_experiment
from experiments.sweep.tasks import Setup
from tests.experiments.conftest import Write
from tests.experiments.in_process import InProcess
from tests.experiments.sweep.kill_runs import differences, facts_of
from tests.experiments.test_baselines import SMALL, SYNTHETIC
from tests.tkernels.outside import write_variant
from tkernels.isolation import write_whole

KERNELS: dict[str, Any] = {"kernels": {"swiglu": ["torch", "fused"]}, "shapes": {"swiglu": [{"T": 2, "I": 8}]}}
Start = Callable[..., tuple[RunFolder, list[str]]]


@pytest.fixture
def start(write: Write, tmp_path: Path) -> Start:
    """Runs an experiment into tmp_path/<out>, and returns the folder and the tasks that were carried out."""

    def start_run(out: str = "run", resume: bool = False, **keys: Any) -> tuple[RunFolder, list[str]]:
        sweep = make_sweep(read_document(write(**keys)))
        executor = InProcess()
        path = tmp_path / out
        console = Console(file=(tmp_path / "said").open("w"), width=1000)
        where = {"resume": path} if resume else {}
        folder = run_experiment(sweep, None if resume else path, [], console, executor=executor, **where)
        return folder, executor.tasks

    return start_run


def cut_off(path: Path, lines: int, rest: bytes = b"") -> list[bytes]:
    """Leaves so many rows, as a kill would; returns those that it takes away."""
    file = path / "results.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:lines]) + rest)
    meta = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**meta, "finished": None}))
    return whole[lines:]


def test_only_what_is_missing_is_done_wherever_it_was_cut(start: Start, checkpoint: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "model": {"path": str(checkpoint)}, "scheduler": {**SMALL, "block_size": [8, 16]}, "workload": SYNTHETIC,
        "peers": ["without_kv_cache"], "repeats": 1, "replicates": 2,
    }  # fmt: skip
    folder, all_tasks = start(**keys)
    whole = facts_of(folder.path)
    assert set(whole.values()) == {1}
    rows = [json.loads(line)["task"] for line in (folder.path / "results.jsonl").read_text().splitlines()]
    first_of = {task: rows.index(task) for task in dict.fromkeys(rows)}
    for task in ("check/rms_norm.torch", "kernels/rms_norm.torch#1", "engine/block_size=16#0", "engine/block_size=8#1"):
        cut_off(folder.path, first_of[task])
        again, done = start(**keys)
        assert done == all_tasks[all_tasks.index(task) :]
        assert differences(whole, facts_of(again.path)) == []
        assert again.run_id == folder.run_id
    for stage in ("parity", "speedup"):  # what is derived needs no task
        cut_off(folder.path, next(i for i, task in enumerate(rows) if task.startswith(stage)))
        assert start(resume=True, **keys)[1] == []
        assert differences(whole, facts_of(folder.path)) == []


@pytest.mark.parametrize("torn", [0, 40])
def test_a_task_whose_write_was_cut_is_cut_away_said_and_done_again(start: Start, tmp_path: Path, torn: int) -> None:
    keys = {**KERNELS, "shapes": {"swiglu": [{"T": 2, "I": 8}, {"T": 3, "I": 8}]}}
    folder, _ = start(**keys)
    whole = facts_of(folder.path)
    taken = cut_off(folder.path, 3)  # torch's two checks, and one of fused's
    with (folder.path / "results.jsonl").open("ab") as file:
        file.write(taken[0][:torn])
    again, done = start(resume=True, **keys)
    assert done == ["check/swiglu.fused", "kernels/swiglu.torch#0", "kernels/swiglu.fused#0"]
    assert differences(whole, facts_of(again.path)) == []
    said = (tmp_path / "said").read_text()
    assert "task 'check/swiglu.fused' has 1 of its 2 rows" in said
    assert ("line 4, the last, is half written (40 bytes)" in said) == bool(torn)
    assert read_run(again.path).repairs == ()
    (resumed,) = read_run(again.path).meta["resumed"]
    assert resumed["executor"] == "in process"


def test_a_run_that_has_ended_is_left_as_it_is(start: Start) -> None:
    folder, _ = start(**KERNELS)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    again, done = start(resume=True, **KERNELS)
    assert done == []
    assert {path.name: path.read_bytes() for path in again.path.iterdir() if path.is_file()} == before
    with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
        start(**KERNELS)


@pytest.mark.parametrize("ended", [True, False])
def test_a_line_that_lacks_its_end_is_given_it_before_anything_follows(
    start: Start, tmp_path: Path, ended: bool
) -> None:
    folder, _ = start(**KERNELS)
    whole = facts_of(folder.path)
    file = folder.path / "results.jsonl"
    if not ended:
        cut_off(folder.path, 2)
    file.write_bytes(file.read_bytes()[:-1])
    again, done = start(resume=True, **KERNELS)
    assert len(done) == (0 if ended else 2)
    assert differences(whole, facts_of(again.path)) == []
    assert "is a whole row without its line's end: kept" in (tmp_path / "said").read_text()
    assert read_run(again.path).repairs == ()


@pytest.mark.parametrize(("kept", "said"), [(40, "is half written (40 bytes)"), (0, "the rows of 3 of the 4 tasks")])
def test_a_run_that_has_ended_and_lost_its_end_is_one_that_was_cut_off(
    start: Start, tmp_path: Path, kept: int, said: str
) -> None:
    folder, tasks = start(**KERNELS)
    whole = facts_of(folder.path)
    file = folder.path / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    last = json.loads(lines[-1])["task"]  # of which it has a timed row and a modelled one
    others = [line for line in lines if json.loads(line)["task"] != last]
    file.write_bytes(b"".join(others) + lines[-1][:kept])
    again, done = start(resume=True, **KERNELS)
    assert done == tasks[-1:]
    assert differences(whole, facts_of(again.path)) == []
    assert said in (tmp_path / "said").read_text()
    assert again.is_finished
    assert read_run(again.path).repairs == ()


def test_a_disk_that_is_full_is_named_and_the_run_goes_on_later(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = facts_of(start("whole", **KERNELS)[0].path)
    left = [2]

    def write_until_it_is_full(pipe: int, data: bytes) -> None:
        left[0] -= 1
        write_whole(pipe, data if left[0] else data[:50])
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(experiments.runs.folder, "write_whole", write_until_it_is_full)
        with pytest.raises(ExperimentError) as refused:
            start(**KERNELS)
    what, kept = refused.value.problems
    assert what.endswith("run/results.jsonl: No space left on device")
    assert "what is done is kept, and goes on with --resume" in kept
    assert differences(whole, facts_of(start(resume=True, **KERNELS)[0].path)) == []


@pytest.mark.parametrize("change", ["other", "broken", "gone"])
def test_a_variant_that_changes_while_the_run_goes_on_is_not_mixed_into_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    file = write_variant(tmp_path / "mine") / "swiglu" / "doubled.py"
    begin = InProcess.start

    def edited_meanwhile(self: InProcess, setup: Setup) -> AbstractContextManager[None]:
        if change == "gone":
            file.unlink()
        else:
            file.write_text(file.read_text() + ("1 +" if change == "broken" else "# another"))
        return begin(self, setup)

    monkeypatch.setattr(InProcess, "start", edited_meanwhile)
    points = [{"T": 2, "I": 8}, {"T": 3, "I": 8}]
    folder, _ = start(kernels={"swiglu": ["torch", "doubled"]}, variants_from=["mine"], shapes={"swiglu": points})
    failed = [row for row in folder.rows if row.status == "failed" and row.variant == "doubled"]
    assert [(row.stage, row.point) for row in failed if row.stage == "check"] == [
        ("check", "T=2"), ("check", "T=3"),
    ]  # fmt: skip
    assert {row.reason for row in failed} == {f"not run: {file} has changed since the run began"}
    others = {row.status for row in folder.rows if row.variant == "torch"}
    assert others == ({"ok"} if change == "other" else {"failed"})  # nothing can be planned any more


def test_what_a_variant_imports_is_not_mixed_either(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = write_variant(tmp_path / "mine") / "swiglu" / "doubled.py"
    variant.write_text(f"import imported_by_doubled\n{variant.read_text()}")
    helper = tmp_path / "imported_by_doubled.py"
    helper.write_text("# one")
    monkeypatch.syspath_prepend(tmp_path)
    begin = InProcess.start

    def edited_meanwhile(self: InProcess, setup: Setup) -> AbstractContextManager[None]:
        helper.write_text("# another")
        return begin(self, setup)

    monkeypatch.setattr(InProcess, "start", edited_meanwhile)
    folder, _ = start(**{**KERNELS, "kernels": {"swiglu": ["torch", "doubled"]}, "variants_from": ["mine"]})
    assert (folder.path / "sources" / "imports" / helper.name).read_text() == "# one"
    reasons = {row.variant: row.reason for row in folder.rows if row.stage == "check"}
    assert reasons == {"torch": None, "doubled": f"not run: {helper} has changed since the run began"}


def test_another_experiment_is_refused_with_what_differs(start: Start) -> None:
    folder, _ = start(**KERNELS)
    cut_off(folder.path, 1)
    other = {**KERNELS, "shapes": {"swiglu": [{"T": 3, "I": 8}]}}
    with pytest.raises(ExperimentError, match="another experiment: -  - T: 2; \\+  - T: 3"):
        start(resume=True, **other)
    with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
        start(**other)
    assert len((folder.path / "results.jsonl").read_text().splitlines()) == 1


def test_a_kernel_that_changed_is_refused(start: Start, tmp_path: Path) -> None:
    write_variant(tmp_path / "mine")
    keys = {**KERNELS, "kernels": {"swiglu": ["torch", "doubled"]}, "variants_from": ["mine"]}
    folder, _ = start(**keys)
    cut_off(folder.path, 1)
    write_variant(tmp_path / "mine", ("up * FACTOR", "FACTOR * up"))
    with pytest.raises(ExperimentError, match="cannot be resumed: kernels: swiglu.doubled was '[0-9a-f]+' and is '"):
        start(resume=True, **keys)
    write_variant(tmp_path / "mine")
    assert start(resume=True, **keys)[1][0] == "check/swiglu.doubled"


def test_another_machine_or_version_is_refused(start: Start) -> None:
    folder, _ = start(**KERNELS)
    cut_off(folder.path, 1)
    file = folder.path / "environment.json"
    environment = json.loads(file.read_text())
    environment["device"]["name"] = "another"
    environment["versions"]["torch"] = "1.0"
    environment["host"]["torch_threads"] += 1
    environment["git"]["commit"] = "f" * 40  # said, and no reason
    file.write_text(json.dumps(environment))
    with pytest.raises(ExperimentError) as refused:
        start(resume=True, **KERNELS)
    assert [problem.partition("resumed: ")[2].partition(" was")[0] for problem in refused.value.problems] == [
        "device: name", "versions: torch", "host: torch_threads",
    ]  # fmt: skip


def test_another_lockfile_file_or_import_is_refused(start: Start) -> None:
    for tuning, kept in (("nearest", ()), ("search", ("lockfiles",))):
        folder, _ = start(**KERNELS, tuning=tuning, out=tuning)
        cut_off(folder.path, 1)
        file = folder.path / "environment.json"
        environment = json.loads(file.read_text())
        changes = {"imports": {"my_helper": "1"}, "lockfiles": {"a.json": "1"}, "files": {"workload": {"sha256": "1"}}}
        file.write_text(json.dumps(environment | changes))
        with pytest.raises(ExperimentError) as refused:
            start(resume=True, **KERNELS, tuning=tuning, out=tuning)
        found = [problem.partition("resumed: ")[2].partition(" was")[0] for problem in refused.value.problems]
        # A run that searches writes lockfiles itself.
        wanted = {"imports": "my_helper", "lockfiles": "a.json", "files": "workload"}
        assert found == [f"{part}: {name}" for part, name in wanted.items() if part not in kept]


def test_that_other_code_has_changed_is_said(start: Start, tmp_path: Path) -> None:
    folder, _ = start(**KERNELS)
    cut_off(folder.path, 1)
    file = folder.path / "environment.json"
    environment = json.loads(file.read_text())
    environment["git"] = {**environment["git"], "commit": "f" * 40, "dirty": False}
    file.write_text(json.dumps(environment))
    start(resume=True, **KERNELS)
    assert "has changed since the run began: its rows are of ffffffffffff and " in (tmp_path / "said").read_text()


def test_what_is_no_run_cannot_be_resumed(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="no such folder"):
        start(resume=True, **KERNELS)
    (tmp_path / "run").mkdir()
    with pytest.raises(ExperimentError, match="not a run of schema 1"):
        start(resume=True, **KERNELS)


def test_two_processes_do_not_write_into_one_folder(
    start: Start, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = start(**KERNELS)
    cut_off(folder.path, 1)
    holder = RunFolder(folder.path)
    with pytest.raises(ExperimentError, match="another process is running it"):
        start(resume=True, **KERNELS)
    # nor is anything read that the other may just be writing
    file = folder.path / "results.jsonl"
    kept = file.read_bytes()
    file.write_bytes(kept[:40] + b"\n" + kept)
    with pytest.raises(ExperimentError, match="another process is running it"):
        start(resume=True, **KERNELS)
    file.write_bytes(kept)
    holder.close()
    start(resume=True, **KERNELS)


def test_of_two_that_make_the_same_folder_one_is_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, others = os.rename, []

    def overtaken(before: Path, after: Path) -> None:
        monkeypatch.setattr(os, "rename", real)
        others.append(start(**KERNELS)[0])
        real(before, after)

    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(ExperimentError, match="cannot be made: Directory not empty"):
        start(**KERNELS)
    assert read_run(tmp_path / "run").meta["run_id"] == others[0].run_id
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_task_is_on_disk_whole_or_not_at_all(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between two rows of a task leaves none of them."""
    real, count = experiments.stages.check.check_case, [0]

    def third_time_out(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(experiments.stages.check, "check_case", third_time_out)
    keys = {**KERNELS, "shapes": {"swiglu": [{"T": 2, "I": 8}, {"T": 3, "I": 8}]}}
    with pytest.raises(KeyboardInterrupt):
        start(**keys)
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert [(row["variant"], row["task_rows"]) for row in rows] == [("torch", 2), ("torch", 2)]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"] is None
    rows = [row for row in start(**keys)[0].rows if row.stage != "foretold"]
    assert [row.variant for row in rows] == ["torch", "torch", "fused", "fused"] * 2


def test_a_setup_goes_to_another_process_and_back() -> None:
    setup = Setup("name: a", "0a", "interpret", "nearest", "/x", "/y", on_cuda=False, serves=True, replicates=3)
    assert Setup(**json.loads(json.dumps(asdict(setup)))) == setup
