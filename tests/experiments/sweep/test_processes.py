"""Tasks in processes of their own: what ends one is its row, and nothing is left when the driver is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from experiments.document import read_document
from experiments.planning.plan import make_sweep
from experiments.runs.rows import Row
from experiments.stages.task import Task
from experiments.sweep.local import Local
from experiments.sweep.runner import run_experiment
from experiments.sweep.tasks import Ended, OnDoing
from tests.experiments.conftest import Write
from tests.tkernels.marked_processes import MARK, left_over, marked
from tests.tkernels.outside import write_variant

BEFORE = "    tokens, width = out.shape\n"
WIDTH = 24  # of the experiments' rows; a file is tried on others when it is imported
DEATHS = {
    "segfault": "import ctypes; ctypes.string_at(0)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "leaves": "import os; print('on my way', flush=True); os._exit(3)",
    "hangs": "import time; time.sleep(60)",
    "hungry": "torch.empty(1 << 60, dtype=torch.uint8)",
    "memory": "raise MemoryError",
    "exits": "raise SystemExit(0)",
    "interrupts": "raise KeyboardInterrupt('mine')",
    "orphans": "import subprocess; subprocess.Popen(['sleep', '300'])",
}


def doing(code: str) -> tuple[str, str]:
    """The change of a launcher that does this, too, in the experiments of these tests."""
    lines = "".join(f"        {line}\n" for line in code.strip("\n").splitlines())
    return BEFORE, f"{BEFORE}    if width == {WIDTH}:\n{lines}"


def experiment(folder: Path, **keys: Any) -> Path:
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump({"name": "deaths", "shapes": {"swiglu": [{"T": 2, "I": WIDTH}]}, **keys}))
    return file


def command(file: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "experiments.cli", "run", str(file), "--out", str(out)]


@pytest.fixture
def run_id() -> Iterator[str]:
    """Marks every process that a test starts; none may be left."""
    mark = f"test-{os.getpid()}-{time.time_ns()}"
    yield mark
    assert left_over(mark, seconds=10.0) == []


def test_whatever_ends_a_task_is_its_row_and_the_others_go_on(tmp_path: Path, run_id: str) -> None:
    for name, code in DEATHS.items():
        named = ("swiglu_doubled", f"swiglu_{name}")
        write_variant(tmp_path / "mine", doing(code), named, name=name)
    write_variant(tmp_path / "mine")
    kernels = {"swiglu": [*DEATHS, "doubled", "torch"]}
    file = experiment(tmp_path, variants_from=["mine"], kernels=kernels, device="cpu", timeout=12)
    out = tmp_path / "out"
    done = subprocess.run(command(file, out), capture_output=True, text=True, check=False, env=marked(run_id))
    assert done.returncode == 1, done.stderr
    rows = [Row.model_validate_json(line) for line in (out / "results.jsonl").read_text().splitlines()]
    checks = {row.variant: row for row in rows if row.stage == "check"}
    assert set(checks) == set(kernels["swiglu"])
    reasons = {name: str(checks[name].reason) for name in DEATHS if checks[name].status == "failed"}
    assert set(reasons) == set(DEATHS) - {"orphans"}
    assert reasons["segfault"].startswith("killed by SIGSEGV; last printed: Fatal Python error: Segmentation fault")
    assert "string_at" in reasons["segfault"]
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert reasons["killed"].startswith("killed by SIGKILL, as the kernel does when memory runs out")
    assert reasons["leaves"].startswith("its process left with exit status 3; last printed: on my way")
    assert reasons["hangs"].startswith("timeout: it took longer than 12 s")
    assert reasons["hungry"].startswith("out of memory: RuntimeError")
    assert reasons["memory"].startswith("out of memory: MemoryError")
    assert reasons["exits"].startswith("SystemExit: 0\n  at ")
    assert str(checks["exits"].replay).startswith("tk check ")
    assert reasons["interrupts"].startswith("it raised KeyboardInterrupt: mine; last printed: ")
    for name in ("segfault", "killed", "leaves", "hangs", "interrupts"):
        assert reasons[name].endswith("(at: I=24,T=2)")
        assert (checks[name].point, checks[name].task_rows) == ("I=24,T=2", 1)
    assert checks["doubled"].status == checks["torch"].status == "ok"
    timed = {row.variant: row.status for row in rows if row.stage == "kernels"}
    assert timed == {"doubled": "ok", "torch": "ok", "orphans": "ok"}


def test_what_dies_at_one_point_goes_on_at_the_others_and_leaves_nothing_behind(
    write: Write, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it says that all went well, and where it has a session of its own."""
    monkeypatch.setenv(MARK, run_id)
    dies = """
import os, subprocess
subprocess.Popen(["sleep", "300"], start_new_session=True)
if tokens == 3:
    os._exit(0)
if tokens == 4:
    os.abort()
"""
    write_variant(tmp_path / "mine", doing(dies))
    shapes = {"swiglu": [{"T": [2, 3, 4, 5], "I": WIDTH}]}
    file = write(kernels={"swiglu": ["doubled"]}, variants_from=["mine"], shapes=shapes, device="cpu")
    left: list[list[str]] = []

    class Watched(Local):
        def run(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
            for ended in super().run(tasks, doing):
                left.append([line for line in left_over(run_id, seconds=0.0) if "sleep" in line])
                yield ended

    folder = run_experiment(
        make_sweep(read_document(file)), tmp_path / "run", [], Console(quiet=True), executor=Watched()
    )
    checks = folder.of_task("check/swiglu.doubled")
    assert [(row.axes or {})["T"] for row in checks] == [2, 3, 4, 5]
    assert [row.status for row in checks] == ["ok", "failed", "failed", "ok"]
    assert checks[1].reason == "its process left with exit status 0 before its end (at: T=3)"
    assert str(checks[2].reason).startswith("killed by SIGABRT")
    assert {row.task_rows for row in checks} == {4}
    timed = [row for row in folder.of_task("kernels/swiglu.doubled#0") if row.stage == "kernels"]
    assert [(row.axes or {})["T"] for row in timed] == [2, 5]
    assert left == [[], [], [], []]  # three processes for the checks, one for the times


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_when_the_driver_is_gone_so_is_everything_that_it_started(tmp_path: Path, run_id: str, number: int) -> None:
    write_variant(tmp_path / "mine", doing(f"open({str(tmp_path / 'here')!r}, 'w'); {DEATHS['hangs']}"))
    file = experiment(tmp_path, variants_from=["mine"], kernels={"swiglu": ["torch", "doubled"]}, replicates=3)
    process = subprocess.Popen(
        command(file, tmp_path / "out"), stderr=subprocess.PIPE, text=True, env=marked(run_id),
        # Where the tests run in a shell's background, or under nohup, these are ignored, and what they start would too.
        preexec_fn=lambda: (
            signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL),
        ),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "here").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "here").exists()
    assert len(left_over(run_id, seconds=0.0)) >= 5  # driver, three servers, the task
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert f"tk run {file} --resume {tmp_path / 'out'}" in " ".join(said.split())
    assert left_over(run_id, seconds=10.0) == []
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["torch"]


def test_what_a_server_imports_asks_nothing_about_cuda() -> None:
    """Asking is enough to break CUDA in the children that it forks; compiled, as it is for a GPU."""
    code = """
import os, sys
os.environ["TRITON_INTERPRET"] = "0"
import torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_properties", "current_device"):
    setattr(torch.cuda, name, lambda *args, name=name: asked.append(name) or False)
import tkernels, experiments.sweep.work, experiments.gpu_report.worker, experiments.gpu_report.precompile
import transformers.models.auto.tokenization_auto
from tkernels.mode import MODE
assert MODE == "compile", MODE
assert asked == [], asked
threads = len(os.listdir("/proc/self/task"))
assert threads == 1, threads
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_what_a_task_forked_does_not_keep_the_driver_waiting_for_a_killed_server(tmp_path: Path, run_id: str) -> None:
    left = tmp_path / "left"
    deadly = f"import os, time\nif os.fork() == 0:\n    open({str(left)!r}, 'w').write(str(os.getpid()))\n"
    deadly += "    os.setsid(); time.sleep(60); os._exit(0)\n"
    deadly += "time.sleep(0.5); os.kill(os.getppid(), 9); time.sleep(60)\n"
    write_variant(tmp_path / "mine", doing(deadly))
    file = experiment(tmp_path, variants_from=["mine"], kernels={"swiglu": ["torch", "doubled"]})
    start = time.monotonic()
    words = command(file, tmp_path / "out")
    done = subprocess.run(words, capture_output=True, text=True, env=marked(run_id), timeout=120)
    assert time.monotonic() - start < 45
    assert "the server of its replicate ended: killed by SIGKILL" in " ".join(done.stdout.split())
    os.kill(int(left.read_text()), signal.SIGKILL)  # of a killed server's task in a session of its own: nobody ends it
