"""The named axes of an op: sizes with their legal ranges, enums, and the relations between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType

Value = int | str | bool
Axes = Mapping[str, Value]
"""Axis name -> value at one point: sizes as int, dtypes and enums by name, options as given (0 where absent)."""

Choose = Callable[[str, Sequence[Value]], Value]
"""Picks one of the candidates for the named axis: a seeded generator in `tk check`, hypothesis in the tests."""


@dataclass(frozen=True)
class Int:
    """A size with its legal range. `draws` are the values the property tests choose from: small, and at every edge.
    `wide` are those of a wide draw: as large as a model's, or past what small sizes could hide.

    `batch` marks an axis that depends on what else is in the batch (T, B, a table's width): neither split boundaries
    nor the order of sums of a batch-invariant variant may depend on it. `classes` of such an axis are the largest sizes
    of the classes between which another config may be the best, ascending; one more class has what is larger.
    """

    name: str
    low: int
    high: int
    draws: tuple[int, ...]
    doc: str = ""
    batch: bool = False
    wide: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()

    def size_class(self, size: int) -> str:
        """The sizes that share a tuned config with this one: its class, or all up to the next power of two."""
        if not self.classes:
            return f"{self.name}<={1 << max(size - 1, 0).bit_length()}"
        largest = next((largest for largest in self.classes if size <= largest), None)
        return f"{self.name}>{self.classes[-1]}" if largest is None else f"{self.name}<={largest}"

    @property
    def class_labels(self) -> list[str]:
        """Every class, the smallest sizes first."""
        return [self.size_class(size) for size in (*self.classes, self.classes[-1] + 1)] if self.classes else []

    def allows(self, value: Value) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high

    def hides(self, value: Value) -> bool:
        """Whether a case with this value shows nothing of what the other axes do: none of the batch is there."""
        return self.batch and value == 0

    @property
    def rule(self) -> str:
        return f"{self.low} <= {self.name} <= {self.high}"


@dataclass(frozen=True)
class Choice:
    """An enum: a dtype by role, an option's presence, a memory layout, a kind of values. `legal` may exceed `draws`.
    `wide` are the values of a wide draw: those that leave something to compute. `hiding` are those beside which no
    other axis makes a difference: nothing is computed, or all of it is 0.
    """

    name: str
    draws: tuple[Value, ...]
    doc: str = ""
    legal: tuple[Value, ...] | None = None
    batch: bool = False
    wide: tuple[Value, ...] = ()
    hiding: tuple[Value, ...] = ()

    def allows(self, value: Value) -> bool:
        return value in (self.legal or self.draws)

    def hides(self, value: Value) -> bool:
        return value in self.hiding

    @property
    def rule(self) -> str:
        return f"{self.name} in ({', '.join(dict.fromkeys(map(str, self.legal or self.draws)))})"

    def parse(self, text: str) -> Value | None:
        """The value that a text means, true and false also as YAML writes them; None where it means none."""
        for value in self.legal or self.draws:
            if text == str(value) or (isinstance(value, bool) and text == str(value).lower()):
                return value
        return None


Axis = Int | Choice

FLOATS = ("float32", "float16", "bfloat16")


def dtype_axis(role: str, *more: str) -> Choice:
    """A dtype by role. float64 is legal (the torch variants take it, as an oracle for whole models) but not drawn."""
    return Choice(role, (*more, *FLOATS), f"dtype of the {role} tensors", legal=(*more, *FLOATS, "float64"))


@dataclass(frozen=True)
class Constraint:
    """A relation between axes as a Python expression over their names, evaluated, not only stated."""

    text: str

    @cached_property
    def code(self) -> CodeType:
        return compile(self.text, f"<constraint {self.text}>", "eval")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.code.co_names)

    def holds(self, axes: Axes) -> bool:
        return bool(eval(self.code, {"__builtins__": {}}, dict(axes)))

    def __str__(self) -> str:
        return self.text
