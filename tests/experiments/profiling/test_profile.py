"""`tk profile`: a trace and a table of an arm's steps with exactly the names of what it does."""

import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from experiments.commands import profile
from experiments.commands.profile import run
from experiments.commands.requests import ProfileRequest
from experiments.document import ExperimentError
from experiments.planning.plan import Plan, Sweep
from experiments.profiling import tools
from experiments.profiling.proton import ProtonRanges, profile_with_proton, unavailable
from tests.experiments.conftest import checkpoint
from tests.experiments.profiling.nsys_files import two_steps
from tests.experiments.profiling.perfetto_rules import problems_of
from tests.tmodel.mixtures import MIXTURE, mixture_tensors
from tkernels.ranges import RECORD_GRAPH
from tsched.execution.phases import PHASES

__all__ = ["checkpoint"]

QUICKSTART = Path(__file__).parents[3] / "experiments" / "quickstart.yaml"
LAYERS = {"layer 0", "layer 1"}
PARTS = {"embedding", "q_proj+k_proj+v_proj", "o_proj", "down_proj", "lm_head"}
OPS = {
    "add_rms_norm.torch", "gate_up_swiglu.composed", "kv_scatter.torch", "matmul.torch", "paged_decode.torch",
    "paged_prefill.torch", "qk_norm_rope.torch", "qk_norm_rope_scatter.composed", "rms_norm.torch",
    "sample.torch",
}  # fmt: skip


def asked(file: Path | None = None, *overrides: str, **changes: Any) -> ProfileRequest:
    return replace(ProfileRequest(file, list(overrides)), **changes)


def refusal(request: ProfileRequest) -> str:
    with pytest.raises(ExperimentError) as caught:
        run(request)
    return " ".join(caught.value.problems)


@pytest.mark.parametrize("swiglu", ["torch", "fused"])
def test_the_quickstart_gives_a_trace_of_its_phases_layers_and_ops(
    swiglu: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"model={{path: {checkpoint}}}", f"kernels.swiglu={swiglu}", "workload.max_tokens=4")
    assert run(asked(QUICKSTART, *overrides, out=tmp_path / "out", as_json=True)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["arm"]["swiglu"] == swiglu
    assert told["interpreted"] == (["swiglu"] if swiglu == "fused" else [])
    text = (tmp_path / "out" / "trace.json").read_text()
    assert problems_of(text) == []
    events = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    names = {category: {e["name"] for e in events if e["cat"] == category} for category in {e["cat"] for e in events}}
    assert names == {
        "step": {"step"}, "phase": set(PHASES) - {RECORD_GRAPH}, "layer": LAYERS, "part": PARTS,
        "op": OPS | {f"swiglu.{swiglu}"},
    }  # fmt: skip
    requests = [event["args"]["request_ids"] for event in events if event["name"] == "forward"]
    # The second round's requests: the ids of the first round's have been used up. Four tokens each, the last prompt in
    # two chunks.
    assert requests == [[4, 5, 6, 7]] * 4 + [[7]]
    assert {row["range"] for row in told["ranges"]} == {event["name"] for event in events}
    assert json.loads((tmp_path / "out" / "ranges.json").read_text()) == told
    assert sum(row["self_us"] for row in told["ranges"]) == pytest.approx(told["step_us"])
    command = shlex.split(told["nsys"])
    assert command[:2] == ["nsys", "profile"]
    assert command[-7:] == [str(QUICKSTART), *(part for override in overrides for part in ("--set", override))]


@pytest.fixture
def mixture(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with each layer's MLP a mixture of experts."""
    directory = tmp_path / "mixture"
    shutil.copytree(checkpoint, directory)
    config = {**json.loads((checkpoint / "config.json").read_text()), **MIXTURE}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(mixture_tensors(config), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("moe_mlp", ["composed", "padded_tiles"])
def test_a_mixture_has_rows_for_its_choice_sort_up_and_down(
    moe_mlp: str, mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether these are ops of their own, or launches of one: in each layer of each step, with times that fit in it."""
    overrides = (f"model={{path: {mixture}}}", f"kernels={{moe_mlp: {moe_mlp}}}", "workload.max_tokens=2")
    assert run(asked(QUICKSTART, *overrides, out=tmp_path / "out", as_json=True)) == 0
    rows = {row["range"]: row for row in json.loads(capsys.readouterr().out)["ranges"]}
    inside = ["gate", "route.torch", "moe_mlp sort", "moe_mlp up", "moe_mlp down"]
    assert [rows[name]["category"] for name in inside] == ["part", "op", "section", "section", "section"]
    assert {(rows[name]["op"], rows[name]["variant"]) for name in inside[2:]} == {("moe_mlp", None)}
    assert {rows[name]["calls"] for name in inside} == {sum(rows[name]["calls"] for name in LAYERS)}
    assert all(rows[name]["total_us"] > 0 for name in inside)
    in_op = sum(rows[name]["total_us"] for name in inside[2:])
    assert in_op <= rows[f"moe_mlp.{moe_mlp}"]["total_us"]
    outside = sum(rows[name]["total_us"] for name in ("gate", "route.torch"))
    assert outside + in_op <= sum(rows[name]["total_us"] for name in LAYERS)


def test_without_nsys_the_command_is_printed_and_the_trace_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"model={{path: {checkpoint}}}", "workload.max_tokens=2")
    assert run(asked(QUICKSTART, *overrides, out=tmp_path)) == 0
    out = capsys.readouterr().out
    for line in ("Phases", "paged_decode.torch", "ui.perfetto.dev", "The first arm", "nsys profile --capture-range="):
        assert line in out
    with pytest.raises(
        FileExistsError, match="exists and is not an empty directory; a profile is written to a new one"
    ):
        run(asked(QUICKSTART, *overrides, out=tmp_path))


def test_an_export_needs_no_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = two_steps(tmp_path / "report.sqlite")
    assert run(asked(nsys_export=file)) == 0
    out = capsys.readouterr().out
    assert "report.sqlite: 2 steps of 75.0 us" in out
    assert "paged_decode.one_pass" in out
    assert run(asked(nsys_export=file, as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["step_us"] == 150
    assert "takes no EXPERIMENT, no --set" in refusal(asked(QUICKSTART, nsys_export=file))
    assert "EXPERIMENT is missing" in refusal(asked())
    assert "give one" in refusal(asked(QUICKSTART, nsys_export=file, proton=True))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], None]:
    """The command takes this plan for the experiment's, on a GPU that is only said to be there."""

    def pretend(plan: Plan) -> None:
        there = replace(plan, device=torch.device("cuda", 0))
        monkeypatch.setattr(profile, "make_sweep", lambda document: Sweep(document, (there,), False))

    return pretend


def fake_tool(folder: Path, name: str, script: str) -> None:
    """A program of this name that runs `script`, a Python body that has `arguments`, a list of text."""
    file = folder / name
    file.write_text(f"#!{sys.executable}\nimport sys\narguments = sys.argv[1:]\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_with_nsys_it_is_run_exported_and_read(
    checkpoint: Path, tmp_path: Path, plan: Callable[..., Plan], on_cuda: Callable[[Plan], None],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    workload = {"kind": "prompts", "max_tokens": 2, "prompts": ["def"]}
    on_cuda(plan(model={"path": str(checkpoint)}, workload=workload))
    two_steps(tmp_path / "recorded.sqlite")
    tools_folder = tmp_path / "bin"
    tools_folder.mkdir()
    fake_tool(
        tools_folder, "nsys",
        "import json, shutil\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(arguments) + '\\n')\n"
        "out = next(a for a in arguments if a.startswith('--output=')).partition('=')[2]\n"
        "print('Generating report')\n"
        f"if arguments[0] == 'export': shutil.copy({str(tmp_path / 'recorded.sqlite')!r}, out)",
    )  # fmt: skip
    monkeypatch.setenv("PATH", f"{tools_folder}{os.pathsep}{os.environ['PATH']}")
    file = tmp_path / "experiment.yaml"  # as `plan` wrote it
    assert run(asked(file, "seed=3", out=tmp_path / "out", as_json=True)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == "nsys"
    assert told["steps"] == 2
    profiled, exported = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert profiled == tools.nsys_profile(
        tmp_path / "out" / "steps", tools.target("steps", file, ["seed=3"])
    )[1:]  # fmt: skip
    for option in (
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-graph-trace=node",
        "--trace=cuda,nvtx,osrt", "--nvtx-domain-include=tkernels",
    ):  # fmt: skip
        assert option in profiled
    assert exported == tools.nsys_export(tmp_path / "out" / "steps")[1:]

    fake_tool(tools_folder, "nsys", "sys.exit(7)")
    assert run(asked(file, out=tmp_path / "again")) == 1
    assert "nsys ended with exit status 7" in capsys.readouterr().err


def test_ncu_is_given_the_kernels_of_one_call(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"model={{path: {checkpoint}}}",)
    assert run(asked(QUICKSTART, *overrides, ncu="paged_decode.split_kv", out=tmp_path, as_json=True)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kernels"] == ["paged_decode_split_kv_part", "paged_decode_split_kv_reduce"]
    command = shlex.split(told["command"])
    names = "paged_decode_split_kv_part|paged_decode_split_kv_reduce"
    assert f"--kernel-name=regex:^({names})$" in command
    for option in ("--launch-count=2", "--profile-from-start=off", "--kernel-name-base=function"):
        assert option in command
    assert command[command.index("-m") + 1 :][:4] == [
        "experiments.profiling.target", "launch", "paged_decode.split_kv", str(QUICKSTART),
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())  # nothing was run

    assert run(asked(QUICKSTART, *overrides, ncu="paged_decode.one_pass[BLOCK_N=32]")) == 0
    out = capsys.readouterr().out
    assert "one call launches paged_decode_one_pass\n" in out
    assert "--launch-count=1 " in out
    assert "launch 'paged_decode.one_pass[BLOCK_N=32]'" in out


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("split_kv", "is not OP.VARIANT"),
        ("attention.split_kv", "does not call 'attention'; it calls"),
        ("paged_decode.split", "did you mean 'split_kv'?"),
        ("paged_decode.torch", "launches no kernels of its own that could be named; paged_decode has"),
        ("paged_decode.split_kv[splits=2]", "config has no 'splits'"),
        ("paged_decode.split_kv[num_splits=4,num_splits=8]", "num_splits is pinned more than once"),
        ("paged_decode.split_kv[num_splits=two]", "num_splits=two is no whole number"),
    ],
)
def test_what_ncu_cannot_be_pointed_at_is_refused(name: str, problem: str, checkpoint: Path) -> None:
    assert problem in refusal(asked(QUICKSTART, f"model={{path: {checkpoint}}}", ncu=name))


def test_a_profile_needs_steps_and_an_arm_that_runs(write: Callable[..., Path], tmp_path: Path) -> None:
    file = write(kernels={"swiglu": ["torch"]})
    assert "a profile needs a model and a workload" in refusal(asked(file, out=tmp_path / "out"))


class NotingProton:
    """The module triton.profiler, noting what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def enter_scope(self, name: str) -> None:
        self.calls.append(("enter", name))

    def exit_scope(self, name: str) -> None:
        self.calls.append(("exit", name))

    def start(self, name: str, **options: str) -> None:
        self.calls.append(("start", name))

    def finalize(self) -> None:
        self.calls.append(("finalize", ""))


def test_proton_gets_every_range_as_a_scope_of_a_steady_round(
    checkpoint: Path, tmp_path: Path, plan: Callable[..., Plan]
) -> None:
    workload = {"kind": "prompts", "max_tokens": 2, "prompts": ["def"]}
    made, noting = plan(model={"path": str(checkpoint)}, workload=workload), NotingProton()
    assert profile_with_proton(made, tmp_path, noting) == tmp_path / "proton.hatchet"
    begin, end = noting.calls.index(("start", str(tmp_path / "proton"))), noting.calls.index(("finalize", ""))
    inside = noting.calls[begin + 1 : end]
    assert inside[0] == ("enter", "step")
    open_scopes: list[str] = []
    for kind, name in inside:
        if kind == "enter":
            open_scopes.append(name)
        else:
            assert open_scopes.pop() == name
    assert not open_scopes
    assert {name for _, name in inside} >= {"forward", "layer 1", "lm_head", "paged_decode.torch"}
    assert ProtonRanges(noting).listening


def test_proton_says_why_it_cannot_work_here(checkpoint: Path) -> None:
    assert unavailable(torch.device("cpu")) == (
        "Triton's profiler reads a GPU's counters (CUPTI, roctracer), and the device is cpu"
    )
    assert "--proton: Triton's profiler reads" in refusal(
        asked(QUICKSTART, f"model={{path: {checkpoint}}}", proton=True)
    )


def test_the_processes_that_profilers_watch_say_that_they_need_a_gpu(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments.profiling.target import main

    override = yaml.safe_dump({"path": str(checkpoint)}, default_flow_style=True).strip()
    for mode in (["steps"], ["launch", "paged_decode.split_kv"]):
        assert main([*mode, str(QUICKSTART), "--set", f"model={override}"]) == 2
        assert "NVIDIA's profilers watch a GPU, and the experiment's device is cpu" in capsys.readouterr().err
