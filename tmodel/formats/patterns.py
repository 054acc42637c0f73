"""Regular expressions that quantization configs name layers by.

They come with a checkpoint that anyone may have written. The library `regex` matches them, for it can be stopped; the
standard library's `re` would try for ever where repeats are nested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import regex

from tmodel.json_files import ConfigError

_MAX_SECONDS = 0.1
"""For one expression and one name, which take some microseconds where nothing is wrong."""
_MAX_REPEATS = 10_000
"""Of the fewest repeats that an expression asks for, multiplied: `regex` writes each of them out."""
_AMBIGUOUS = re.compile(r"\{(?!\d*,?\d*\})|\[:")
"""Braces that count no repeats and classes like [:alpha:], which are text to `re` and more than that to `regex`."""
_JOINED = re.compile(r"(?:\\\D|[^\\(]|\((?!\?)|\(\?(?:[:=!]|<[=!])){0,200}", re.DOTALL)
"""An expression that means the same as an alternative of a longer one: it refers to no group, sets no flag, and is too
short for groups within groups to be more than the library can compile."""


def find_pattern_fault(expression: str) -> str | None:
    """Why `expression` is no regular expression that can be compiled; None where it is one."""
    if (found := _AMBIGUOUS.search(re.sub(r"\\.", ".", expression))) is not None:
        return f"{found[0]!r} in it is understood in two ways; no layer's name has it"
    try:
        re.compile(expression)
        repeats = math.prod(max(int(count), 1) for count in re.findall(r"\{\s*(\d{1,9})", expression))
        if repeats > _MAX_REPEATS:
            return f"its repeats multiply to more than {_MAX_REPEATS}, and no layer's name is so long"
        _compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        return str(error)
    return None


def find_match(expressions: Sequence[str], layer: str, field: str) -> int | None:
    """The place of the first of `expressions`, without a fault, that matches a layer's name from its beginning.

    A config may have several expressions for each layer, and a mixture has tens of thousands of names that none
    matches. So all that can be are matched at once, and one by one only where that finds something.

    Args:
        expressions: Regular expressions.
        layer: The name.
        field: Where the config has them, for the message.

    Returns:
        The place; None where none matches.

    Raises:
        ConfigError: The answer takes too long.
    """
    together, apart = _join(tuple(expressions))
    try:
        places = range(len(expressions)) if _match(together, layer) else apart
    except TimeoutError:
        places = range(len(expressions))
    for place in places:
        expression = expressions[place]
        try:
            if _match(expression, layer):
                return place
        except TimeoutError:
            raise ConfigError(
                f"quantization_config: {field}: {expression[:80]!r} is not matched against {layer!r} within "
                f"{_MAX_SECONDS} s; an expression whose repeats are not nested takes microseconds"
            ) from None
    return None


def _match(expression: str, layer: str) -> bool:
    """Whether `expression` matches a layer's name from its beginning; TimeoutError where the answer takes too long."""
    return _compile(expression).match(layer, timeout=_MAX_SECONDS) is not None


@lru_cache
def _join(expressions: tuple[str, ...]) -> tuple[str, Sequence[int]]:
    """(one expression for those that can be matched at once, the places of the others)."""
    joined = [one for one in expressions if _JOINED.fullmatch(one)]
    apart = [place for place, one in enumerate(expressions) if not _JOINED.fullmatch(one)]
    return "|".join(f"(?:{one})" for one in joined) or "(?!)", apart


@lru_cache(maxsize=2**14)  # a config may have one for each layer, more than the library keeps
def _compile(expression: str) -> Any:
    return regex.compile(expression)
