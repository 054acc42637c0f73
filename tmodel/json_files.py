"""The JSON files of a model directory, and the error for what is wrong in one."""

from __future__ import annotations

import json
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tkernels.errors import TKernelsError

_MAX_BYTES = 2**24
"""Of a config file: a thousand times what the largest published ones have."""
_MAX_DEPTH = 50
"""Of mappings and lists within each other."""
_MAX_TEXT = 10_000
"""Characters of a text; all of them are names."""
_MAX_MESSAGE = 4000


class ConfigError(TKernelsError, ValueError):
    """A model directory's config.json is missing, damaged, or asks for what is not supported; or its tokenizer is.

    A message that shows values without an end is cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__(cut_message(message))


def cut_message(message: str) -> str:
    """`message` as long as one may be: names and values in it may have been made to be without an end."""
    cut = len(message) > _MAX_MESSAGE
    return f"{message[:_MAX_MESSAGE]}... ({len(message)} characters)" if cut else message


def count_bytes(path: Path) -> int:
    """The size of a file that ends.

    Raises:
        OSError: There is none, or it is a directory, a pipe or a device, of which the last two may be read for ever.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is not a regular file")
    return found.st_size


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: The file is missing, damaged, too large, or holds something else than an object.
    """
    try:
        num_bytes = count_bytes(path)
        if num_bytes > _MAX_BYTES:
            raise ConfigError(f"{path}: {num_bytes} bytes; a model's JSON file has {_MAX_BYTES} at most")
        content = parse_json(path.read_bytes())
        _check_values(content)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face model directory has one") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def parse_json(text: bytes) -> Any:
    """Parses JSON as `json.loads` does, and refuses what two readers would read differently.

    Args:
        text: UTF-8.

    Raises:
        ValueError: It is no JSON in UTF-8, an object has a name twice, a string holds half of a surrogate pair, or
            it is nested too deeply.
    """
    decoded = text.decode("utf-8")
    try:
        value = json.loads(decoded, object_pairs_hook=_refuse_twice, parse_int=_parse_int)
        if "\\u" in decoded:  # the only way to write half of a pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _check_values(content: Any) -> None:
    """Bounds what a message may have to show."""
    level = list(_members("", content))
    for _ in range(_MAX_DEPTH):
        for field, value in level:
            if isinstance(value, str) and len(value) > _MAX_TEXT:
                raise ValueError(f"{field}: a text of {len(value)} characters; the most are {_MAX_TEXT}")
        level = [one for field, value in level for one in _members(field, value)]
    if level:
        raise ValueError(f"{level[0][0]}: nested more than {_MAX_DEPTH} deep")


def _members(field: str, value: Any) -> Iterable[tuple[str, Any]]:
    """What is in a mapping or list, with the field of the file that it belongs to."""
    if isinstance(value, dict):
        return ((field or name, inner) for name, inner in value.items())
    return ((field, inner) for inner in value) if isinstance(value, list) else ()


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{reprlib.repr(name)} stands twice in one object")
    return found


def _parse_int(digits: str) -> int | float:
    """JSON's -0 is a float: as an int it would lose its sign."""
    return -0.0 if digits == "-0" else int(digits)
