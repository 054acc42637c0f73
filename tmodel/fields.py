"""The fields of config.json that architectures share, as the file has them: typed, in the old and the new spelling.

An architecture's own file declares the rest in a subclass, with the defaults of its transformers config: a field that
is absent means something else in another architecture.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from tmodel.json_files import ConfigError

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_MAX_SIZE = 2**24
"""Of a whole number in config.json. The longest context of a published model is 10,485,760 tokens; vocabularies and
widths are far smaller."""
_MAX_LAYERS = 2**12
"""Of a number of layers, each of which takes names, shapes and objects before any weight is read. Published models have
up to 126."""
_MAX_TEXT = 1000
"""Characters of a text, all of which are names."""
_MAX_SHOWN = 20
"""Wrong values that a message lists."""

LayerType = Literal["full_attention", "sliding_attention"]


class HuggingFaceConfig(BaseModel):
    """The fields of every architecture's config.json. Those that do not decide what is computed are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False, str_max_length=_MAX_TEXT)

    vocab_size: PositiveInt
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any, info: ValidationInfo) -> Any:
        """Bounds every architecture's sizes: tables and lists are made of them before any weight shows them wrong."""
        most = _MAX_LAYERS if "layer" in str(info.field_name) else _MAX_SIZE
        if type(value) is int and abs(value) > most:
            raise PydanticCustomError("size", "must be at most {most}", {"most": most})
        return value

    def resolved_dtype(self) -> torch.dtype:
        """The dtype that the checkpoint was saved for; float32 where none is named."""
        name = (self.dtype or self.torch_dtype or "float32").removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigError(f"dtype is {name!r}; supported are {', '.join(_DTYPES)}")
        return _DTYPES[name]


class RopeParameters(BaseModel):
    """The `rope_parameters` (or, before transformers 5, `rope_scaling`) mapping; scaled kinds carry more keys."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)

    @property
    def kind(self) -> str:
        """What is done to the angles; `default` is nothing. A key that is not known (a factor, a mapping per kind of
        layer) would change them too, so with one the kind is no longer `default`."""
        unknown = ", ".join(sorted(self.model_extra or {}))
        kind = self.rope_type or self.type or "default"
        return f"{kind} with {unknown}" if kind == "default" and unknown else kind


class RotaryConfig(HuggingFaceConfig):
    """The fields of an architecture with rotary positions."""

    default_rope_theta: ClassVar[float] = 10000.0

    rope_theta: PositiveFloat | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)

    def resolved_rope_theta(self) -> float:
        """The rotary base, from `rope_parameters` (transformers 5) or the top level (before).

        Raises:
            ConfigError: The angles are scaled, which no part here computes.
        """
        kind = (self.rope_scaling or self.rope_parameters or RopeParameters()).kind
        if kind != "default":
            raise ConfigError(f"rope scaling of type {kind!r} is not supported; only 'default' (none) is")
        in_parameters = self.rope_parameters.rope_theta if self.rope_parameters else None
        return in_parameters or self.rope_theta or self.default_rope_theta

    @property
    def rotary_factor(self) -> float | None:
        """The share of a head's dims that is rotated, where the file names one."""
        in_parameters = self.rope_parameters.partial_rotary_factor if self.rope_parameters else None
        return in_parameters or self.partial_rotary_factor


def windows_of(layer_types: Sequence[LayerType], window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer from its type: the keys that a query sees, itself included; None is all of them.

    Raises:
        ConfigError: There are more or fewer types than layers, or a layer slides and `window` is None.
    """
    if len(layer_types) != num_layers:
        raise ConfigError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={num_layers}")
    if "sliding_attention" in layer_types and window is None:
        raise ConfigError("layer_types names sliding_attention, but sliding_window is not given")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


Fields = TypeVar("Fields", bound=HuggingFaceConfig)


def parse_fields(kind: type[Fields], raw: Mapping[str, Any]) -> Fields:
    """`raw`, a config.json, with its types and ranges checked; ConfigError lists the fields that are wrong."""
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        wrong = error.errors()
        more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
        raise ConfigError("; ".join(map(_describe, wrong[:_MAX_SHOWN])) + more) from error


def _describe(error: ErrorDetails) -> str:
    got = "" if error["type"] == "missing" else f", got {reprlib.repr(error['input'])}"
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}{got}"
