"""The tokenizer of a model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tmodel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""A directory with one of these has a tokenizer."""


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in `directory`, a transformers one; None where it has none.

    Raises:
        tmodel.ConfigError: Its files are damaged.
    """
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    # Late: importing transformers takes seconds, and a directory without a tokenizer does not need it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exceptions, and panics that are none
        reason = f"{type(error).__name__}: {error}"
        raise tmodel.ConfigError(f"{directory}: its tokenizer cannot be loaded: {reason}") from error
