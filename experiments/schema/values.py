"""Kinds of values that an experiment's YAML has in many places."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


def as_list(value: Any) -> Any:
    """A single value is a list of one."""
    return value if isinstance(value, list) else [value]


class Strict(BaseModel):
    """Frozen, and a key that it does not have is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Counts = Annotated[list[Count], BeforeValidator(as_list), Field(min_length=1)]
Bytes = Annotated[
    list[Annotated[int, Field(strict=True, ge=1, lt=2**63)]], BeforeValidator(as_list), Field(min_length=1)
]
Policies = Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
Fractions = Annotated[
    list[Annotated[float, Field(strict=True, ge=0, le=1)]], BeforeValidator(as_list), Field(min_length=1)
]
Shares = Annotated[
    list[Annotated[float, Field(strict=True, gt=0, le=1)]], BeforeValidator(as_list), Field(min_length=1)
]
Flags = Annotated[list[StrictBool], BeforeValidator(as_list), Field(min_length=1)]
