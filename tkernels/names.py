"""Names, and an error worth reading for one that is not known."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from tkernels.errors import TKernelsError

T = TypeVar("T")


class UnknownNameError(TKernelsError, KeyError, ValueError):
    """A name that nothing here has; lists what there is and the nearest match."""

    def __str__(self) -> str:  # KeyError shows the repr of its message
        return str(self.args[0])


def suggest_name(name: object, known: Iterable[str]) -> str:
    """The end of an error for an unknown name: "; did you mean ...?" with the nearest, "" where none is close."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.65)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_name(kind: str, name: object, known: Mapping[str, Any] | list[str], notes: str = "") -> UnknownNameError:
    """The error for an unknown name, with the alternatives and the nearest match."""
    there_is = f"there is {', '.join(sorted(known))}{suggest_name(name, known)}"
    return UnknownNameError(f"unknown {kind} {name!r}: {there_is}{notes}")


class Names(Mapping[str, T], Generic[T]):
    """A read-only mapping whose missing key is an error worth reading.

    unavailable: names that would be members, each with the reason why it is not.
    """

    def __init__(self, kind: str, members: Mapping[str, T], unavailable: Mapping[str, str] | None = None) -> None:
        self._kind = kind
        self._members = MappingProxyType(dict(members))
        self.unavailable = MappingProxyType(dict(unavailable or {}))

    def __getitem__(self, name: str) -> T:
        try:
            return self._members[name]
        except (KeyError, TypeError):
            if reason := self.unavailable.get(name):
                known = f"there is {', '.join(sorted(self._members))}"
                raise UnknownNameError(f"{self._kind} {name!r} is not available: {reason}; {known}") from None
            raise unknown_name(self._kind, name, self._members) from None

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)
