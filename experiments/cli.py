"""`tk`, the command line. Commands are imported when they are called: `tk --help` loads no torch."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, get_args

from experiments.signals import Signals, ended_by_signals

with ended_by_signals("interrupted before tk had begun"):
    import typer

    from experiments.commands import requests
    from experiments.exits import end, import_torch
    from experiments.json_alone import json_alone
    from experiments.option_flags import OptionFlags
    from experiments.sampling import SamplingFlags

app = typer.Typer(
    name="tk",
    help="Interchangeable Triton kernels for LLM inference: list, check, serve and compare them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def add_command(
    name: str,
    request: type[Any],
    *,
    needs_torch: bool = True,
    refuse_early: Callable[[Any], None] = lambda asked: None,
    takes_signals: bool = False,
) -> None:
    """Adds a command: its options are the fields of `request`, and `run` of its module in `commands` takes the record.

    Args:
        refuse_early: Called with the record before torch is imported.
        takes_signals: It decides itself what SIGTERM means; else it does what Ctrl-C does.
    """

    def run(given: dict[str, Any]) -> int:
        taken = {name: flags.take(given) for name, flags in find_derived_flags(request).items()}
        asked = request(**given, **taken)
        refuse_early(asked)
        with nullcontext() if takes_signals else ended_by_signals(f"interrupted before tk {name} had begun"):
            if needs_torch:
                import_torch()
            module = import_module(f"experiments.commands.{name.replace('-', '_')}")
        with nullcontext() if takes_signals else Signals(), json_alone() if _is_json(asked) else nullcontext():
            status: int = module.run(asked)
        return status

    def command(**given: Any) -> None:
        end(run, given)

    parameters = _make_parameters(request)
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = request.__doc__
    app.command(name)(command)


def _is_json(asked: Any) -> bool:
    return getattr(asked, "as_json", False)


def find_derived_flags(request: type[Any]) -> dict[str, OptionFlags | SamplingFlags]:
    """By the name of the record's field, flags that follow from another record."""
    marks = ((one.name, mark) for one in fields(request) for mark in get_args(one.type))
    return {name: mark for name, mark in marks if isinstance(mark, OptionFlags | SamplingFlags)}


def _make_parameters(request: type[Any]) -> list[Parameter]:
    """The parameters of a function from which typer makes the record's options."""
    derived = find_derived_flags(request)
    parameters = []
    for one in fields(request):
        default = Parameter.empty if one.default is MISSING else one.default
        if one.default_factory is not MISSING:
            default = one.default_factory()
        if one.name not in derived:
            parameters.append(Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=one.type))
    return [*parameters, *(one for flags in derived.values() for one in flags.parameters())]


def _refuse_profile(asked: requests.ProfileRequest) -> None:
    from experiments.planning.layout import refuse_unsound

    if asked.file is not None:
        refuse_unsound(asked.file, asked.overrides)


add_command("ops", requests.OpsRequest)
add_command("new", requests.NewRequest)
add_command("check", requests.CheckRequest)
add_command("bench", requests.BenchRequest)
add_command("tune", requests.TuneRequest)
add_command("gpu-report", requests.GpuReportRequest)
add_command("results-table", requests.ResultsTableRequest)
add_command("inspect", requests.InspectRequest)
add_command("run", requests.RunRequest, needs_torch=False)
add_command("profile", requests.ProfileRequest, refuse_early=_refuse_profile)
add_command("report", requests.ReportRequest, needs_torch=False)
add_command("runs", requests.RunsRequest, needs_torch=False)
add_command("compare", requests.CompareRequest, needs_torch=False)
add_command("repeat", requests.RepeatRequest)
add_command("simulate", requests.SimulateRequest)
add_command("generate", requests.GenerateRequest)
add_command("serve", requests.ServeRequest, needs_torch=False, takes_signals=True)
add_command("diverge", requests.DivergeRequest)
add_command("eval", requests.EvalRequest)
add_command("make-model", requests.MakeModelRequest)
add_command("quantize", requests.QuantizeRequest)
add_command("convert", requests.ConvertRequest)


def main() -> None:
    """The console command `tk`."""
    app()


if __name__ == "__main__":
    main()
