"""The `tk` commands, as a user meets them."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tkernels
from experiments.cli import app
from experiments.commands.op_rows import DrawnAxes
from tests.tkernels.outside import write_variant
from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.verification.draws import chooser

ROOT = Path(__file__).parents[2]
WRONG = ("offs, out.to(out_ptr", "offs, (out * 1.1).to(out_ptr")


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_mistyped_variant_fails_before_anything_is_built(tmp_path: Path) -> None:
    command = "import sys; from experiments.cli import main; main()"
    arguments = ["run", "experiments/quickstart.yaml", "--set", "kernels.paged_decode=splitkv"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: kernels.paged_decode (--set kernels.paged_decode=splitkv): unknown")
    assert "did you mean 'split_kv'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []  # no model was made, no weight was there to load


def test_help_loads_no_torch() -> None:
    command = (
        "import sys; from experiments.cli import app; app(['--help'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("ops", "check", "run", "generate", "serve", "make-model"):
        assert name in done.stdout


@pytest.mark.parametrize("words", [["ops", "swiglu"], ["ops", "swiglu", "--json"]])
def test_nobody_who_reads_its_output_is_the_status_of_a_closed_pipe(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "experiments.cli", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_ops_as_json_lists_every_variant() -> None:
    result = tk("ops", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert {(row["op"], row["variant"]) for row in rows} == {
        (op.name, name) for op in tkernels.OPS.values() for name in op.variants
    }
    for row in rows:
        assert set(row) == {
            "op", "variant", "kind", "supported", "reason", "deterministic", "batch_invariant", "wins", "file",
            "tuned_on",
        }  # fmt: skip
        assert Path(row["file"]).is_file()
        assert row["kind"] in ("torch", "triton", "library")
        assert row["supported"]
        assert len(row["wins"]) > 10


def test_ops_gives_an_outside_variant_its_reason(tmp_path: Path) -> None:
    write_variant(tmp_path, ('wins="never"', 'wins="never", supports=lambda axes, device: "only on Tuesdays"'))
    rows = json.loads(tk("ops", "--json", "--variants-from", tmp_path).stdout)
    (mine,) = [row for row in rows if row["variant"] == "doubled"]
    assert (mine["supported"], mine["reason"]) == (False, "doubled does not take limit; only on Tuesdays")
    assert Path(mine["file"]) == tmp_path / "swiglu" / "doubled.py"
    assert "only on Tuesdays" in tk("ops", "--variants-from", tmp_path).stdout


def test_check_passes_a_right_variant_and_its_json_is_all_of_stdout() -> None:
    result = tk("check", "--op", "swiglu", "--variant", "fused", "--examples", 3, "--json")
    assert result.exit_code == 0
    (summary,) = json.loads(result.stdout)
    assert (summary["status"], summary["examples"], summary["ok"], summary["failures"]) == ("ok", 3, 3, [])
    assert 0 < summary["max_error_ratio"] <= 1


def test_check_fails_a_wrong_variant_and_its_replay_fails_the_same_way(tmp_path: Path) -> None:
    write_variant(tmp_path, WRONG)
    options: tuple[Any, ...] = ("--variants-from", tmp_path)
    result = tk("check", "--op", "swiglu", "--variant", "doubled", "--examples", 6, "--json", *options)
    assert result.exit_code == 1
    (summary,) = json.loads(result.stdout)
    assert summary["status"] == "wrong"
    failure = summary["failures"][0]
    replay = shlex.split(failure["replay"])
    assert replay[:2] == ["tk", "check"]
    options = () if "--variants-from" in replay else options
    again = tk(*replay[1:], "--json", *options)
    assert again.exit_code == 1
    (repeated,) = json.loads(again.stdout)
    assert repeated["examples"] == 1
    assert repeated["failures"][0] == failure
    printed = tk(*replay[1:], *options)
    assert failure["replay"] in printed.stdout
    assert "expected" in printed.stdout


def test_a_launcher_that_exits_is_a_failed_check(tmp_path: Path) -> None:
    """Status 0 too, which would read as: all is right."""
    before = "    tokens, width = out.shape\n"
    write_variant(tmp_path, (before, f"{before}    raise SystemExit(0)\n"))
    result = tk("check", "--variant", "doubled", "--examples", 1, "--json", "--variants-from", tmp_path)
    assert result.exit_code == 1
    (summary,) = json.loads(result.stdout)
    assert (summary["status"], summary["ok"]) == ("failed", 0)
    assert "SystemExit: 0" in summary["failures"][0]["message"]


def test_check_shows_the_smallest_failing_case_first(tmp_path: Path) -> None:
    write_variant(tmp_path, WRONG)
    result = tk("check", "--variant", "doubled", "--examples", 12, "--json", "--variants-from", tmp_path)
    replays = [failure["replay"] for failure in json.loads(result.stdout)[0]["failures"]]
    sizes = []
    for replay in replays:
        axes = dict(pair.split("=") for pair in replay.split("--axes ")[1].split()[0].split(","))
        sizes.append(max(1, int(axes["T"])) * int(axes["I"]))
    assert len(sizes) > 1
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "swigl"), "did you mean 'swiglu'?"),
        (("--op", "swiglu", "--variant", "fusd"), "did you mean 'fused'?"),
        (("--variant", "nothing"), "no op has a variant 'nothing'"),
        (("--axes", "T=3"), "name it with --op"),
        (("--op", "swiglu", "--axes", "U=3"), "swiglu has no axis 'U': there is T, I"),
        (("--op", "swiglu", "--axes", "T=many"), "T=many, but 0 <= T"),
        (("--op", "swiglu", "--axes", "T=--5"), "T=--5, but 0 <= T"),
        (("--op", "swiglu", "--axes", "activation=int8"), "activation in (float32"),
        (("--op", "swiglu", "--axes", "T"), "must be name=value"),
        (("--op", "swiglu", "--variant", "fused", "--config", "BLOCK=3"), "config has no 'BLOCK'"),
        (("--op", "swiglu", "--variant", "fused", "--config", "num_warps=many"), "must be a number"),
        (("--op", "swiglu", "--variant", "torch", "--config", "num_warps=4"), "swiglu.torch has no config"),
        (("--variants-from", "/nowhere"), "/nowhere is not a folder"),
    ],
)
def test_check_refuses_what_it_does_not_know(arguments: tuple[str, ...], message: str) -> None:
    result = tk("check", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_run_prints_a_table_and_its_folder(write: Callable[..., Path], tmp_path: Path) -> None:
    file = write(kernels={"swiglu": ["torch", "fused"]})
    out = tmp_path / "out"
    result = tk("run", file, "--set", "shapes.swiglu=[{T: 2, I: 33}]", "--out", out)
    assert result.exit_code == 0
    assert "T=2,I=33" in result.stdout
    assert str(out / "results.jsonl") in result.stdout
    assert f"Report: {out / 'report.html'}" in result.stdout
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (out / "figures" / "roofline.svg").exists()
    assert json.loads((out / "environment.json").read_text())["overrides"] == ["shapes.swiglu=[{T: 2, I: 33}]"]


def test_run_fails_where_a_variant_is_wrong(write: Callable[..., Path], tmp_path: Path) -> None:
    write_variant(tmp_path / "mine", WRONG)
    file = write(kernels={"swiglu": "doubled"}, shapes={"swiglu": [{"T": 2, "I": 8}]}, variants_from=["mine"])
    result = tk("run", file, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "1 of 1 results are not as they should be" in result.stdout


def test_run_reports_every_problem_on_a_line_of_its_own(write: Callable[..., Path]) -> None:
    result = tk("run", write(kernels={"swigl": "torch", "swiglu": "fusd"}))
    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "error"]


def test_generate_continues_a_prompt_the_same_with_every_kernel(checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "def scan(", "--max-tokens", 6, "--dtype", "float32")
    plain = tk(*arguments)
    assert plain.exit_code == 0
    assert plain.stdout.strip()
    assert "6 tokens, finished by length" in plain.stderr
    chosen = ("--kernels", "swiglu=fused", "--kernels", "rms_norm={row_per_program: {num_warps: 2}}")
    assert tk(*arguments, *chosen).stdout == plain.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernels", "swiglu=fusd"), "did you mean 'fused'?"),
        (("--kernels", "swiglu"), "must be op=variant"),
        (("--kernels", "swiglu=fused", "--kernels", "swiglu=torch"), "swiglu is given twice"),
        (("--top-p", "2"), "top_p must be above 0"),
        (("--max-tokens", "0"), "max_tokens must be at least 1"),
        (("--dtype", "float8"), "dtype must be"),
        (("--prompt", ""), "the prompt is empty"),
        (("--model", "tinny"), "tinny, no trained preset of that name, and it is no hub id"),
        (("--model", "tinny"), "presets are tiny, "),
        (("--model", "tinny"), "; did you mean 'tiny'?"),
    ],
)
def test_generate_refuses_what_it_cannot_do(checkpoint: Path, arguments: tuple[str, ...], message: str) -> None:
    result = tk("generate", "--model", checkpoint, "--prompt", "a", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_make_model_refuses_an_unknown_preset_and_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    unknown = tk("make-model", "--preset", "tinny", tmp_path / "new")
    assert (unknown.exit_code, "did you mean 'tiny'?" in unknown.stderr) == (2, True)
    used = tk("make-model", "--preset", "tiny", tmp_path)
    assert (used.exit_code, "not an empty directory" in used.stderr) == (2, True)


def test_a_path_that_cannot_be_made_is_an_error_and_no_traceback(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tk("make-model", "/proc/foo/x")
    assert made.exit_code == 2
    assert made.stderr.startswith("error: /proc/foo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/x")
    workload = {"kind": "prompts", "prompts": ["a"]}
    ran = tk("run", write(model={"preset": "tiny"}, workload=workload), "--out", tmp_path / "out")
    assert ran.exit_code == 2
    assert ran.stderr.splitlines()[-1].startswith("error: /proc/x")


@pytest.mark.parametrize("asked", ["run", "profile"])
def test_a_wrong_name_is_refused_without_torch(asked: str) -> None:
    command = (
        "import sys; from typer.testing import CliRunner; from experiments.cli import app; "
        "result = CliRunner().invoke(app, sys.argv[1:]); print(result.output); "
        "assert result.exit_code == 2; assert 'torch' not in sys.modules"
    )
    wrong = ["kernels.swiglu=fsed", "scheduler.order=lifo", "dtype=[float32, float23]"]
    arguments = [asked, "experiments/quickstart.yaml", *(part for one in wrong for part in ("--set", one))]
    done = subprocess.run([sys.executable, "-c", command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("'fused'?", "'lifo'", "dtype[1]"):
        assert name in done.stdout


def test_more_arms_than_usual_are_asked_about(tmp_path: Path) -> None:
    text = "name: many\nmodel: {preset: tiny}\nkernels: {swiglu: [torch, fused]}\nrepeats: 1\nreplicates: 2\n"
    sizes = "scheduler: {max_num_seqs: [1, 2, 3, 4, 5, 6], max_chunk_tokens: [16, 32, 64, 128, 256, 512]}\n"
    (tmp_path / "many.yaml").write_text(text + sizes)
    result = tk("run", tmp_path / "many.yaml", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "72 arms, at most" in result.output
    assert "more than 64 arms are run with --yes" in result.output
    assert not (tmp_path / "out").exists()


def test_more_shapes_than_usual_are_asked_about(tmp_path: Path) -> None:
    shapes = f"shapes: {{swiglu: [{{T: {[*range(1, 41)]}, I: {[*range(1, 31)]}}}]}}\n"
    (tmp_path / "many.yaml").write_text(f"name: many\nkernels: {{swiglu: [torch]}}\n{shapes}")
    result = tk("run", tmp_path / "many.yaml", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "1,200 calls of variants at points of its shapes" in result.output
    assert "more than 1,024 are run with --yes" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("op", tkernels.OPS)
def test_the_axes_that_ops_asks_about_are_those_of_a_call(op: str) -> None:
    contract = tkernels.OPS[op].contract
    asked: list[Axes] = []

    def record_axes(axes: Axes, _: DeviceFacts) -> None:
        asked.append(dict(axes))

    variant = replace(tkernels.OPS[op].variants["torch"], supports=record_axes)
    for seed in (5, 6, 7):
        variant(**contract.case(contract.draw_axes(chooser(seed)), seed).inputs)
        drawn = DrawnAxes(contract, seed)
        assert asked[-1] == {name: drawn[name] for name in asked[-1]}
        assert asked[-1].items() <= drawn.items()
    assert len(asked) == 3
