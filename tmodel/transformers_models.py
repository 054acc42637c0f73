"""transformers' own model of a config.json: what is trained, what is calibrated, and what a served model must equal.

transformers is imported where it is used: it imports Triton, and tkernels must be the first to do so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tmodel.json_files import ConfigError


def new_transformers_model(raw: Mapping[str, Any], **changes: Any) -> Any:
    """A model of the class that a config.json names, its weights from torch's current random state.

    Args:
        raw: The config.json.
        changes: Fields that differ.

    Raises:
        ConfigError: Transformers has no such class.
    """
    import transformers

    (name,) = raw["architectures"]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {name}")
    return kind(kind.config_class.from_dict({**raw, **changes}))
