"""`tk check`: variants against the float64 oracle on drawn cases, or one case replayed."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.commands.registry import matching, open_registry
from experiments.commands.requests import CheckRequest
from experiments.document import ExperimentError
from experiments.reporting.table_style import add_row, new_table, status_text
from experiments.runs.checked import record_checked
from tkernels import Config, ContractError
from tkernels.contract import Contract, Int, Value
from tkernels.variant import Variant
from tkernels.verification.check import (
    CheckResult,
    check_case,
    count_wide_cases,
    drawn_results,
    outside_folder,
    wide_results,
)
from tsched.torch_free import suggest_name

_EXAMPLES = 20


def run(request: CheckRequest) -> int:
    """Checks, prints, and returns 1 where anything was wrong or failed, or nothing was checked."""
    op = request.only or request.op
    if request.mutate:
        from experiments.commands import mutate

        asked = mutate.Request(op, request.variant, request.quota, request.seed, request.variants_from)
        return (mutate.verify if request.verify_equivalent else mutate.run)(asked, request.as_json)
    variants = matching(open_registry(request.variants_from), op, request.variant)
    if (request.axes or request.config) and len({v.contract.name for v in variants}) != 1:
        raise ExperimentError(["--axes and --config belong to one op: name it with --op"])
    held = parse_axes(variants[0].contract, request.axes) if request.axes else {}
    if request.sanitize is not None:
        from experiments.commands import sanitize

        configs = {v.name: parse_config(v, request.config) for v in variants} if request.config else {}
        draws = sanitize.Draws(request.examples, request.seed, held, configs)
        return sanitize.run(variants, sanitize.named(request.sanitize), draws, request.as_json)
    summaries = _summaries(variants, request, held)
    if request.as_json:
        json.dump(summaries, sys.stdout, indent=1)
        print()
    else:
        _print(summaries)
    if any(summary["status"] in ("wrong", "failed") for summary in summaries):
        return 1
    return 0 if any(summary["status"] == "ok" for summary in summaries) else 1


def _summaries(variants: Sequence[Variant], request: CheckRequest, held: Mapping[str, Value]) -> list[dict[str, Any]]:
    """Checks each variant, on one case where every axis is held."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    columns = (
        TextColumn("check"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
    )
    replayed = bool(held) and set(held) == set(variants[0].contract.axis_by_name)
    pins = [parse_config(variant, request.config) if request.config else None for variant in variants]
    counts = [
        1 if replayed else (request.examples or _EXAMPLES) + count_wide_cases(variant, held, config, device)
        for variant, config in zip(variants, pins, strict=True)
    ]
    summaries = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(counts), doing="")
        for index, (variant, config) in enumerate(zip(variants, pins, strict=True)):
            progress.update(task, completed=sum(counts[:index]), doing=f"{variant.contract.name}.{variant.name}")
            drawn: list[CheckResult] = []
            wide: list[CheckResult] = []
            problem = None
            try:
                for result in _drawn(variant, request, held, config, device, replayed):
                    drawn.append(result)
                    progress.advance(task)
                for result in () if replayed else wide_results(variant, request.seed, held, config, device):
                    wide.append(result)
                    progress.advance(task)
            except ContractError as error:  # no case of this variant can be drawn here
                problem = str(error)
            summaries.append(summarize(variant, drawn, wide, problem))
            if summaries[-1]["status"] == "ok" and not held and config is None and outside_folder(variant) is not None:
                record_checked(variant)
    return summaries


def _drawn(
    variant: Variant,
    request: CheckRequest,
    held: Mapping[str, Value],
    config: Config | None,
    device: torch.device,
    replayed: bool,
) -> Iterator[CheckResult]:
    if replayed:
        yield check_case(variant, variant.contract.case(held, request.seed, device), config)
    else:
        yield from drawn_results(variant, request.examples or _EXAMPLES, request.seed, held, config, device)


def parse_axes(contract: Contract, text: str) -> dict[str, Value]:
    """ "T=3,activation=float16" -> values of the contract's axes; ExperimentError names what is not one."""
    axes: dict[str, Value] = {}
    for name, value in _pairs("--axes", text):
        if name not in contract.axis_by_name:
            known = contract.axis_by_name
            message = f"{contract.name} has no axis {name!r}: there is {', '.join(known)}{suggest_name(name, known)}"
            raise ExperimentError([f"--axes: {message}"])
        axis = contract.axis_by_name[name]
        if isinstance(axis, Int):
            parsed: Value | None = int(value) if value.lstrip("-").isdigit() else None
        else:
            parsed = next((legal for legal in axis.legal or axis.draws if str(legal) == value), None)
        if parsed is None or not axis.allows(parsed):
            raise ExperimentError([f"--axes: {name}={value}, but {axis.rule}"])
        axes[name] = parsed
    return axes


def parse_config(variant: Variant, text: str) -> Config:
    """ "BLOCK_N=64,num_warps=8" over the variant's default config."""
    if variant.launch is None:
        raise ExperimentError([f"--config: {variant.contract.name}.{variant.name} has no config"])
    pins: dict[str, int] = {}
    for name, value in _pairs("--config", text):
        if not value.lstrip("-").isdigit():
            raise ExperimentError([f"--config: {name} must be a number, got {value!r}"])
        pins[name] = int(value)
    try:
        return variant.default[""].pinned(pins)
    except ValueError as error:
        raise ExperimentError([f"--config: {error}"]) from None


def _pairs(option: str, text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ExperimentError([f"{option}: {part!r} must be name=value, several separated by commas"])
        yield name.strip(), value.strip()


def summarize(
    variant: Variant, drawn: Sequence[CheckResult], wide: Sequence[CheckResult], problem: str | None
) -> dict[str, Any]:
    """One entry of `tk check --json`; the smallest case that is not ok comes first in its failures.

    `examples` and `ok` count the drawn cases, `wide` and `wide_ok` those that are as large as a model's.
    """
    results = [*drawn, *wide]
    statuses = [result.status for result in results]
    status = next((s for s in ("wrong", "failed", "ok") if s in statuses), "unsupported")
    bad = sorted((r for r in results if r.status in ("wrong", "failed")), key=_size)
    ratios = [r.max_ratio for r in results if r.status == "ok" and r.max_ratio is not None]
    rms_ratios = [r.rms_ratio for r in results if r.status == "ok" and r.rms_ratio is not None]
    return {
        "op": variant.contract.name,
        "variant": variant.name,
        "status": status,
        "reason": problem or next((r.reason for r in (*bad, *results) if r.reason), None),
        "examples": len(drawn),
        "ok": sum(result.status == "ok" for result in drawn),
        "wide": len(wide),
        "wide_ok": sum(result.status == "ok" for result in wide),
        "max_error_ratio": max(ratios, default=None),
        "rms_error_ratio": max(rms_ratios, default=None),
        "failures": [{"status": r.status, "message": str(r), "replay": r.replay} for r in bad],
    }


def _size(result: CheckResult) -> float:
    return math.prod(max(1, v) for v in result.axes.values() if isinstance(v, int) and not isinstance(v, bool))


def _print(summaries: Sequence[dict[str, Any]]) -> None:
    console = Console()
    right = ("ok", "wide", "max", "rms")
    table = new_table("Checks against the float64 oracle", ["op", "variant", "status", *right], right)
    last = None
    for summary in summaries:
        ratios = [f"{r:.2f}" if (r := summary[k]) is not None else "-" for k in ("max_error_ratio", "rms_error_ratio")]
        counts = (f"{summary['ok']}/{summary['examples']}", f"{summary['wide_ok']}/{summary['wide']}")
        name = "" if summary["op"] == last else summary["op"]
        add_row(table, name, summary["variant"], status_text(summary["status"]), *counts, *ratios)
        last = summary["op"]
    table.caption = (
        "ok: drawn cases; wide: sizes as large as a model's, with every architecture's default config, and corners "
        "that no draw reaches. max, rms: the largest error of what is ok, over what the error rule allows: 1.00 at "
        "most."
    )
    table.caption_justify = "left"
    console.print(table)
    for summary in summaries:
        if summary["failures"]:
            console.print(Text(f"\n{summary['failures'][0]['message']}"), soft_wrap=True)
        elif summary["status"] != "ok":
            console.print(Text(f"\n{summary['op']}.{summary['variant']}: {summary['reason']}"))
