"""What Triton's compiler makes of a launch, as far as its own intermediate form: no GPU, no assembler.

A mutant that does not get this far is no mutant, and one that comes out the same is the same program: an implicit
promotion, say, does what a removed cast did.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from itertools import count
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import TARGETS
from tkernels.inputs import map_tensors
from tkernels.launch import Kernel, launch_options
from tkernels.mode import MODE
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.ahead_of_time import activate

ARCH = "sm_90"

_VALUE = re.compile(r"(?P<value>%[\w$.-]+(?:#\d+)?)")
_WIDENS = re.compile(rf"arith\.extf {_VALUE.pattern} : .* to tensor<[\dx]+xf32>$")
_COPIES = re.compile(r"(?P<kind>tt\.(expand_dims|broadcast)) %\S+(?P<how>.*) : .* -> tensor<(?P<shape>[\dx]+)x")
_RESULT = re.compile(r"(%[\w$.-]+)(?::(\d+))?")
_RESULTS = re.compile(rf"{_RESULT.pattern}(?:, {_RESULT.pattern})*")
_PURE = re.compile(
    r"(arith\.|math\.|tt\.(splat|broadcast|expand_dims|addptr|make_range|reshape|trans|join|split|dot|fp_to_fp|bitcast)\b)"
)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def without_order(text: str) -> str:  # noqa: C901  one kind of line each
    """TTIR in which an operation without effects is written where it is used: when it happens is no difference.

    Removing a cast that promotion puts back, for one, only moves the widening to where the value is first needed. It
    may move past a change of shape: a widened row of copies is a row of widened copies.
    """
    meaning: dict[str, str] = {}
    kept: list[str] = []
    arguments = count()
    copied: dict[str, tuple[str, str]] = {}  # what expand_dims and broadcast made: how, and of what

    def shaped(how: str, operand: str) -> str:
        meant = _digest(how + operand)
        copied[meant] = (how, operand)
        return meant

    def widened(operand: str) -> str:
        if operand in copied:
            how, inner = copied[operand]
            return shaped(how, widened(inner))
        return _digest("widened " + operand)

    def named(match: re.Match[str]) -> str:
        value = match["value"]
        if value not in meaning:
            meaning[value] = f"argument{next(arguments)}"
        return meaning[value]

    for line in text.splitlines():
        results, equals, operation = line.strip().partition(" = ")
        defined = _RESULTS.fullmatch(results) if equals else None
        names = [name for name, _ in _RESULT.findall(results)] if defined else []
        if defined and _PURE.match(operation):
            if widens := _WIDENS.match(operation):
                meaning[names[0]] = widened(named(widens))
            elif copies := _COPIES.match(operation):
                operand = _VALUE.search(operation)
                assert operand is not None
                meaning[names[0]] = shaped(copies["kind"] + copies["how"] + copies["shape"], named(operand))
            else:
                meant = _digest(_VALUE.sub(named, operation))
                meaning |= {name: f"{meant}.{index}" for index, name in enumerate(names)}
        else:
            # Defined anew here, whatever had these names before: they are used again from kernel to kernel.
            for name, size in _RESULT.findall(results) if defined else ():
                meaning[name] = f"line{len(kept)}"
                meaning |= {f"{name}#{index}": f"line{len(kept)}.{index}" for index in range(int(size or 0))}
            kept.append(_VALUE.sub(named, line.strip()))
    return "\n".join(kept)


class _Reached(Exception):
    """The compiler has come far enough; carries the text."""


class CodeReader:
    """Compiles launches on meta tensors up to optimized TTIR. Does nothing in a process that interprets."""

    def __init__(self) -> None:
        if MODE != "compile":
            return
        from triton import knobs
        from triton.backends.nvidia.compiler import CUDABackend

        def stop(mod: Any, *rest: Any) -> None:
            raise _Reached(mod.str_nodebug())

        activate(ARCH)
        CUDABackend.make_ttgir = staticmethod(stop)
        knobs.compilation.always_compile = True

    def read(self, variant: Variant, case: Case, config: Config) -> str:
        """A hash of the TTIR of all the launches of a case; raises what the compiler raises."""
        contract, facts, meta = variant.contract, TARGETS[ARCH], torch.device("meta")
        texts: list[str] = []

        def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
            try:
                kernel.warmup(grid=grid, **arguments, **launch_options(config))
            except _Reached as reached:
                texts.append(str(reached))

        def to_meta(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta)

        arguments = map_tensors(contract.bind_arguments((), case.inputs), to_meta)
        axes, _ = contract.bind_axes(arguments)
        outputs = contract.allocate_outputs(axes, arguments, meta)
        Kernel(variant, NEAREST, {}, door).launch_into(outputs, arguments, axes, meta, facts, config)
        return sha256(without_order("\n".join(texts)).encode()).hexdigest()
