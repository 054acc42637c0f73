"""`tk ops OP`: the page of one op, all of it read off its contract and its variants."""

import inspect
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from experiments.commands.op_rows import DrawnAxes, describe_apart
from experiments.reporting.table_style import format_value, make_table
from tkernels.contract import Axis, Contract, Int
from tkernels.launch import Run
from tkernels.measurement import region_points
from tkernels.variant import Op, Variant, as_it_is

_INDENT = (0, 0, 0, 2)
_RULES = {"optional": "or None", "low": "at least {}", "when": "where {} asks for it", "exact": "equal or wrong"}


def describe_op(op: Op, device: torch.device, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """The page, as JSON has it; `folders` are those of outside variants."""
    contract = op.contract
    drawn = cache(partial(DrawnAxes, contract))
    regions = region_points(contract, op.variants.values())
    outside = "".join(f" --variants-from {shlex.quote(str(folder))}" for folder in folders)
    return {
        "op": op.name,
        "about": inspect.getdoc(sys.modules[contract.reference.__module__]),
        "file": inspect.getsourcefile(contract.reference),
        "signature": f"{op.name}{contract.signature}",
        "definition": inspect.getdoc(contract.reference),
        "launcher": f"launch{_launcher_signature(contract)}",
        "outputs": {name: _describe_rule(output) for name, output in contract.outputs.items()},
        "arguments": {name: _describe_rule(argument) for name, argument in contract.arguments.items()},
        "writes": list(contract.writes),
        "consumes": list(contract.consumes),
        "options": {name: repr(contract.signature.parameters[name].default) for name in contract.options},
        "axes": [_describe_axis(axis) for axis in contract.axes],
        "rules": [str(rule) for rule in contract.constraints],
        "points": {name: dict(point) for name, point in {**contract.benchmarks, **regions}.items()},
        "weights": {type(weight).__name__: inspect.getdoc(type(weight)) for weight in _drawn_weights(contract)},
        "default": contract.default,
        "variants": [_describe_variant(one, describe_apart(one, device, drawn)) for one in op.variants.values()],
        "next": [f"tk new {op.name} NAME --in FOLDER", f"tk check --op {op.name}{outside} --sanitize all"],
    }


def _launcher_signature(contract: Contract) -> inspect.Signature:
    """What a launcher is called with: the run, every output, and the op's parameters, which have no defaults there."""
    own: dict[str, Any] = {"run": Run}
    own |= {name: torch.Tensor | None if output.when else torch.Tensor for name, output in contract.outputs.items()}
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    first = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in own.items()]
    return inspect.Signature([*first, *(one.replace(default=empty) for one in contract.signature.parameters.values())])


def _describe_rule(rule: Any) -> str:
    """An argument's or output's rule: "[M, K] activation, optional"."""
    words = []
    for one in fields(rule) if is_dataclass(rule) else ():
        value = getattr(rule, one.name)
        if one.name == "dims":
            words.append(f"[{', '.join(value.split())}]")
        elif one.name in ("dtype", "kind"):
            words.append(value.__name__ if isinstance(value, type) else value)
        elif value != one.default and one.name in _RULES:
            words.append(_RULES[one.name].format(value))
    return ", ".join(words).replace("], ", "] ") or type(rule).__name__


def _describe_axis(axis: Axis) -> dict[str, Any]:
    if isinstance(axis, Int):
        values: dict[str, Any] = {"low": axis.low, "high": axis.high}
    else:
        values = {"legal": list(axis.legal or dict.fromkeys(axis.draws))}
    drawn = list(dict.fromkeys((*axis.draws, *axis.wide)))
    return {"name": axis.name, "about": axis.doc, **values, "drawn": drawn, "batch": axis.batch}


def _drawn_weights(contract: Contract) -> list[Any]:
    """The arguments of a drawn call that `prepare` is for: those that are weights of a kind of their own."""
    axes = dict(DrawnAxes(contract, 0))
    return [one for one in contract.case(axes, 0, "cpu").inputs.values() if hasattr(one, "map_tensors")]


def _describe_variant(variant: Variant, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `tk ops --json`, and what the variant's declaration says besides."""
    own = None if variant.prepare is as_it_is else (inspect.getdoc(variant.prepare) or variant.prepare.__name__)
    config = variant.default[""].as_dict() if variant.default else None
    region = {axis: list(bounds) for axis, bounds in variant.region.items()}
    declared = {"region": region, "config": config, "key": list(variant.key), "prepare": own}
    return {**row, **declared, "leaves_out": list(variant.left_out)}


def print_page(console: Console, page: Mapping[str, Any]) -> None:
    """The page for people."""
    _print_part(console, page["about"], [f"It is defined in {page['file']}."])
    _print_part(console, "Call", [_wrap_signature(page["signature"]), "", page["definition"]])
    _print_part(console, "Launcher", [_wrap_signature(page["launcher"])])
    _print_pairs(console, "Outputs, which the caller allocates and the launcher fills", page["outputs"])
    _print_pairs(console, "Arguments", page["arguments"])
    for words, names in (("writes", page["writes"]), ("may use as scratch", page["consumes"])):
        if names:
            console.print(Padding(Text(f"It {words}: {', '.join(names)}."), _INDENT))
    _print_pairs(console, "Options, which a variant may leave out, with their defaults", page["options"])
    _print_axes(console, page["axes"])
    if page["rules"]:
        _print_part(console, "Rules between axes", page["rules"])
    for name, form in page["weights"].items():
        told = "`prepare=` of a declaration gets this and returns the weight that its launcher is given, once, at load."
        _print_part(console, f"Weights: {name}", [told, "", form])
    console.print(Text("\nBenchmark points, of tk bench and tk tune", "bold"))
    console.print(Padding(Text("; ".join(page["points"])), _INDENT))
    _print_variants(console, page)
    _print_part(console, "Next", page["next"])


def _print_part(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(Text(f"\n{title}", "bold"))
    for line in lines:
        console.print(Text(textwrap.indent(line, "  ")), soft_wrap=True)


def _print_pairs(console: Console, title: str, pairs: Mapping[str, str]) -> None:
    if pairs:
        width = max(map(len, pairs))
        _print_part(console, title, [f"{name:{width}}  {value}" for name, value in pairs.items()])


def _wrap_signature(signature: str) -> str:
    """A parameter on each line."""
    name, _, rest = signature.partition("(")
    inside, _, result = rest.rpartition(")")
    lines = "".join(f"    {one},\n" for one in inside.split(", "))
    return f"{name}(\n{lines}){result}"


def _print_axes(console: Console, axes: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for axis in axes:
        legal = ", ".join(map(format_value, axis["legal"])) if "legal" in axis else f"{axis['low']} to {axis['high']:,}"
        drawn = ", ".join(map(format_value, axis["drawn"])) if "legal" not in axis else ""
        rows.append((axis["name"], axis["about"] + (" (of the batch)" if axis["batch"] else ""), legal, drawn))
    caption = (
        "checked at: the sizes of drawn cases. of the batch: where a variant is batch-invariant, neither config nor "
        "splits may depend on it."
    )
    console.print()
    console.print(make_table("Axes", ("axis", "is", "may be", "checked at"), rows, caption=caption))


def _print_variants(console: Console, page: Mapping[str, Any]) -> None:
    console.print(Text("\nVariants", "bold"))
    for row in page["variants"]:
        claims = [words for key, words in _CLAIMS.items() if row[key]]
        # A file that is broken may have the name of a variant that there is.
        name, is_there = (Path(row["file"]).name, False) if row["kind"] == "unavailable" else (row["variant"], True)
        default = ["the default on CUDA"] if is_there and name == page["default"] else []
        console.print(Padding(Text(f"{name} ({', '.join([row['kind'], *default, *claims])})"), _INDENT))
        said = {
            "wins": row["wins"],
            "is for": ", ".join(f"{axis} from {low} to {high}" for axis, (low, high) in row.get("region", {}).items()),
            "needs": row["reason"],
            "leaves out": ", ".join(row.get("leaves_out", ())),
            "prepares": row.get("prepare"),
            "config": ", ".join(f"{name}={value}" for name, value in (row.get("config") or {}).items()),
            "tuned by": ", ".join(row.get("key", ())),
            "file": row["file"],
        }
        for name, words in said.items():
            if words:
                console.print(Padding(Text(f"{name}: {words}"), (0, 0, 0, 6)))


_CLAIMS = {"deterministic": "deterministic", "batch_invariant": "batch-invariant"}
