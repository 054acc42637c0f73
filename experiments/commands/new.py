"""`tk new`: a variant's file, right as it stands and to be changed from there, and an experiment that runs it."""

import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import tkernels
from experiments.commands.choices import find_op, open_registry
from experiments.commands.op_rows import count_refused
from experiments.commands.requests import NewRequest
from experiments.commands.variant_source import count_device_lines, is_start, write_source
from experiments.document import ExperimentError
from experiments.peers import with_peers
from experiments.planning.models import named_model
from experiments.planning.plan_checks import kernel_ranges
from tkernels.contract import Axes, Contract
from tkernels.files import write_text
from tkernels.measurement import cut_axes
from tkernels.selection import with_parts
from tkernels.variant import Op, Variant
from tmodel import PRESETS
from tsched.torch_free import suggest_name

_LINE = 120

_CPU_SIZE = 128
"""The largest size of the points of an experiment without a model: interpreted, a check takes seconds."""

_CPU = torch.device("cpu")


def run(request: NewRequest) -> int:
    """Writes the two files and says what comes next; always 0.

    Raises:
        ExperimentError: No such op, a name that no new variant may have, nothing to start from. Nothing is written.
        FileExistsError, OSError: A file is there already, or cannot be written.
    """
    op = _find_op(request)
    if (fault := op.fault_of_name(request.name)) is not None:
        raise ExperimentError([f"NAME {request.name}: {fault}"])
    start = _find_start(op, request.start)
    file = request.folder / op.name / f"{request.name}.py"
    experiment = file.with_suffix(".yaml")
    commands = _next_commands(request)
    texts = {
        file: write_source(start, request.name, _opening(start, commands)),
        experiment: _write_experiment(op, request.name),
    }
    _write(texts)
    print(f"{file}: {op.name}.{request.name}, which does what {start.name} does, with marks where the work begins")
    print(f"{experiment}: an experiment that runs it beside torch")
    print("\n".join(["next:", *(f"    {command}" for command in commands)]))
    return 0


def _find_op(request: NewRequest) -> Op:
    """The op, with other projects' variants; with those of the folder where one of them is to start from."""
    ops = tkernels.OPS
    needed = ["contract"] if request.start is None else ["contract", request.start]
    if any((request.folder / request.op / f"{name}.py").is_file() for name in needed):
        ops = open_registry([request.folder])
    return find_op(with_peers(ops), request.op)


def _find_start(op: Op, name: str | None) -> Variant:
    """The variant to start from: the one named, else of those that refuse the fewest draws the one with the least
    device code.
    """
    own = {one.name: one for one in op.variants.values() if is_start(one)}
    if name is not None and name not in own:
        there_is = f"{op.name} has these to start from: {', '.join(own)}{suggest_name(name, own)}"
        raise ExperimentError([f"--from {name}: {there_is}"])
    if not own:
        raise ExperimentError([f"{op.name} has no variant with a kernel of its own to start from"])
    if name is not None:
        return own[name]
    return min(own.values(), key=lambda one: (count_refused(one), count_device_lines(one)))


def _next_commands(request: NewRequest) -> list[str]:
    """What an author types next, in order."""
    folder = shlex.quote(str(request.folder))
    of_it = f"--op {request.op} --variant {request.name} --variants-from {folder}"
    experiment = shlex.quote(str(request.folder / request.op / f"{request.name}.yaml"))
    return [
        f"tk ops {request.op} --variants-from {folder}",
        f"tk check {of_it}",
        f"tk check {of_it} --sanitize all",
        f"tk inspect {of_it}",
        f"tk bench --op {request.op} --variants-from {folder}",
        f"tk run {experiment}",
    ]


def _opening(start: Variant, commands: list[str]) -> str:
    """The docstring of the new file."""
    does = (start.module.__doc__ or "").partition("\n")[0] if start.module else ""
    typed = "\n".join(f"    {command}" for command in commands)
    copied = textwrap.wrap(f"A copy of {start.name}, which is yours to change: {does}", _LINE - 3)
    told = ["Say here what the algorithm is. These tell what can be known of it without a GPU:", "", typed, ""]
    return "\n".join([*copied, "", *told])


def _write_experiment(op: Op, name: str) -> str:
    """The YAML of an experiment that calls the variant beside torch: in a trained preset whose steps call the op, else
    at a realistic point, cut down to what is interpreted in seconds.
    """
    own: dict[str, Any] = {"name": f"{op.name}.{name}", "variants_from": [".."], "kernels": {op.name: ["torch", name]}}
    preset = _find_preset(op.name)
    if preset is not None:
        asked = {"kind": "prompts", "max_tokens": 8, "n": 2, "prompts": ["def main("]}
        return _format({**own, "model": {"preset": preset}, "workload": asked})
    points = list(op.contract.benchmarks.values())
    full = {f"shapes.{op.name}": [dict(point) for point in (*points[:1], *points[1:][-1:])]}
    return _format({**own, "shapes": {op.name: [_small_point(op.contract)]}, "full": full})


def _find_preset(op: str) -> str | None:
    """A trained preset whose steps call the op."""
    for preset in PRESETS:
        model = named_model(preset, "--model")
        if op in with_parts(kernel_ranges(model, {}, _CPU, model.config.dtype), {}, tkernels.OPS, _CPU):
            return preset
    return None


def _small_point(contract: Contract) -> Axes:
    for point in contract.benchmarks.values():
        if (cut := cut_axes(contract, point, _CPU_SIZE)) is not None:
            return {axis: cut[axis] for axis in point}
    return {}


def _format(experiment: Mapping[str, Any]) -> str:
    about = f"# {experiment['name']} beside torch: is it right, and what does it do to a run? More: docs/sweeps.md."
    return f"{about}\n{yaml.safe_dump(dict(experiment), sort_keys=False, width=_LINE, default_flow_style=None)}"


def _write(texts: Mapping[Path, str]) -> None:
    """Writes both files, or none."""
    for file in texts:
        if file.exists():
            raise FileExistsError(f"{file} exists")
    written = []
    try:
        for file, text in texts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
            written.append(file)
    except BaseException:
        for file in written:
            file.unlink()
        raise
