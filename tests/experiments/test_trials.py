"""How `tk check` goes: failures are said at once, what ends a process ends alone, a signal loses nothing."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import experiments.commands.check as check_command
import experiments.progress
from experiments.cli import app
from experiments.commands import trials
from experiments.commands.choices import Subject, case_size
from experiments.commands.output import progress_bar
from experiments.commands.requests import CheckRequest
from experiments.commands.trials import BEGUN, Result, Trial, carry_out
from experiments.signals import Signals
from tests.experiments.first_failure import make_wrong
from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.contract import Axes
from tkernels.inputs import clone_inputs
from tkernels.variant import Variant
from tkernels.verification.calls import call
from tkernels.verification.check import check_case
from tkernels.verification.draws import drawn_cases

WRONG = ("offs, out.to(out_ptr", "offs, (out * 1.1).to(out_ptr")
BEGIN = "    tokens, width = out.shape\n"
KERNEL = "    offs = tl.arange(0, BLOCK)\n"
IMPORTS = ("import torch\n", "import ctypes, os, sys, time\nimport torch\n")
POINT = {"T": 2, "I": 8, "limit": 0, "activation": "float32", "layout": "contiguous", "values": "ordinary"}


def write_two(folder: Path, *changes: tuple[str, str]) -> list[Variant]:
    """A variant with the changes, and after it one without."""
    for name, of_this in (("bad", changes), ("good", ())):
        write_variant(folder, *of_this, ("swiglu_doubled", f"swiglu_{name}"), name=name)
    variants = OPS.with_variants_from(folder)["swiglu"].variants
    return [variants["bad"], variants["good"]]


def check(variants: list[Variant], capsys: pytest.CaptureFixture[str], axes: Axes, **asked: Any) -> Any:
    """(status, a summary of each variant, stderr) of `tk check --json`."""
    request = CheckRequest(as_json=True, **asked)
    subjects = [Subject(variant, axes, None) for variant in variants]
    status = check_command._run(request, lambda: [check_command.make_trial(request, subject) for subject in subjects])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


@pytest.mark.parametrize(
    ("place", "line", "fault"),
    [
        (BEGIN, "os._exit(0)", "exit status 0 before its end"),
        (KERNEL, "ctypes.string_at(0)", "killed by SIGSEGV"),
        (BEGIN, "os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (KERNEL, "while True: time.sleep(1)", "timeout: it took longer than 8 s"),
        (BEGIN, "raise KeyboardInterrupt", "it raised KeyboardInterrupt"),
        (BEGIN, "print('here I am'); sys.stdout.flush(); os._exit(3)", "exit status 3; last printed: here I am"),
        (BEGIN, "held = [torch.ones(2**26) for _ in range(30)]; time.sleep(60)", "memory: it took more than"),
    ],
)
def test_a_variant_that_ends_its_process_fails_alone(
    place: str,
    line: str,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "timeout" in fault:
        monkeypatch.setattr(check_command, "_SECONDS", 8.0)
    held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(trials, "free_memory", lambda: 2 * (held + 2**30))
    variants = write_two(tmp_path, IMPORTS, (place, f"{place}    {line}\n"))
    status, (bad, good), err = check(variants, capsys, POINT)
    assert status == 1
    assert (bad["status"], bad["examples"], bad["ok"]) == ("failed", 1, 0)
    assert fault in bad["reason"]
    (failure,) = bad["failures"]
    assert "--op swiglu --variant bad --axes T=2,I=8" in failure["replay"]
    assert failure["message"] in err
    assert (good["status"], good["ok"]) == ("ok", 1)
    assert err.splitlines()[-1] == "exit status 1: 1 of 2 variants failed: swiglu.bad (failed)"


def test_a_launcher_that_hangs_while_its_cases_are_drawn_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_command, "_SECONDS", 1.0)
    variants = write_two(tmp_path, IMPORTS, (BEGIN, f"{BEGIN}    time.sleep(60)\n"))
    _, (bad, good), err = check([variants[0]] * 2, capsys, {"I": 8}, examples=1)
    assert bad["status"] == good["status"] == "failed"
    assert "before its first case: timeout: it took longer than 1 s" in err


def test_what_an_outside_variant_prints_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = write_two(tmp_path, (KERNEL, f"{KERNEL}    print('offsets', offs)\n"))
    _, _, err = check(variants, capsys, POINT)
    assert "offsets" in err


def test_three_failures_are_shown_smallest_first_and_wide_cases_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, _ = write_two(tmp_path, WRONG)
    status, (summary,), err = check([bad], capsys, {"I": 8, "activation": "float32"}, examples=12)
    assert status == 1
    assert len(summary["failures"]) == summary["examples"] - summary["ok"] == trials.MOST_FAILURES
    assert summary["wide"] == 0
    assert summary["left_out"].keys() == {"drawn", "wide"}
    assert [err.index(failure["message"]) for failure in summary["failures"]]
    drawn, _ = trials.smallest_first(check_command.drawn_cases(bad, 12, 0, {"I": 8, "activation": "float32"}))
    assert [case_size(case.axes) for case, _ in drawn] == sorted(case_size(case.axes) for case, _ in drawn)
    _, (everything,), _ = check([bad], capsys, {"I": 8, "activation": "float32"}, examples=12, keep_going=True)
    assert everything["failures"][:3] == summary["failures"]
    assert everything["examples"] == 12
    assert everything["wide"] > 0
    assert everything["left_out"] == {}


def test_a_failure_is_said_before_the_next_case_begins(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def cases() -> Iterator[Result]:
        for number in range(2):
            yield Result("drawn", BEGUN, message="a case")
            yield Result("drawn", "wrong", "off", f"case {number} is wrong\n  replay: tk check {number}")
            said.append(capsys.readouterr().err)

    trial = Trial(Subject(OPS["swiglu"].variants["torch"], {}, None), "drawn", 2, cases)
    carry_out("check", lambda: [trial], 1.0, Signals())
    assert ["case 0 is wrong\n  replay: tk check 0" in said[0], "case 1 is wrong" in said[1]] == [True, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("form", ["--json", "text"])
def test_a_signal_leaves_what_was_done_by_then(number: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def checked(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:  # of torch's two and its wide ones, and then the next variant's
            os.kill(os.getpid(), number)
        result = check_case(*arguments, **options)
        return replace(result, status="wrong", reason="planted") if calls == 1 else result

    monkeypatch.setattr(check_command, "check_case", checked)
    monkeypatch.setattr(check_command, "count_wide_cases", lambda *_: 0)
    monkeypatch.setattr(check_command, "wide_cases", lambda *_: ())
    result = CliRunner().invoke(app, ["check", "swiglu", "--examples", "6", *([form] if form == "--json" else [])])
    assert result.exit_code == 130
    last = result.stderr.splitlines()[-1]
    assert last.startswith("exit status 130: interrupted: 1 of 3 variants done; partly: swiglu.")
    assert "; not reached: swiglu." in last
    if form == "--json":
        done, partly, left = json.loads(result.stdout)
        assert (done["status"], done["examples"], done["ok"]) == ("wrong", 6, 5)
        assert (partly["status"], partly["examples"]) == ("interrupted", 2)
        assert (left["status"], left["examples"]) == ("not run", 0)
    else:
        assert "planted" in result.stdout
        assert "interrupted" in result.stdout


def test_a_signal_leaves_the_sanitizers_that_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.commands import sanitize

    inspected: list[str] = []

    def inspect(sanitizer: Any, *_: Any) -> None:
        inspected.append(sanitizer.name)
        if len(inspected) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(sanitize, "inspect_case", inspect)
    command = ["check", "--sanitize", "address,poison,guard", "--op", "swiglu", "--variant", "fused"]
    result = CliRunner().invoke(app, [*command, "--examples", "2", "--json"])
    assert result.exit_code == 130
    verdicts = [(row["sanitizer"], row["verdict"], row["cases"]) for row in json.loads(result.stdout)]
    assert verdicts == [("address", "ok", 2), ("poison", "not run", 0), ("guard", "not run", 0)]


def test_where_no_terminal_is_a_line_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiments.progress, "EVERY_S", 0.0)
    with progress_bar("check", 40) as update:
        update(doing="swiglu.fused")
        update(advance=3)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "check 0 of 40 in 0:00 now swiglu.fused"
    assert second == "check 3 of 40 in 0:00 now swiglu.fused"


def test_nothing_checked_is_status_1_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_variant(tmp_path, ('wins="never"', 'wins="never", supports=lambda axes, device: "only on Tuesdays"'))
    variant = OPS.with_variants_from(tmp_path)["swiglu"].variants["doubled"]
    status, _, err = check([variant], capsys, POINT)
    assert status == 1
    assert err.splitlines()[-1] == "exit status 1: nothing was checked: swiglu.doubled is unsupported: only on Tuesdays"
    sanitized = CliRunner().invoke(app, ["check", "--sanitize", "address", "--op", "swiglu", "--variant", "torch"])
    assert sanitized.exit_code == 1
    last = sanitized.stderr.splitlines()[-1]
    assert last == "exit status 1: nothing was put under a sanitizer: swiglu.torch: it launches no kernel of ours"


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        ("kv_scatter", "token_per_program"),
        ("copy_pages", "page_parts"),
        ("qk_norm_rope_scatter", "composed"),
        ("swiglu", "fused"),
    ],
)
def test_the_variant_whose_first_failure_is_timed_is_wrong_in_its_results_and_right_otherwise(
    op: str, variant: str
) -> None:
    wrong = make_wrong(OPS[op].variants[variant])
    for case, config in drawn_cases(wrong, 3):
        before = clone_inputs(case.inputs)
        result = check_case(wrong, case, config)
        is_empty = not any(tensor.numel() for tensor in call(OPS[op].variants[variant], before, config).values())
        assert result.status == ("ok" if is_empty else "wrong"), result.reason
        assert is_empty or all(not verdict.ok for verdict in result.verdicts.values())
