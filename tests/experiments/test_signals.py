"""Whenever a signal comes to `tk check` or `tk bench`, it says what was done by then and what not, with status 130."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import experiments.commands.check as check_command
from experiments.cli import app
from experiments.commands import bench, sanitize, trials
from tests.tkernels.outside import write_variant

CHECK = ["check", "swiglu", "--examples", "1"]
SANITIZE = ["check", "swiglu", "--sanitize", "poison", "--examples", "1"]
DONE = "exit status 130: interrupted: 3 of 3 variants done"
NOTHING = "exit status 130: interrupted while variants were gathered: none was reached"


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int = 1) -> None:
    """SIGTERM comes in the call of that number of a function, before it does anything."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def called(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, called)


@pytest.fixture(autouse=True)
def drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command, "count_wide_cases", lambda *_: 0)
    monkeypatch.setattr(check_command, "wide_cases", lambda *_: ())


def last_line(done: Result) -> str:
    assert done.exit_code == 130, done.output
    assert "None" not in done.output
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("form", ["--json", "text"])
@pytest.mark.parametrize(
    ("command", "owner", "name", "said"),
    [
        (CHECK, check_command, "open_registry", NOTHING),
        (CHECK, check_command, "make_trial", NOTHING),
        (CHECK, check_command, "check_case", "0 of 3 variants done; partly: swiglu.torch; not reached: swiglu."),
        (CHECK, trials, "runs_apart", NOTHING),
        (CHECK, check_command, "summarize", DONE),
        (CHECK, check_command, "status_text", DONE),
        (CHECK, check_command, "_conclude", DONE),
        (SANITIZE, check_command, "open_registry", NOTHING),
        (SANITIZE, sanitize, "inspect_case", "0 of 3 variants done; partly: swiglu.torch; "),
        (SANITIZE, sanitize, "summarize", DONE),
    ],
)
def test_it_says_what_was_done(
    command: list[str], owner: Any, name: str, said: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (form, name) == ("--json", "status_text"):
        name = "print_json"
    kill_at(monkeypatch, owner, name)
    done = CliRunner().invoke(app, [*command, *([form] if form == "--json" else [])])
    assert said in last_line(done)
    if form == "--json":
        rows = json.loads(done.stdout)
        assert len(rows) == (0 if said == NOTHING else 3)
        assert all(row["reason"] for row in rows if row.get("status", "") in ("interrupted", "not run"))
    elif said == DONE:
        assert "swiglu" in done.stdout


@pytest.mark.parametrize("done", [0, 1, 2])
def test_between_two_variants(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(monkeypatch, trials, "runs_apart", 3 + 1 + done)  # it is asked of each before, when cases are counted
    assert f"interrupted: {done} of 3 variants done; partly: swiglu." in last_line(CliRunner().invoke(app, CHECK))


def test_a_second_one_ends_it_while_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(monkeypatch, check_command, "print_json")
    kill_at(monkeypatch, check_command, "summarize")
    done = CliRunner().invoke(app, [*CHECK, "--json"])
    assert (last_line(done), done.stdout) == ("error: interrupted", "")


def test_bench_prints_what_it_has_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(monkeypatch, bench, "measure", 2)
    command = ["bench", "--op", "swiglu", "--axes", "T=4,I=64", "--json"]
    done = CliRunner().invoke(app, command)
    assert "timings done; not reached, or not whole: swiglu.fused at T=4,I=64" in last_line(done)
    assert "interrupted: 1 of " in last_line(done)
    assert [row["variant"] for row in json.loads(done.stdout)] == ["torch"]


KILLS = f"import os, time; os.kill(int(os.environ['TK_CHECK']), {signal.SIGTERM:d}); time.sleep(60)"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("VARIANT =", NOTHING),
        ("    offs = tl.arange(0, BLOCK)\n", "0 of 1 variants done; partly: swiglu.doubled"),
    ],
)
def test_while_an_outside_file_is_imported_or_runs(
    where: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TK_CHECK", str(os.getpid()))
    indent = " " * (len(where) - len(where.lstrip()))
    write_variant(tmp_path, (where, f"{indent}{KILLS}\n{where}"))
    command = [*CHECK, "--variant", "doubled", "--variants-from", str(tmp_path)]
    assert said in last_line(CliRunner().invoke(app, command))


HOOK = """
import os, signal, sys
class Kill:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["TK_KILLED_AT"]:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException:
                pass  # as an import may
sys.meta_path.insert(0, Kill())
"""


@pytest.mark.parametrize(
    ("command", "module", "said"),
    [
        ("check", "torch.nn", "tk check"),
        ("ops", "torch.nn", "tk ops"),
        ("ops", "typer", "tk"),
        ("ops", "tsched.options", "tk"),
    ],
)
def test_while_modules_are_imported(command: str, module: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "experiments.cli", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TK_KILLED_AT": module},
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"exit status 130: interrupted before {said} had begun\n"
