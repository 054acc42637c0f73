"""Kinds of values that an experiment's YAML has in many places."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


def as_list(value: Any) -> Any:
    """A single value is a list of one."""
    return value if isinstance(value, list) else [value]


Swept = Annotated[list[T], BeforeValidator(as_list), Field(min_length=1)]
"""The values of an axis: a list, or one value."""


class Strict(BaseModel):
    """Frozen, and a key that it does not have is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
