"""Regular expressions that quantization configs name layers by."""

import re


def find_pattern_fault(expression: str) -> str | None:
    """Why `expression` is no regular expression that Python can compile; None where it is one."""
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None
