"""A kernel's tuning configuration: constants and launch options that change its speed, never what it computes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tkernels.device import is_from_sm_90

OPTIONS: Mapping[str, int] = {"num_warps": 4, "num_stages": 2, "maxnreg": 0, "launch_pdl": 0}
"""Options of Triton's launch -> their values where a config does not say; 0 is none."""

_REGISTERS = 65536  # of a multiprocessor of NVIDIA's, and so the most of a block
_MOST = {"num_warps": 32, "maxnreg": 255, "launch_pdl": 1}
_LEAST = {"maxnreg": 0, "launch_pdl": 0}


@dataclass(frozen=True)
class Config(Mapping[str, int]):
    """Named integer constants (block sizes, split counts) plus the options of a Triton launch.

    `Config(BLOCK_N=64, num_warps=8)["BLOCK_N"] == 64`. Immutable, hashable, equal by value. Every constant is at least
    1; num_warps (at most 32) and what is called BLOCK... are powers of two, as Triton needs them.

    Attributes:
        maxnreg: The most registers a thread may have, 1 to 255, on NVIDIA; 0 leaves it to the compiler.
        launch_pdl: 1 for a programmatic dependent launch, which begins before the one ahead of it has ended (sm_90 and
            newer); only for kernels that wait for it: see `tkernels.language.wait_for_earlier_launches`.
    """

    constants: tuple[tuple[str, int], ...] = ()
    num_warps: int = OPTIONS["num_warps"]
    num_stages: int = OPTIONS["num_stages"]
    maxnreg: int = OPTIONS["maxnreg"]
    launch_pdl: int = OPTIONS["launch_pdl"]
    _lookup: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __init__(self, **values: int) -> None:
        constants_first = dict(sorted(values.items(), key=lambda one: one[0] in OPTIONS))
        if faults := list(_find_faults(constants_first)):
            raise ValueError(f"config: {'; '.join(faults)}")
        self._hold(values)

    def _hold(self, values: Mapping[str, int]) -> None:
        constants = {name: value for name, value in values.items() if name not in OPTIONS}
        object.__setattr__(self, "constants", tuple(sorted(constants.items())))
        for name, default in OPTIONS.items():
            object.__setattr__(self, name, values.get(name, default))
        object.__setattr__(self, "_lookup", constants)

    def __getitem__(self, name: str) -> int:
        return self._lookup[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lookup)

    def __len__(self) -> int:
        return len(self._lookup)

    def pinned(self, pins: Mapping[str, int]) -> "Config":
        """This config with some values replaced; an unknown name is a ValueError that lists the known ones."""
        known = {**self._lookup, **self.options}
        for name in pins:
            if name not in known:
                raise ValueError(f"config has no {name!r}; it has {', '.join(sorted(known))}")
        return Config(**{**known, **pins})

    @property
    def options(self) -> dict[str, int]:
        """The launch options by name, in the order of OPTIONS."""
        return {name: getattr(self, name) for name in OPTIONS}

    def as_dict(self) -> dict[str, int]:
        """Every value by name, ready for JSON and for `Config(**d)`; an option that is 0 says nothing."""
        return {**self._lookup, **{name: value for name, value in self.options.items() if value}}

    def unmet_on(self, arch: str) -> str | None:
        """Why an architecture cannot launch with these options, or None where it can. The interpreter ignores them."""
        if self.maxnreg and arch.startswith("gfx"):
            return f"maxnreg is an option of NVIDIA's compiler; this is {arch}"
        if self.maxnreg and self.maxnreg * self.num_warps * 32 > _REGISTERS:
            return f"{self.num_warps} warps of {self.maxnreg} registers a thread are more than a block's {_REGISTERS}"
        if self.launch_pdl and not (arch == "interpreter" or is_from_sm_90(arch)):
            return f"launch_pdl needs programmatic dependent launch, of sm_90 and newer; this is {arch}"
        return None

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Config":
        """The inverse of `as_dict`."""
        return Config(**dict(values))


def _find_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Every value that is none of a config's."""
    for name, value in values.items():
        least, most = _LEAST.get(name, 1), _MOST.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f"{name} must be an integer of at least {least}, got {value!r}"
        elif (name.startswith("BLOCK") or name == "num_warps") and value & (value - 1):
            yield f"{name} must be a power of two, got {value}"
        elif most is not None and value > most:
            yield f"{name} must be at most {most}, got {value}"
