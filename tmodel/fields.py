"""The fields of config.json that architectures share, as the file has them: typed, in the old and the new spelling.

An architecture's own file declares the rest in a subclass, with the defaults of its transformers config: a field that
is absent means something else in another architecture.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from tkernels.names import suggest_name
from tmodel.json_files import ConfigError
from tmodel.rotary import ROPE_KINDS, Rope, RopeParameters

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_MAX_SIZE = 2**24
"""Of a whole number in config.json. The longest context of a published model is 10,485,760 tokens; vocabularies and
widths are far smaller."""
_MAX_PARTS = 2**12
"""Of a number of layers, heads or a layer's experts, each of which takes names, shapes and objects before any weight is
read, and of a head's width. Published models have up to 126 layers, 128 heads, 512 experts and a width of 512."""
_MAX_EXPERTS = 2**16
"""Of all layers. Published models have up to 23,000."""

Epsilon = Annotated[float, Field(gt=0, le=1)]
"""What a norm adds to a mean square; more would leave little of a vector."""

LayerType = Literal["full_attention", "sliding_attention"]


class HuggingFaceConfig(BaseModel):
    """The fields of every architecture's config.json. Those that do not decide what is computed are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    vocab_size: PositiveInt
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_dtype(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Before transformers 5 the key was `torch_dtype`."""
        return raw if raw.get("dtype") is not None else {**raw, "dtype": raw.get("torch_dtype")}

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any, info: ValidationInfo) -> Any:
        """Bounds every architecture's sizes: tables and lists are made of them before any weight shows them wrong."""
        most = _MAX_PARTS if any(part in str(info.field_name) for part in ("layer", "head", "expert")) else _MAX_SIZE
        if type(value) is int and abs(value) > most:
            raise PydanticCustomError("size", "must be at most {most}", {"most": most})
        return value

    def resolved_dtype(self) -> torch.dtype:
        """The dtype that the checkpoint was saved for; float32 where none is named."""
        name = (self.dtype or "float32").removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigError(f"dtype is {name!r}; supported are {', '.join(_DTYPES)}")
        return _DTYPES[name]


class RotaryConfig(HuggingFaceConfig):
    """The fields of an architecture with rotary positions.

    The old spelling, `rope_theta` beside `rope_scaling`, is read into `rope_parameters`, which transformers 5 writes.
    """

    default_rope_theta: ClassVar[float] = 10000.0
    default_rope: ClassVar[Mapping[str, Any]] = {}

    rope_parameters: RopeParameters

    @model_validator(mode="before")
    @classmethod
    def _read_rope(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "rope_parameters": _parse_rope(raw, cls.default_rope_theta, cls.default_rope)}

    def whole_head_rope(self, head_dim: int) -> Rope:
        """The rotation of all dims of a head.

        Raises:
            ConfigError: The file asks for a part of them, or there is an odd number.
        """
        share = self.rope_parameters.partial_rotary_factor
        if share not in (None, 1.0):
            raise ConfigError(
                f"partial_rotary_factor is {share}; the architecture rotates every dim of a head, and transformers "
                "ignores the field"
            )
        if head_dim % 2:
            raise ConfigError(f"head_dim is {head_dim}; rotary positions need it even")
        return Rope(head_dim, self.rope_parameters)


_ROPE_KEYS_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys that a config.json may have beside the mapping of rotary parameters."""


def _parse_rope(raw: Mapping[str, Any], default_theta: float, default: Mapping[str, Any]) -> RopeParameters:
    """The rotary parameters of a config.json, in either spelling; a null is an absent key.

    What stands in the mapping goes before what stands beside it, as in transformers.

    Raises:
        ConfigError: An unknown kind, a key that the kind has not or that is missing, or two spellings that differ.
    """
    name, mapping = _rope_mapping(raw, default)
    parameters = {key: value for key, value in mapping.items() if value is not None}
    kind = _rope_kind(name, [parameters.pop(key) for key in ("rope_type", "type") if key in parameters])
    keys = ROPE_KINDS[kind].model_fields
    for key in parameters:
        if key not in keys:
            known = f"which has {', '.join(keys)}{suggest_name(key, keys)}"
            raise ConfigError(f"{name}: {key} is no key of rope_type {kind!r}, {known}")
    beside = {key: raw[key] for key in _ROPE_KEYS_BESIDE if key in keys and raw.get(key) is not None}
    original = "original_max_position_embeddings"
    if original in beside and beside[original] != parameters.get(original, beside[original]):
        raise ConfigError(f"{original} is {beside[original]}, but {parameters[original]} in {name}; keep one of them")
    try:
        return ROPE_KINDS[kind].model_validate({"rope_theta": default_theta, **beside, **parameters})
    except ValidationError as error:
        outside = beside.keys() - parameters.keys()
        wrong = [_describe(one, () if one["loc"][0] in outside else (name,)) for one in error.errors()]
        raise ConfigError("; ".join(wrong)) from error


def _rope_mapping(raw: Mapping[str, Any], default: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The mapping of rotary parameters, and the name that it has; the default where there is none."""
    given = {name: raw[name] for name in ("rope_scaling", "rope_parameters") if raw.get(name) not in (None, {})}
    for name, mapping in given.items():
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{name} must be a mapping, got {mapping!r}")
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise ConfigError("rope_scaling and rope_parameters are both given, and differ; keep one of them")
    return next(iter(given.items()), ("rope_parameters", default))


def _rope_kind(name: str, named: Sequence[Any]) -> str:
    """The kind that `rope_type` or, in older files, `type` names; `default` where neither is given."""
    if any(other != named[0] for other in named[1:]):
        raise ConfigError(f"{name}: rope_type is {named[0]!r}, but type is {named[1]!r}")
    kind = named[0] if named else "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        supported = f"supported are {', '.join(ROPE_KINDS)}{suggest_name(kind, ROPE_KINDS)}"
        raise ConfigError(f"{name}: rope_type {kind!r} is not supported; {supported}")
    return kind


def divide_heads(hidden_size: int, num_heads: int) -> int:
    """Dims of a head where config.json has no `head_dim`; ConfigError where they do not come out even."""
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}, and head_dim is not given"
        )
    return hidden_size // num_heads


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


def equal_windows(
    layer_types: Sequence[LayerType] | None, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """The window of each layer where all have the same, whatever their types: None is all keys.

    Raises:
        ConfigError: The types say something else, which transformers ignores.
    """
    layer_type = "full_attention" if window is None else "sliding_attention"
    if layer_types is not None and list(layer_types) != [layer_type] * num_layers:
        raise ConfigError(
            f"layer_types is {layer_types}; with sliding_window={window} the {num_layers} layers are all {layer_type}, "
            "and transformers ignores the field"
        )
    return (window,) * num_layers


_OTHER_MIXTURES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), (None, 0)),
    **dict.fromkeys(("shared_expert_intermediate_size", "first_k_dense_replace"), (None, 0)),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq"), (None, 1)),
    "topk_method": (None, "greedy"),
    "scoring_func": (None, "softmax"),
    **dict.fromkeys(("moe_router_use_sigmoid", "use_expert_bias"), (None, False)),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor"), (None, 1.0)),
}
"""Fields of other architectures' mixtures -> what they may be where there is no such thing."""
_ONE_FIELD = (("num_experts", "num_local_experts", "n_routed_experts"), ("num_experts_per_tok", "experts_per_token"))
"""Names that say one thing, the architectures' own first."""


class ExpertsConfig(RotaryConfig):
    """The fields by which an architecture says how many experts an MLP is made of, and how many a token has."""

    num_hidden_layers: PositiveInt
    num_experts: PositiveInt = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, raw: dict[str, Any]) -> dict[str, Any]:
        defaults = {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}
        known = {**defaults, **{name: value for name, value in raw.items() if value is not None}}
        for names in _ONE_FIELD:
            given = {name: reprlib.repr(known[name]) for name in names if name in known}
            for one, other in pairwise(given):
                if known[one] != known[other]:
                    raise ConfigError(
                        f"{one} is {given[one]}, but {other} {given[other]}; the two are one field: keep one of them"
                    )
        for name, neutral in _OTHER_MIXTURES.items():
            if raw.get(name) not in neutral:
                raise ConfigError(
                    f"{name} is {reprlib.repr(raw[name])}; the architecture has no shared experts, no groups of them, "
                    "no other scores than softmax's and no such layers without experts, and transformers ignores the "
                    "field"
                )
        return {name: value for name, value in raw.items() if value is not None or name not in _ONE_FIELD[0]}

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but there are {self.num_experts} experts"
            )
        if self.num_hidden_layers * self.num_experts > _MAX_EXPERTS:
            raise ConfigError(
                f"num_hidden_layers={self.num_hidden_layers} with {self.num_experts} experts each are more than "
                f"{_MAX_EXPERTS} experts"
            )
        return self


class QwenWindows(RotaryConfig):
    """The fields by which Qwen2 and Qwen3 say which layers have a window."""

    num_hidden_layers: PositiveInt
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28
    layer_types: list[LayerType] | None = None

    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None is all keys before a query.

        Raises:
            ConfigError: Layers slide, but the file says that no window is used: transformers cannot run such a model.
        """
        window = self.sliding_window if self.use_sliding_window else None
        if self.layer_types is None:
            first = self.num_hidden_layers if window is None else self.max_window_layers
            return tuple(window if index >= first else None for index in range(self.num_hidden_layers))
        if "sliding_attention" in self.layer_types and not self.use_sliding_window:
            raise ConfigError(
                "layer_types names sliding_attention, but use_sliding_window is false; one of them is wrong"
            )
        return windows_of(self.layer_types, window, self.num_hidden_layers)


Fields = TypeVar("Fields", bound=HuggingFaceConfig)


def parse_fields(kind: type[Fields], raw: Mapping[str, Any]) -> Fields:
    """`raw`, a config.json, with its types and ranges checked; ConfigError lists every field that is wrong."""
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError("; ".join(map(_describe, error.errors()))) from error


def _describe(error: ErrorDetails, within: Sequence[str] = ()) -> str:
    """The wrong field with its value and what is allowed; `within` is the path of what was validated."""
    if error["type"] == "value_error":  # a ConfigError, which names the place itself
        return str(error["ctx"]["error"])
    place = ".".join(map(str, (*within, *error["loc"])))
    got = "" if error["type"] == "missing" else f", got {reprlib.repr(error['input'])}"
    return f"{place}: {error['msg']}{got}"
