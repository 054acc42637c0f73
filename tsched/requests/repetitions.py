"""Finds repetitions of repetitions in regular expressions, as `(a+)+`, in the syntax of Rust's regex."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ATOM = re.compile(
    r"\\[pP]\{[^}]*\}|\\[xuU]\{[^}]*\}|\\[pP].|\\.|[^\\\[(|)^$*+?{]|\{(?!\d+(?:,\d*)?\})", re.DOTALL
)  # no class, no group
_OPENING = re.compile(r"\((?:\?(?:P?<[^>]*>|[a-zA-Z-]*:))?")
_QUANTIFIER = re.compile(r"(?:([*+])|\?|\{\d+(?:(,)(\d*))?\})[?+]?")


@dataclass(slots=True)
class _Group:
    """What a group holds so far.

    Attributes:
        start: Where it begins.
        num_atoms: In it.
        has_branches: Whether it has a `|`.
        is_repetition: Whether its last atom repeats without bound, or is a group of nothing but such a one.
    """

    start: int
    num_atoms: int = 0
    has_branches: bool = False
    is_repetition: bool = False


def find_repeated_repetition(pattern: str) -> str | None:
    """The first part of `pattern` that repeats, without bound, nothing but a repetition without bound.

    It says what the inner one says, in a number of ways that grows exponentially with the text. A pattern that is none
    has none.
    """
    groups = [_Group(0)]
    place = 0
    while place < len(pattern):
        group, char = groups[-1], pattern[place]
        start, is_nothing_else = place, False
        if char == "(":
            opening = _OPENING.match(pattern, place)
            assert opening is not None, "it begins with a parenthesis"
            groups.append(_Group(place))
            place = opening.end()
            continue
        if char == ")" and len(groups) > 1:
            closed = groups.pop()
            group, start, place = groups[-1], closed.start, place + 1
            is_nothing_else = closed.num_atoms == 1 and closed.is_repetition and not closed.has_branches
        elif char == "[":
            place = _end_of_class(pattern, place)
        elif (atom := _ATOM.match(pattern, place)) is not None:
            place = atom.end()
        else:  # no atom: an anchor, a branch
            group.has_branches |= char == "|"
            place += 1
            continue
        quantifier = _QUANTIFIER.match(pattern, place)
        repeats = quantifier is not None and (
            quantifier[1] is not None or (quantifier[2] is not None and not quantifier[3])
        )
        place = place if quantifier is None else quantifier.end()
        if repeats and is_nothing_else:
            return pattern[start:place]
        group.num_atoms += 1
        group.is_repetition = repeats or (is_nothing_else and quantifier is None)
    return None


def _end_of_class(pattern: str, start: int) -> int:
    """Where the class that begins at `start` has ended; the pattern's end where it does not."""
    depth, place = 0, start
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif char == "[":
            depth += 1
            place += pattern[place + 1 : place + 2] == "^"
            place += pattern[place + 1 : place + 2] == "]"  # the first one stands for itself
        elif char == "]":
            depth -= 1
        place += 1
        if depth == 0:
            return place
    return place
