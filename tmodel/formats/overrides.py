"""Settings of single layers: GPTQModel's `dynamic`, a regular expression over layers' names -> what differs there.

The first expression that matches from the beginning of a layer's name counts. "-:" before it keeps the layer dense,
"+:" or nothing changes its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from tmodel.formats.base import Parsed, drop_nulls, parse_settings
from tmodel.formats.patterns import find_match, find_pattern_fault
from tmodel.json_files import ConfigError

Dynamic = dict[str, dict[str, Any]]

_OF_QUANTIZERS = (
    *("mse", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware"),
    *("fallback", "failsafe", "hessian", "gptaq", "foem"),
)
"""What told the quantizer how to choose codes, and does not change what codes mean."""


def find_override(dynamic: Dynamic | None, layer: str) -> tuple[bool, Mapping[str, Any]] | None:
    """(whether `layer` is kept dense, what differs for it); None where no expression matches."""
    patterns = tuple(dynamic or ())
    place = find_match(_expressions(patterns), layer, "dynamic")
    if dynamic is None or place is None:
        return None
    return patterns[place].startswith("-:"), dynamic[patterns[place]]


def override(settings: Parsed, overrides: Mapping[str, Any], supported: Collection[str]) -> Parsed:
    """`settings` for the layers that `overrides` are of.

    Args:
        settings: Of the checkpoint.
        overrides: What differs; a null is as good as absent.
        supported: The keys that change what codes mean.

    Raises:
        ConfigError: A key is unknown, or a value is wrong.
    """
    given = drop_nulls(overrides)
    unknown = ", ".join(key for key in given if key not in (*supported, *_OF_QUANTIZERS))
    if unknown:
        raise ConfigError(f"unknown {unknown}; supported are {', '.join(supported)}")
    changed = {key: given[key] for key in supported if key in given}
    return parse_settings(type(settings), {**settings.model_dump(exclude={"dynamic"}), **changed})


def check_dynamic(dynamic: Dynamic | None, apply: Callable[[Mapping[str, Any]], object]) -> None:
    """Checks every expression, and that `apply` takes its overrides.

    Raises:
        ValueError: It does not; the message names the expression.
    """
    for pattern, overrides in (dynamic or {}).items():
        (expression,) = _expressions((pattern,))
        if (fault := find_pattern_fault(expression)) is not None:
            raise ValueError(f"dynamic[{pattern[:80]!r}]: {fault}")
        try:
            apply(overrides)
        except ConfigError as error:
            raise ValueError(f"dynamic[{pattern[:80]!r}]: {error}") from None


@lru_cache
def _expressions(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The regular expressions of `patterns`."""
    return tuple(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern for pattern in patterns)
