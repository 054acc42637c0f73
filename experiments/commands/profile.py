"""`tk profile`: where the steps of one arm spend their time, by range."""

import json
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands.output import print_json
from experiments.commands.requests import ProfileRequest
from experiments.document import ExperimentError, read_document
from experiments.planning.plan import Plan, make_sweep
from experiments.profiling import tools
from experiments.profiling.chrome_trace import write_trace
from experiments.profiling.launches import find_launch
from experiments.profiling.nsys_export import read_export
from experiments.profiling.nsys_stats import read_stats
from experiments.profiling.proton import profile_with_proton, unavailable
from experiments.profiling.range_table import range_table
from experiments.stages.engine import interpreted_ops
from experiments.stages.steady import recorded
from experiments.stages.steps import range_columns
from tkernels.files import check_new_folder
from tkernels.spans import Breakdown, breakdown

_RECORDED = "Recording takes time of its own, most where ranges are short: compare shares, not speeds."


@dataclass(frozen=True)
class _Profile:
    """What ranges took. `facts`: of which run and from what source, for --json; `notes`: lines for people."""

    found: Breakdown
    title: str
    caption: str
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()


def run(request: ProfileRequest) -> int:
    """Prints the table by range, or what a tool of another kind left; 1 where a tool failed."""
    _refuse_combinations(request)
    if request.nsys_export is not None:
        _show(_read_export(request.nsys_export), request.as_json)
        return 0
    assert request.file is not None
    sweep = make_sweep(read_document(request.file, request.overrides))
    plan = sweep.plans[0]
    if request.ncu is not None:
        return _profile_launch(plan, request, request.file, request.ncu)
    if request.proton:
        return _profile_with_proton(plan, request)
    out = _make_folder(plan, request.out)
    command = tools.nsys_profile(out / "steps", tools.target("steps", request.file, request.overrides))
    if missing := _why_missing("nsys", plan):
        profile = _record(plan, out, command, missing, is_first=sweep.num_arms > 1)
    else:
        for line in (command, tools.nsys_export(out / "steps")):
            if status := _call(line):
                return status
        profile = _read_export(out / "steps.sqlite")
    (out / "ranges.json").write_text(json.dumps(_as_json(profile), indent=1) + "\n", encoding="utf-8")
    _show(profile, request.as_json)
    return 0


def _refuse_combinations(request: ProfileRequest) -> None:
    export = request.nsys_export is not None
    if request.proton + (request.ncu is not None) + export > 1:
        raise ExperimentError(["--nsys-export, --proton and --ncu are three different profiles: give one"])
    if export and (request.file is not None or request.overrides or request.out is not None):
        raise ExperimentError(["--nsys-export reads what was recorded: it takes no EXPERIMENT, no --set and no --out"])
    if request.file is None and not export:
        raise ExperimentError(["EXPERIMENT is missing: only --nsys-export FILE does without one"])


def _make_folder(plan: Plan, out: Path | None) -> Path:
    """The folder of this profile, new or empty."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path = out if out is not None else Path("profiles") / f"{plan.experiment.name}-{stamp}"
    check_new_folder(path, "a profile")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _why_missing(tool: str, plan: Plan) -> str | None:
    """Why the profiler cannot run here; None where it can."""
    if not shutil.which(tool):
        return f"{tool} is not on PATH"
    return None if plan.device.type == "cuda" else f"the device is {plan.device}, without CUDA"


def _call(command: Sequence[str]) -> int:
    """Runs a tool, its output on stderr: stdout may be --json's. 1, and a word, where it failed."""
    print(shlex.join(command), file=sys.stderr)
    status = subprocess.run(command, stdout=2, check=False).returncode
    if status:
        print(f"error: {command[0]} ended with exit status {status}", file=sys.stderr)
    return 1 if status else 0


def _record(plan: Plan, out: Path, command: Sequence[str], missing: str, *, is_first: bool) -> _Profile:
    """The same ranges recorded here, with the command that has nsys do it elsewhere."""
    spans, steady = recorded(plan)
    settings = {**steady.arm.settings, **steady.workload.settings}
    arm = {"arm": steady.llm.arm, "settings": settings, "workload": steady.workload.name}
    about = {"experiment": plan.experiment.name, **arm, "dtype": plan.dtype_name, "device": str(plan.device)}
    trace = out / "trace.json"
    write_trace(trace, spans, about)
    first = f"The first arm and workload of {plan.experiment.name}; --set chooses others."
    notes = (
        *([first] if is_first else []),
        f"{missing}: the same ranges were recorded here. With Nsight Systems and a GPU:",
        f"  {shlex.join(command)}",
        f"{len(spans)} spans in {trace}: open it in https://ui.perfetto.dev",
    )
    slow = interpreted_ops(steady.llm)
    caption = f"{_RECORDED} Interpreted, so that no kernel was timed: {', '.join(slow)}." if slow else _RECORDED
    facts = {**about, "source": "recording", "interpreted": slow, "trace": str(trace), "nsys": shlex.join(command)}
    titles = ", ".join(filter(None, (steady.arm.title, steady.workload.title)))
    return _Profile(breakdown(spans), f"{plan.experiment.name}: {titles}", caption, facts, notes)


def _read_export(file: Path) -> _Profile:
    facts = {"source": "nsys", "file": str(file)}
    if file.suffix == ".csv":
        caption = "device us: from a range's first operation on the device to its last, as nsys stats projects it."
        return _Profile(read_stats(file), file.name, caption, facts)
    caption = "device us: of the work that was launched in the range, or captured in it and replayed."
    return _Profile(read_export(file), file.name, caption, facts)


def _as_json(profile: _Profile) -> dict[str, Any]:
    steps = {"steps": profile.found.steps, "step_us": profile.found.step_ns / 1000}
    ranges = [{k: v for k, v in row.items() if k not in steps} for row in range_columns(profile.found)]
    return {**profile.facts, **steps, "ranges": ranges}


def _show(profile: _Profile, as_json: bool) -> None:
    if as_json:
        print_json(_as_json(profile))
        return
    console = Console()
    console.print(range_table(profile.found, profile.title, profile.caption).as_rich())
    for note in profile.notes:
        console.print(Text(note), soft_wrap=True)


def _profile_with_proton(plan: Plan, request: ProfileRequest) -> int:
    if reason := unavailable(plan.device):
        raise ExperimentError([f"--proton: {reason}"])
    file = profile_with_proton(plan, _make_folder(plan, request.out), import_module("triton.profiler"))
    viewer = f"proton-viewer -m time/us,count {shlex.quote(str(file))}"
    if request.as_json:
        print_json({"source": "proton", "file": str(file), "view": viewer})
    else:
        Console().print(Text(f"{file}\n{viewer}"), soft_wrap=True)
    return 0


def _profile_launch(plan: Plan, request: ProfileRequest, file: Path, name: str) -> int:
    """One call of a kernel under Nsight Compute, or the command for it."""
    launch = find_launch(plan, name)
    missing = _why_missing("ncu", plan)
    out = (request.out or Path()) if missing else _make_folder(plan, request.out)
    process = tools.target("launch", file, request.overrides, name)
    command = tools.ncu_launch(out / name, launch.launched, process)
    if not missing and (status := _call(command)):
        return status
    if request.as_json:
        kernels = {"kernels": list(launch.launched), "point": launch.point.name, "axes": dict(launch.point.axes)}
        print_json({"source": "ncu", "command": shlex.join(command), "ran": not missing, **kernels})
        return 0
    lines = [f"{name} at {launch.point.name}: one call launches {', '.join(launch.launched)}"]
    if missing:
        lines += [f"{missing}: on a machine with Nsight Compute and a GPU:", f"  {shlex.join(command)}"]
    else:
        lines.append(f"{out / name}.ncu-rep")
    Console().print(Text("\n".join(lines)), soft_wrap=True)
    return 0
