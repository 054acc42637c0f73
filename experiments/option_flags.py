"""Options as flags of a command, an engine's or a server's: their records say which there are and what they mean."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import typer
import yaml

from experiments.document import ExperimentError
from tsched.options import OPTIONS, EngineOptions, Option, OptionError, read_options

Given = Mapping[str, Any]
"""Options by name, those that a command line gave."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class OptionFlags:
    """Marks the field of a command's record that holds options: the command has a flag for each of `names`.

    Attributes:
        names: The options.
        known: All options of their record by name.
        panel: The heading over the flags in the command's help.
        aliases: Option -> another flag that says the same.
        usual: Option -> what the command takes where it is not given, in words, if that is not the record's default.
    """

    names: Sequence[str]
    known: Mapping[str, Option] = field(default_factory=lambda: OPTIONS)
    panel: str = "Engine"
    aliases: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)

    def parameters(self) -> list[inspect.Parameter]:
        """The parameters of a function from which typer makes the flags."""
        flags = {name: self._make_flag(self.known[name]) for name in self.names}
        return [*flags.values(), *(_make_alias(name, flags[name], alias) for name, alias in self.aliases.items())]

    def take(self, arguments: dict[str, Any]) -> Given:
        """Takes the flags' values out of a call's `arguments`; ExperimentError where one is no number of bytes."""
        given = {}
        for name in self.names:
            value, other = arguments.pop(name), arguments.pop(f"other_{name}", None)
            if value is not None or other is not None:
                given[name] = _parse(self.known[name], other if value is None else value)
        return given

    def _make_flag(self, option: Option) -> inspect.Parameter:
        """The parameter from which typer makes the option's flag; None where it is not given."""
        is_text = option.kind in (bool, str, object) or option.unit == "bytes"
        words = "true|false" if option.kind is bool else "|".join(option.choices)
        metavar = "NUMBER[KB|MB|GB]" if option.unit == "bytes" else words or None
        alias, usual = self.aliases.get(option.name), self.usual.get(option.name, option.usual)
        also = f" {alias} says the same." if alias else ""
        info = typer.Option(
            "--" + option.name.replace("_", "-"),
            help=f"{option.meaning[0].upper()}{option.meaning[1:]}; {usual} by default.{also}",
            metavar=metavar,
            show_default=False,
            rich_help_panel=self.panel,
        )
        kind: Any = str if is_text else option.kind
        return inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
        )


def engine_options(given: Given) -> EngineOptions:
    """The record of the options that a command was given; ExperimentError names one that is wrong."""
    try:
        return read_options(given)
    except OptionError as error:
        raise ExperimentError([str(error)]) from None


def parse_bytes(name: str, text: str) -> int:
    """ "40GB", "40GiB" or "40000000000"; ExperimentError, which names the option, where that is no size."""
    number = text.rstrip("KMGiB")
    try:
        value = float(number) * _UNITS[text[len(number) :]]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < 2**63:
        units = ", ".join(filter(None, _UNITS))
        raise ExperimentError([f"{name} must be a number of bytes from 1, with or without {units}, got {text!r}"])
    return int(value)


def parse_kernels(texts: Sequence[str], option: str = "--kernels") -> dict[str, Any]:
    """ "op=variant" or "op={variant: {config value: number}}", each once."""
    choices: dict[str, Any] = {}
    for text in texts:
        op, equals, choice = text.partition("=")
        if not equals or not op.strip() or not choice.strip():
            raise ExperimentError([f"{option} {text}: must be op=variant, as in paged_decode=split_kv"])
        if op.strip() in choices:
            raise ExperimentError([f"{option} {text}: {op.strip()} is given twice"])
        try:
            choices[op.strip()] = yaml.safe_load(choice)
        except yaml.YAMLError as error:
            raise ExperimentError([f"{option} {text}: not YAML: {error}"]) from None
    return choices


def _parse(option: Option, value: Any) -> Any:
    """A flag's value as the option has it; a word that is none is left for the record to refuse."""
    if option.unit == "bytes":
        return parse_bytes(option.name, value)
    return {"true": True, "false": False}.get(value, value) if option.kind is bool else value


def _make_alias(name: str, flag: inspect.Parameter, alias: str) -> inspect.Parameter:
    """A flag beside `flag` that its help alone names: two names in one column leave a terminal no room."""
    kind, _ = get_args(flag.annotation)
    info = typer.Option(alias, hidden=True)
    return flag.replace(name=f"other_{name}", annotation=Annotated[kind, info])
