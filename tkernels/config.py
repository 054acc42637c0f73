"""A kernel's tuning configuration: constants and launch options that change its speed, never what it computes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TuningMode = Literal["nearest", "frozen", "search"]
"""How the config of a call is chosen: see `tkernels.tuning.Tuning`. Here, where no torch is needed to read it."""


@dataclass(frozen=True)
class Config(Mapping[str, int]):
    """Named integer constants (block sizes, split counts) plus the two launch options every Triton kernel has.

    `Config(BLOCK_N=64, num_warps=8)["BLOCK_N"] == 64`. Immutable, hashable, equal by value. Every value is at least 1;
    num_warps (at most 32) and what is called BLOCK... are powers of two, as Triton needs them.
    """

    constants: tuple[tuple[str, int], ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    _lookup: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __init__(self, *, num_warps: int = 4, num_stages: int = 2, **constants: int) -> None:
        if faults := list(_find_faults({**constants, "num_warps": num_warps, "num_stages": num_stages})):
            raise ValueError(f"config: {'; '.join(faults)}")
        self._hold(constants, num_warps, num_stages)

    def _hold(self, constants: Mapping[str, int], num_warps: int, num_stages: int) -> None:
        object.__setattr__(self, "constants", tuple(sorted(constants.items())))
        object.__setattr__(self, "num_warps", num_warps)
        object.__setattr__(self, "num_stages", num_stages)
        object.__setattr__(self, "_lookup", dict(constants))

    def __getitem__(self, name: str) -> int:
        return self._lookup[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lookup)

    def __len__(self) -> int:
        return len(self._lookup)

    def pinned(self, pins: Mapping[str, int]) -> "Config":
        """This config with some values replaced; an unknown name is a ValueError that lists the known ones."""
        known = self.as_dict()
        for name in pins:
            if name not in known:
                raise ValueError(f"config has no {name!r}; it has {', '.join(sorted(known))}")
        return Config(**{**known, **pins})

    def as_dict(self) -> dict[str, int]:
        """Every value by name, ready for JSON and for `Config(**d)`."""
        return {**self._lookup, "num_warps": self.num_warps, "num_stages": self.num_stages}

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Config":
        """The inverse of `as_dict`."""
        return Config(**dict(values))


def _find_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Every value that is none of a config's."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{name} must be an integer of at least 1, got {value!r}"
        elif (name.startswith("BLOCK") or name == "num_warps") and value & (value - 1):
            yield f"{name} must be a power of two, got {value}"
        elif name == "num_warps" and value > 32:
            yield f"num_warps must be at most 32, got {value}"
