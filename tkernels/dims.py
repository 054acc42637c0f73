"""The entries of a shape as a contract writes them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """One entry of a tensor's shape: `X`, `c*X`, `X/c`, `X+c` or a constant, all forms that `X` can be solved from."""

    text: str
    name: str | None
    times: int = 1
    over: int = 1
    plus: int = 0

    @staticmethod
    def parse(text: str) -> "Dim":
        if text.isdigit():
            return Dim(text, None, plus=int(text))
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
        """The axis value that gives `size`, or None where there is none."""
        value, rest = divmod((size - self.plus) * self.over, self.times)
        return value if rest == 0 and value >= 0 else None

    def size(self, axes: Mapping[str, int | str | bool]) -> int:
        value = axes[self.name] if self.name is not None else 0
        return int(value) * self.times // self.over + self.plus
