"""The entries of a shape as a contract writes them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """One entry of a tensor's shape: `X`, `c*X`, `X/c`, `X+c` or a constant, all forms that `X` can be solved from; or
    `ceil(X/c)`, which only agrees with an `X` that another entry gives or does not.
    """

    text: str
    name: str | None
    times: int = 1
    over: int = 1
    plus: int = 0
    rounds_up: bool = False

    @staticmethod
    def parse(text: str) -> "Dim":
        if text.isdigit():
            return Dim(text, None, plus=int(text))
        if text.startswith("ceil("):
            name, over = text.removeprefix("ceil(").removesuffix(")").split("/")
            return Dim(text, name, over=int(over), rounds_up=True)
        if "*" in text:
            times, name = text.split("*")
            return Dim(text, name, times=int(times))
        if "/" in text:
            name, over = text.split("/")
            return Dim(text, name, over=int(over))
        if "+" in text:
            name, plus = text.split("+")
            return Dim(text, name, plus=int(plus))
        return Dim(text, text)

    def solve(self, size: int) -> int | None:
        """The axis value that gives `size`, or None where there is none. Not of a `ceil`, which many values give."""
        value, rest = divmod((size - self.plus) * self.over, self.times)
        return value if rest == 0 and value >= 0 and not self.rounds_up else None

    def size(self, axes: Mapping[str, int | str | bool]) -> int:
        value = int(axes[self.name]) * self.times if self.name is not None else 0
        return (-(-value // self.over) if self.rounds_up else value // self.over) + self.plus
