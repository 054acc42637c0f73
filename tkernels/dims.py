"""The entries of a shape as a contract writes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType

_FUNCTIONS = {"ceil": math.ceil, "min": min}


@dataclass(frozen=True)
class Dim:
    """One entry of a tensor's shape: `X`, `c*X`, `X/c`, `X+c` or a constant, all forms that `X` can be solved from; or
    any other expression over axes, with `ceil` and `min`, which only agrees with what other entries give or does not.
    """

    text: str
    name: str | None
    times: int = 1
    over: int = 1
    plus: int = 0
    is_computed: bool = False

    @staticmethod
    def parse(text: str) -> "Dim":
        if text.isdigit():
            return Dim(text, None, plus=int(text))
        if text.isidentifier():
            return Dim(text, text)
        for sign in "*/+":
            left, found, right = text.partition(sign)
            if found and sign == "*" and left.isdigit() and right.isidentifier():
                return Dim(text, right, times=int(left))
            if found and sign != "*" and left.isidentifier() and right.isdigit():
                return Dim(text, left, over=int(right)) if sign == "/" else Dim(text, left, plus=int(right))
        return Dim(text, None, is_computed=True)

    @cached_property
    def code(self) -> CodeType:
        return compile(self.text, f"<dim {self.text}>", "eval")

    @cached_property
    def names(self) -> frozenset[str]:
        """The axes that it is made of."""
        if self.is_computed:
            return frozenset(self.code.co_names) - _FUNCTIONS.keys()
        return frozenset() if self.name is None else frozenset((self.name,))

    def solve(self, size: int) -> int | None:
        """The axis value that gives `size`, or None where there is none. Not of a computed one, which many give."""
        value, rest = divmod((size - self.plus) * self.over, self.times)
        return value if rest == 0 and value >= 0 and not self.is_computed else None

    def size(self, axes: Mapping[str, int | str | bool]) -> int:
        if self.is_computed:
            return int(eval(self.code, {"__builtins__": {}, **_FUNCTIONS}, dict(axes)))
        value = int(axes[self.name]) * self.times if self.name is not None else 0
        return value // self.over + self.plus
