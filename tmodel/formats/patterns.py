"""Regular expressions that quantization configs name layers by.

They come with a checkpoint that anyone may have written. The library `regex` matches them, for it can be stopped; the
standard library's `re` would try for ever where repeats are nested.
"""

from __future__ import annotations

import math
import re
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


def matches(expression: str, layer: str, field: str) -> bool:
    """Whether `expression`, without a fault, matches a layer's name from its beginning.

    Args:
        expression: A regular expression.
        layer: The name.
        field: Where the config has the expression, for the message.

    Raises:
        ConfigError: The answer takes too long.
    """
    try:
        return _compile(expression).match(layer, timeout=_MAX_SECONDS) is not None
    except TimeoutError:
        raise ConfigError(
            f"quantization_config: {field}: {expression[:80]!r} is not matched against {layer!r} within "
            f"{_MAX_SECONDS} s; an expression whose repeats are not nested takes microseconds"
        ) from None


@lru_cache(maxsize=2**14)  # a config may have one for each layer, more than the library keeps
def _compile(expression: str) -> Any:
    return regex.compile(expression)
