"""The JSON files of a model directory, and the error for what is wrong in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A model directory's config.json is missing, damaged, or asks for what is not supported; or its tokenizer is."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: The file is missing, damaged, or holds something else than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face model directory has one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
