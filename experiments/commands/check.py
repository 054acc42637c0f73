"""`tk check`: variants against the float64 oracle on drawn cases, or one case replayed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands import mutate, sanitize
from experiments.commands.choices import (
    case_size,
    choose_variants,
    is_one_case,
    only_contract,
    open_registry,
    parse_axes,
    parse_config,
)
from experiments.commands.output import make_table, print_json, progress_bar
from experiments.commands.requests import CheckRequest
from experiments.reporting.table_style import status_text
from experiments.runs.checked import record_checked
from tkernels import Config, ContractError
from tkernels.contract import Axes
from tkernels.device import first_device
from tkernels.variant import Variant
from tkernels.verification.check import (
    CheckResult,
    check_case,
    count_wide_cases,
    drawn_results,
    outside_folder,
    wide_results,
)

_EXAMPLES = 20


def run(request: CheckRequest) -> int:
    """Checks, prints, and returns 1 where anything was wrong or failed, or nothing was checked."""
    if request.mutate:
        return mutate.verify(request) if request.verify_equivalent else mutate.run(request)
    variants = choose_variants(open_registry(request.variants_from), request.chosen_op, request.variant)
    held: Axes = {}
    configs: Mapping[str, Config] = {}
    if request.axes or request.config:
        contract = only_contract(variants, "--axes and --config")
        held = parse_axes(contract, request.axes) if request.axes else {}
        configs = {one.name: parse_config(one, request.config) for one in variants} if request.config else {}
    if request.sanitize is not None:
        return sanitize.run(request, variants, held, configs)
    summaries = _check_all(request, variants, held, configs)
    if request.as_json:
        print_json(summaries)
    else:
        _print(Console(), summaries)
    statuses = {summary["status"] for summary in summaries}
    return 0 if "ok" in statuses and not statuses & {"wrong", "failed"} else 1


def _check_all(
    request: CheckRequest, variants: Sequence[Variant], held: Axes, configs: Mapping[str, Config]
) -> list[dict[str, Any]]:
    """A summary of each variant. That an outside one is right on all draws is noted beside its file."""
    counts = [_count_cases(request, variant, held, configs.get(variant.name)) for variant in variants]
    summaries = []
    with progress_bar("check", sum(counts)) as update:
        for variant, done in zip(variants, accumulate(counts, initial=0), strict=False):
            update(completed=done, doing=f"{variant.contract.name}.{variant.name}")
            drawn: list[CheckResult] = []
            wide: list[CheckResult] = []
            problem = None
            try:
                for is_wide, result in _check_cases(request, variant, held, configs.get(variant.name)):
                    (wide if is_wide else drawn).append(result)
                    update(advance=1)
            except ContractError as error:  # no case of this variant can be drawn here
                problem = str(error)
            summaries.append(summarize(variant, drawn, wide, problem))
            is_whole = not held and not configs
            if summaries[-1]["status"] == "ok" and is_whole and outside_folder(variant) is not None:
                record_checked(variant)
    return summaries


def _count_cases(request: CheckRequest, variant: Variant, held: Axes, config: Config | None) -> int:
    if is_one_case(variant, held):
        return 1
    return (request.examples or _EXAMPLES) + count_wide_cases(variant, held, config, first_device())


def _check_cases(
    request: CheckRequest, variant: Variant, held: Axes, config: Config | None
) -> Iterator[tuple[bool, CheckResult]]:
    """(whether its sizes are a model's, the result) of each case; of one alone where every axis is held."""
    device, seed = first_device(), request.seed
    if is_one_case(variant, held):
        yield False, check_case(variant, variant.contract.case(held, seed, device), config)
        return
    for result in drawn_results(variant, request.examples or _EXAMPLES, seed, held, config, device):
        yield False, result
    for result in wide_results(variant, seed, held, config, device):
        yield True, result


def summarize(
    variant: Variant, drawn: Sequence[CheckResult], wide: Sequence[CheckResult], problem: str | None
) -> dict[str, Any]:
    """One entry of `tk check --json`; the smallest case that is not ok comes first in its failures.

    `examples` and `ok` count the drawn cases, `wide` and `wide_ok` those that are as large as a model's.
    """
    results = [*drawn, *wide]
    right = [result for result in results if result.status == "ok"]
    bad = sorted((r for r in results if r.status in ("wrong", "failed")), key=lambda r: case_size(r.axes))
    statuses = {result.status for result in results}
    return {
        "op": variant.contract.name,
        "variant": variant.name,
        "status": next((status for status in ("wrong", "failed", "ok") if status in statuses), "unsupported"),
        "reason": problem or next((r.reason for r in (*bad, *results) if r.reason), None),
        "examples": len(drawn),
        "ok": sum(result.status == "ok" for result in drawn),
        "wide": len(wide),
        "wide_ok": sum(result.status == "ok" for result in wide),
        "max_error_ratio": max((r.max_ratio for r in right if r.max_ratio is not None), default=None),
        "rms_error_ratio": max((r.rms_ratio for r in right if r.rms_ratio is not None), default=None),
        "failures": [{"status": r.status, "message": str(r), "replay": r.replay} for r in bad],
    }


_COLUMNS: Mapping[str, Callable[[dict[str, Any]], str | Text]] = {
    "op": lambda one: one["op"],
    "variant": lambda one: one["variant"],
    "status": lambda one: status_text(one["status"]),
    "ok": lambda one: f"{one['ok']}/{one['examples']}",
    "wide": lambda one: f"{one['wide_ok']}/{one['wide']}",
    "max": lambda one: _format_ratio(one["max_error_ratio"]),
    "rms": lambda one: _format_ratio(one["rms_error_ratio"]),
}
_CAPTION = (
    "ok: drawn cases; wide: sizes as large as a model's, with every architecture's default config, and corners that no "
    "draw reaches. max, rms: the largest error of what is ok, over what the error rule allows: 1.00 at most."
)


def _format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _print(console: Console, summaries: Sequence[dict[str, Any]]) -> None:
    title, right = "Checks against the float64 oracle", ("ok", "wide", "max", "rms")
    console.print(make_table(title, _COLUMNS, summaries, right=right, once=("op",), caption=_CAPTION))
    for summary in summaries:
        if summary["failures"]:
            console.print(Text(f"\n{summary['failures'][0]['message']}"), soft_wrap=True)
        elif summary["status"] != "ok":
            console.print(Text(f"\n{summary['op']}.{summary['variant']}: {summary['reason']}"))
