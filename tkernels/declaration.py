"""The rules that a variant's declaration is checked by when its file joins an op: all that it breaks, in one pass."""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tkernels.config import Config
from tkernels.contract import Contract, Int
from tkernels.folders import fault_of_name
from tkernels.names import suggest_name

if TYPE_CHECKING:
    from tkernels.variant import Variant


class Fault(NamedTuple):
    """What is wrong in a file, and the line where; None where no line has it."""

    line: int | None
    text: str

    def at(self, file: Path) -> str:
        """ "FILE:LINE: TEXT", as terminals and editors open it."""
        return f"{file}:{self.line}: {self.text}" if self.line else f"{file}: {self.text}"


def taken_outputs(contract: Contract, left_out: Sequence[str]) -> list[str]:
    """The outputs that a launcher receives: all but those that only an option that it leaves out asks for."""
    return [name for name, output in contract.outputs.items() if output.when not in left_out]


def needed_parameters(variant: "Variant", left_out: Sequence[str]) -> list[str]:
    """The parameters that a variant's launcher or function must have where it leaves out these options."""
    contract = variant.contract
    arguments = [name for name in contract.arguments if name not in left_out]
    if variant.launch is not None:
        return ["run", *taken_outputs(contract, left_out), *arguments]
    tells_sections = bool(variant.parts and contract.sections)
    return [*variant.parts, *["section"] * tells_sections, *arguments]


def find_faults(variant: "Variant") -> list[Fault]:
    """Every rule that a declaration breaks, by line."""
    lines = lines_of_fields(variant.file)
    wrong = {name: words for name, (words, is_right) in _FORMS.items() if not is_right(getattr(variant, name))}
    faults = [
        Fault(lines.get(name, lines[""]), f"{name} must be {words}, got {_shorten(getattr(variant, name))}")
        for name, words in wrong.items()
    ]
    sound = _FORMS.keys() - wrong.keys()
    if (fault := fault_of_name(variant.name)) is not None:
        faults.append(Fault(None, f"the name of a variant's file: {fault}"))
    if {"launch", "function", "parts"} <= sound:
        faults += (Fault(line or lines[""], text) for line, text in _find_launcher_faults(variant))
    if "key" in sound:
        faults += (Fault(lines.get("key"), text) for text in _find_key_faults(variant))
    if "region" in sound:
        faults += (Fault(lines.get("region"), text) for text in _find_region_faults(variant))
    if variant.launch is not None:
        faults += _find_kernel_faults(variant) if fault is None else ()
        faults += (Fault(lines.get(name, lines[""]), text) for name, text in _find_config_faults(variant, sound))
    return sorted(faults, key=lambda fault: fault.line or 0)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_mapping(value: Any, is_key: Callable[[Any], bool], is_value: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(is_key(key) and is_value(one) for key, one in value.items())


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_name, value))


def _is_config(value: Any) -> bool:
    return isinstance(value, Config)


def _is_range(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(one) is int for one in value)


_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "wins": ("a sentence", _is_name),
    "deterministic": ("True or False", lambda value: isinstance(value, bool)),
    "batch_invariant": ("True or False", lambda value: isinstance(value, bool)),
    "region": ("{axis: (low, high)}", lambda value: _is_mapping(value, _is_name, _is_range)),
    "launch": ("a function", lambda value: value is None or callable(value)),
    "function": ("a function", lambda value: value is None or callable(value)),
    "parts": ("a tuple of ops' names", _are_names),
    "part_axes": (
        "{part: {axis: value}}",
        lambda value: _is_mapping(value, _is_name, lambda one: _is_mapping(one, _is_name, lambda _: True)),
    ),
    "configs": (
        "a tuple of tkernels.Config, or left out",
        lambda value: value is None or (isinstance(value, tuple | list) and all(map(_is_config, value))),
    ),
    "default": ("{architecture: tkernels.Config}", lambda value: _is_mapping(value, _is_name, _is_config)),
    "supports": ("a function of (axes, device)", callable),
    "workspace": ("a function of (axes, config, device)", callable),
    "chosen": ("a function of (axes, config, device)", lambda value: value is None or callable(value)),
    "limits": ("{config value: (low, high)}", lambda value: _is_mapping(value, _is_name, _is_range)),
    "key": ("a tuple of axes' names", _are_names),
    "sum_order": ("a function of the config", lambda value: value is None or callable(value)),
    "prepare": ("a function of the weight", callable),
}
"""Field of a declaration -> what it must be, in words, and whether a value is that."""


def _find_launcher_faults(variant: "Variant") -> Iterator[tuple[int | None, str]]:
    """Whether it has one of the two, with the op's parameters, and says when it wins: (line, what is wrong)."""
    if not variant.wins:
        yield None, "wins must say when this algorithm should be the fastest"
    declared = variant.launch or variant.function
    if declared is None or (variant.launch is not None and variant.function is not None):
        yield None, "a variant has either a launcher or a function"
        return
    if variant.launch is not None and variant.parts:
        yield None, "a variant with parts is a function that calls them, not a launcher"
    got, needed = list(inspect.signature(declared).parameters), needed_parameters(variant, variant.left_out)
    if got == needed:
        return
    every = needed_parameters(variant, ())
    free = [name for name in every if name not in got]
    told = [f"has no {name}" for name in needed if name not in got]
    told += [f"takes {name!r}, which is none of it{suggest_name(name, free)}" for name in got if name not in every]
    options = ", ".join(variant.contract.options)
    yield (
        _line_of(declared, variant.file),
        f"{getattr(declared, '__name__', 'it')} {'; it '.join(told) or 'has them in another order'}: "
        f"parameters {got} differ from the reference's; {variant.contract.name} takes {every}"
        + (f", of which it may leave out {options}" if options else ""),
    )


def _find_key_faults(variant: "Variant") -> Iterator[str]:
    known = variant.contract.axis_by_name
    if unknown := sorted(set(variant.key) - set(known)):
        nearest = suggest_name(unknown[0], known)
        yield f"key names no axis of {variant.contract.name}: {unknown}; there is {', '.join(known)}{nearest}"
    batchy = [axis for axis in variant.key if axis in known and known[axis].batch]
    if variant.batch_invariant is not True or not batchy:
        return
    if bare := [axis for axis in batchy if not getattr(known[axis], "classes", ())]:
        yield f"a batch-invariant variant's config may not depend on {', '.join(bare)}"
    elif variant.sum_order is None:
        yield (
            f"a batch-invariant variant whose config depends on {', '.join(batchy)} needs sum_order: a function of the "
            "config, what decides in which order sums are added"
        )


def _find_region_faults(variant: "Variant") -> Iterator[str]:
    sizes = {axis.name: axis for axis in variant.contract.axes if isinstance(axis, Int)}
    for name, (low, high) in variant.region.items():
        if name not in sizes:
            nearest = suggest_name(name, sizes)
            yield f"region names no size of {variant.contract.name}: {name}; there is {', '.join(sizes)}{nearest}"
        elif not sizes[name].low <= low <= high <= sizes[name].high:
            yield f"region of {name} must be (low, high) with {sizes[name].rule}, got {(low, high)}"


def _find_kernel_faults(variant: "Variant") -> Iterator[Fault]:
    """Whether one of the file's jit functions has the variant's name, by which ranges and tables call it."""
    prefix = f"{variant.contract.name}_{variant.name}"
    if variant.kernels and not any(name.startswith(prefix) for name in variant.kernels):
        found = ", ".join(variant.kernels)
        last = list(variant.kernels.values())[-1]
        yield Fault(_line_of(last.fn, variant.file), f"its kernel must be named {prefix} (found {found})")


def _find_config_faults(variant: "Variant", sound: set[str]) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) of a launcher's configs."""
    if "default" not in sound:
        return
    if "" not in variant.default:
        yield "default", "default must have an entry for every other architecture, named ''"
    for arch in variant.default:
        if not re.fullmatch(r"(sm_\d+a?|gfx\w+|interpreter)?", arch):
            yield (
                "default",
                f"default names no architecture: {arch!r}; there is sm_90 and its like, gfx942, interpreter, ''",
            )
    if variant.configs is not None and len(variant.configs) == 0 and "configs" in sound:
        yield "configs", "configs must not be empty: they are what tuning tries; leave them out for none"
    tried = (variant.configs or ()) if "configs" in sound else ()
    if len(set(tried)) < len(tried):
        yield "configs", f"configs has {next(one for one in tried if tried.count(one) > 1)} more than once"
    named = [("configs", one) for one in tried] + [("default", one) for one in variant.default.values()]
    names = sorted(variant.default.get("", next(iter(variant.default.values()), ())))
    for field, config in named:
        if sorted(config) != names:
            yield field, f"configs differ in their names: {sorted(config)} and {names}"
        if "limits" in sound and (outside := _name_outside(variant, config)):
            yield field, outside


def _name_outside(variant: "Variant", config: Config) -> str:
    """Which of a config's values is none that it may have; "" for none."""
    try:
        variant.check_limits(config.as_dict())
    except ValueError as error:
        return str(error)
    return ""


def _line_of(function: Any, file: Path) -> int | None:
    """Where a function is defined, if in this file."""
    code = getattr(function, "__code__", None)
    return code.co_firstlineno if code is not None and Path(code.co_filename) == file else None


def line_of_caller(file: Path) -> int | None:
    """The innermost line of this file that is being run."""
    frame = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename) != file:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_lineno if frame is not None else None


def lines_of_fields(file: Path) -> dict[str, int | None]:
    """Field -> the line of the declaration that gives it; "" -> where the declaration begins."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return {"": None}
    found: dict[str, int | None] = {"": None}
    for node in body:
        targets = [one.id for one in getattr(node, "targets", ()) if isinstance(one, ast.Name)]
        if "VARIANT" in targets:
            found = {"": node.lineno}
            calls = getattr(node, "value", None)
            found |= {one.arg: one.value.lineno for one in getattr(calls, "keywords", ()) if one.arg}
    return found
