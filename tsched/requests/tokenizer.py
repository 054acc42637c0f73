"""The tokenizer of a model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tmodel
from tmodel.json_files import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""A directory with one of these has a tokenizer."""

_READ = {"local_files_only": True, "trust_remote_code": False}
"""Without the second transformers would ask at the terminal whether the checkpoint's own Python code may run."""


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in `directory`, a transformers one; None where it has none.

    Raises:
        tmodel.ConfigError: Its files are damaged, or config.json, which transformers reads first, is not to its liking.
    """
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    # Late: importing transformers takes seconds, and a directory without a tokenizer does not need it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, **_READ)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exceptions, and panics that are none
        reason = _explain_config(directory, error) or _explain_tokenizer(directory, error)
        raise tmodel.ConfigError(reason) from error


def _explain_config(directory: Path, error: BaseException) -> str | None:
    """What transformers has against config.json, with the field; None where that is not what failed."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(directory, **_READ)
    except Exception as refusal:
        told = " ".join(str(refusal).split())
        if repr(refusal) != repr(error):
            return None
        if "trust_remote_code" in told:
            return (
                f"{directory / 'config.json'}: auto_map: it asks for the checkpoint's own Python code, which is not run"
            )
        raw = read_json(directory / "config.json")
        fields = [name for name in raw if f"'{name}'" in told] or [
            name for name, value in raw.items() if value and isinstance(value, str) and value in told
        ]
        place = "".join(f"{name}: " for name in fields[:1])
        told = f"{place}transformers, which loads the tokenizer, reads this file first: {told}"
        return f"{directory / 'config.json'}: {told}; the tokenizer cannot be loaded"
    return None


def _explain_tokenizer(directory: Path, error: BaseException) -> str:
    """What keeps the tokenizer's own files from being loaded, in one line."""
    present = [name for name in TOKENIZER_FILES if (directory / name).exists()]
    if present == ["tokenizer_config.json"]:
        return f"{directory}: has tokenizer_config.json and no vocabulary; its tokenizer needs tokenizer.json too"
    if "trust_remote_code" in str(error):
        return f"{directory}: its tokenizer is Python code (auto_map of tokenizer_config.json), which is not run"
    told = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{directory}: its tokenizer cannot be loaded: {told}"
