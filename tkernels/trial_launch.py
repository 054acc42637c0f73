"""Calls of an outside variant's launcher that launch nothing, before any case is checked: is what it gives its kernels
what they take?
"""

import inspect
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from triton.runtime.jit import KernelInterface

from tkernels.config import OPTIONS, Config
from tkernels.contract import Axes, Choose, ContractError
from tkernels.declaration import Fault, line_of_caller, needed_parameters
from tkernels.device import device_facts
from tkernels.errors import TKernelsError
from tkernels.launch import Run
from tkernels.names import suggest_name
from tkernels.preparation import prepare_weights
from tkernels.source_hash import is_jit
from tkernels.variant import Variant
from tkernels.workspace import Buffer

_DRAWS = 16
"""Of the contract's, until one is supported and something is launched for it."""

_CPU = torch.device("cpu")

T = TypeVar("T")


class _BrokenError(TKernelsError):
    """What a file's own function does wrong; the argument is the fault."""


def find_launch_faults(variant: Variant) -> list[Fault]:
    """What is wrong with how a launcher calls `run.launch`, and with what `supports`, `prepare` and `workspace` return:
    as much of it as a drawn call shows, of a declaration that may break other rules too.
    """
    faults: list[Fault] = []
    if not callable(variant.launch):
        return faults
    try:
        for arguments, axes in _supported_calls(variant):
            facts, config, workspace = device_facts(_CPU), _config(variant), _workspace(variant, axes)
            trial = _Trial(facts, axes, config, workspace, _launch_nothing, variant, [])
            outputs = variant.contract.allocate_outputs(axes, arguments, _CPU)
            _call(variant, trial, {**outputs, **arguments})
            faults += (fault for fault in trial.found if fault is not None)
            if trial.found:
                break
    except _BrokenError as error:
        faults.append(error.args[0])
    return list(dict.fromkeys(faults))


def _launch_nothing(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Trial(Run):
    """found: of each launch what is wrong with it; None for nothing."""

    variant: Variant
    found: list[Fault | None]

    def launch(self, kernel: Any, grid: Any, *positional: Any, **arguments: Any) -> None:
        line = line_of_caller(self.variant.file)
        texts = list(_launch_faults(kernel, grid, positional, arguments))
        self.found.extend([Fault(line, text) for text in texts] or [None])

    def refuse_plain(self, grid: Any) -> Callable[..., None]:
        """In the place of `kernel[grid]`, which no check would see."""
        text = "launch through run.launch(kernel, grid, name=...), not through kernel[grid](...)"
        self.found.append(Fault(line_of_caller(self.variant.file), text))
        return lambda *_, **__: None


def _launch_faults(kernel: Any, grid: Any, positional: tuple[Any, ...], arguments: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with one call of `run.launch`."""
    if not is_jit(kernel):
        yield f"run.launch takes a @triton.jit function, got {kernel!r}"
        return
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3 or not all(isinstance(one, int) for one in grid):
        yield f"a grid is a tuple of 1 to 3 numbers, read off shapes and run.config; got {grid!r}"
    name = kernel.fn.__name__
    if positional:
        yield f"run.launch takes {name}'s arguments by name; {len(positional)} have none"
    parameters = inspect.signature(kernel.fn).parameters
    for one in arguments:
        if one in OPTIONS:
            yield f"{one} is the config's: say it in Config({one}=...)"
        elif one not in parameters:
            free = [parameter for parameter in parameters if parameter not in arguments]
            yield f"{name} has no parameter {one!r}{suggest_name(one, free)}"
    needed = [one for one, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    if missing := [one for one in needed[len(positional) :] if one not in arguments]:
        yield f"{name} is not given {', '.join(missing)}"


def _supported_calls(variant: Variant) -> Iterator[tuple[dict[str, Any], Axes]]:
    """Drawn calls that a variant takes, with the weight as it prepares it: arguments, and the axes that they bind."""
    contract, facts, off = variant.contract, device_facts(_CPU), _options_off(variant)
    for seed in range(_DRAWS):
        case = contract.case(contract.draw_axes(_chooser(seed), off), seed)
        loaded = contract.bind_arguments((), case.inputs)
        refused: Any = _ask(variant, "supports", partial(variant.refusal, contract.bind_axes(loaded)[0], facts))
        if refused is not None and not (isinstance(refused, str) and refused):
            raise _BrokenError(_fault_of(variant, "supports", f"returns {refused!r}, not None or a reason"))
        try:
            arguments = _ask(variant, "prepare", partial(prepare_weights, variant, loaded))
            axes, _ = contract.bind_axes(arguments)
        except ContractError as error:  # another project's object, which only its own function takes
            if refused is None and variant.launch is not None:
                raise _BrokenError(
                    _fault_of(variant, "prepare", f"returns what the op does not take: {error}")
                ) from None
            continue
        except _BrokenError:
            if refused is None:
                raise
            continue
        if variant.refusal(axes, facts) is None:
            yield arguments, axes


def _options_off(variant: Variant) -> Axes:
    """The axes of the options that a launcher leaves out, at what says that they are not set."""
    contract = variant.contract
    bound = {axis: value for option in variant.left_out for axis, value in contract.options[option].items()}
    known = {axis: value for axis, value in bound.items() if axis in contract.axis_by_name}
    return {
        axis: next((one for one in contract.axis_by_name[axis].draws if one == value), value)
        for axis, value in known.items()
    }


def _chooser(seed: int) -> Choose:
    draws = random.Random(seed)
    return lambda name, candidates: draws.choice(list(candidates))


def _ask(variant: Variant, field: str, function: Callable[[], T]) -> T:
    """What a function of the declaration returns; _BrokenError where it raises."""
    try:
        return function()
    except ContractError:
        raise
    except (Exception, SystemExit) as error:
        raise _BrokenError(
            Fault(_line_of_raise(error, variant.file), f"{field} raises {type(error).__name__}: {error}")
        ) from error


def _fault_of(variant: Variant, field: str, text: str) -> Fault:
    code = getattr(getattr(variant, field), "__code__", None)
    if code is None or Path(code.co_filename) != variant.file:
        return Fault(None, f"{field} {text}")
    return Fault(code.co_firstlineno, f"{field} {text}")


def _config(variant: Variant) -> Config:
    """The default where the declaration has one."""
    default = variant.default if isinstance(variant.default, Mapping) else {}
    named = (default.get("interpreter"), default.get(""), *default.values())
    return next((one for one in named if isinstance(one, Config)), Config())


def _workspace(variant: Variant, axes: Axes) -> dict[str, torch.Tensor]:
    """The scratch memory that the declaration asks for."""
    facts, config = device_facts(_CPU), _config(variant)
    buffers: Any = _ask(variant, "workspace", lambda: variant.workspace(axes, config, facts))
    if not isinstance(buffers, Mapping) or not all(isinstance(one, Buffer) for one in buffers.values()):
        raise _BrokenError(_fault_of(variant, "workspace", f"returns {buffers!r}, not {{name: tkernels.Buffer}}"))
    return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in buffers.items()}


def _call(variant: Variant, run: _Trial, given: Mapping[str, Any]) -> None:
    """Calls a launcher, whose parameters may be misspelt: each gets what its name is nearest to. What it raises of a
    config's or workspace's names is a fault; the rest is a check's to find.
    """
    assert variant.launch is not None
    known = {"run": run, **given}
    parameters = inspect.signature(variant.launch).parameters
    nearest = {name: get_close_matches(name, known, n=1, cutoff=0.0) for name in parameters}
    mine = {name: known[name] if name in known else known[nearest[name][0]] for name in parameters}
    is_sound = list(parameters) == needed_parameters(variant, variant.left_out)
    plain: Any = KernelInterface.__getitem__
    KernelInterface.__getitem__ = run.refuse_plain
    try:
        variant.launch(**mine)
    except KeyError as error:
        if is_sound:
            line, names = _line_of_raise(error, variant.file), ", ".join((*run.config, *run.workspace))
            run.found.append(Fault(line, f"KeyError: {error}; its config and workspace have {names or 'no names'}"))
    except (Exception, SystemExit):
        return
    finally:
        KernelInterface.__getitem__ = plain


def _line_of_raise(error: BaseException, file: Path) -> int | None:
    """The innermost line of this file that an exception came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return lines[-1] if lines else None
