"""How often each loop of a program runs at a launch's sizes, and what the program loads, stores and multiplies."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tkernels.errors import TKernelsError
from tkernels.prediction.skeleton import Block, Node

Value = int | tuple[str, int] | None
"""A scalar: a number, a pointer (parameter, offset in elements), or None where only a GPU's memory knows."""

ReadMemory = Callable[[str, int], int | None]
"""What lies in the tensor of a parameter at an offset in elements; None where that is not known."""

_MOST_STEPS = 1_000_000
"""Nodes that a walk visits: a loop of more is one that a launch does not mean."""


class WalkError(TKernelsError, ValueError):
    """A loop whose bounds only memory knows, or one without an end."""


@dataclass
class Counts:
    """Of one program. work: bytes of "loads" and "stores", FLOPs by dtype. passes: of a numbered loop, how often its
    body runs; entries: how often it is come to.
    """

    work: Counter[str] = field(default_factory=Counter)
    passes: Counter[int] = field(default_factory=Counter)
    entries: Counter[int] = field(default_factory=Counter)


def walk(
    block: Block,
    scalars: Mapping[str, int],
    pointers: Mapping[str, int],
    program: tuple[int, int, int],
    grid: tuple[int, int, int],
    read: ReadMemory,
    *,
    unknown_branches: bool = False,
) -> Counts:
    """Runs a skeleton for one program.

    Args:
        scalars: The launch's integers by parameter.
        pointers: Parameter -> the tensor's offset in its storage, in elements.
        unknown_branches: Whether a branch is taken whose condition only memory knows: of the last arriver's, all but
            one of the programs skip it.

    Raises:
        WalkError: A loop's bounds are not known.
    """
    walker = _Walker(program, grid, read, unknown_branches)
    env: dict[str, Value] = {**scalars, **{name: (name, offset) for name, offset in pointers.items()}}
    walker.run(block, env)
    return walker.counts


class _Walker:
    def __init__(
        self, program: tuple[int, int, int], grid: tuple[int, int, int], read: ReadMemory, unknown_branches: bool
    ) -> None:
        self._program, self._grid, self._read, self._unknown = program, grid, read, unknown_branches
        self.counts = Counts()
        self._steps = 0

    def run(self, block: Block, env: dict[str, Value]) -> None:
        for node in block:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise WalkError(f"more than {_MOST_STEPS:,} steps")
            match node[0]:
                case "work":
                    self.counts.work.update(node[1])
                case "for":
                    self._loop(node, env)
                case "if":
                    self._branch(node, env)
                case "while":
                    self._search(node, env)
                case _:
                    env[node[1]] = self._scalar(node, env)

    def _loop(self, node: Node, env: dict[str, Value]) -> None:
        _, variable, low, high, step, carried, body, number = node
        bounds = [env.get(name) for name in (low, high, step)]
        first, last, stride = bounds
        if not (isinstance(first, int) and isinstance(last, int) and isinstance(stride, int)) or stride <= 0:
            raise WalkError(f"the bounds of the loop over {variable} are known to the GPU's memory alone: {bounds}")
        passes = max(0, -(-(last - first) // stride))
        if number is not None:
            self.counts.entries[number] += 1
            self.counts.passes[number] += passes
        state = {name: env.get(start) for _, name, start, _ in carried}
        if not carried and all(one[0] == "work" for one in body):
            for one in body:
                self.counts.work.update({what: amount * passes for what, amount in one[1].items()})
        else:
            for index in range(passes):
                inner = {**env, variable: first + index * stride, **state}
                self.run(body, inner)
                state = {name: inner.get(after) for _, name, _, after in carried}
        env.update({outer: state[name] for outer, name, _, _ in carried})

    def _search(self, node: Node, env: dict[str, Value]) -> None:
        _, carried, before, condition, passed, names, body, yields, results = node
        state = [env.get(first) for _, first in carried]
        while True:
            inner = {**env, **dict(zip((name for name, _ in carried), state, strict=True))}
            self.run(before, inner)
            state = [inner.get(name) for name in passed]
            if not isinstance(goes_on := inner.get(condition), int):
                raise WalkError("how often a loop runs is known to the GPU's memory alone")
            if not goes_on:
                break
            inner = {**env, **dict(zip(names, state, strict=True))}
            self.run(body, inner)
            state = [inner.get(name) for name in yields]
        env.update(zip(results, state, strict=False))  # results that nobody reads may have no name

    def _branch(self, node: Node, env: dict[str, Value]) -> None:
        _, condition, then, other, results = node
        value = env.get(condition)
        taken = self._unknown if value is None else bool(value)
        self.run(then if taken else other, env)
        env.update({outer: env.get(one if taken else another) for outer, one, another in results})

    def _scalar(self, node: Node, env: Mapping[str, Value]) -> Value:
        operation, _, *operands = node
        match operation:
            case "constant":
                return int(operands[0])
            case "program_id":
                return self._program[operands[0]]
            case "num_programs":
                return self._grid[operands[0]]
            case "cmpi":
                predicate, *operands = operands
                operation = f"cmpi {predicate}"
        values = [env.get(name) for name in operands]
        match operation, values:
            case "addptr", [(str(name), int(offset)), int(more)]:
                return name, offset + more
            case "load", [(str(name), int(offset))]:
                return self._read(name, offset)
            case "select", [int(condition), one, other]:
                return one if condition else other
        if not all(isinstance(value, int) for value in values):
            return None
        return _ARITHMETIC[operation](*values)


def _quotient(one: int, other: int) -> int:
    """Rounded towards zero, as machines divide."""
    return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1) if other else 0


_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    **dict.fromkeys(("divsi", "divui"), _quotient),
    **dict.fromkeys(("remsi", "remui"), lambda a, b: a - b * _quotient(a, b)),
    "ceildivsi": lambda a, b: -(-a // b),
    "floordivsi": lambda a, b: a // b,
    **dict.fromkeys(("minsi", "minui"), min),
    **dict.fromkeys(("maxsi", "maxui"), max),
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
    "shli": lambda a, b: a << b,
    **dict.fromkeys(("shrsi", "shrui"), lambda a, b: a >> b),
    **dict.fromkeys(("extsi", "extui", "trunci", "index_cast"), lambda a: a),
    "cmpi eq": lambda a, b: int(a == b),
    "cmpi ne": lambda a, b: int(a != b),
    **dict.fromkeys(("cmpi slt", "cmpi ult"), lambda a, b: int(a < b)),
    **dict.fromkeys(("cmpi sle", "cmpi ule"), lambda a, b: int(a <= b)),
    **dict.fromkeys(("cmpi sgt", "cmpi ugt"), lambda a, b: int(a > b)),
    **dict.fromkeys(("cmpi sge", "cmpi uge"), lambda a, b: int(a >= b)),
}
"""Of integers as large as they get: what a kernel's own integers wrap at is a fault that other checks find."""
