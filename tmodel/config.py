"""What a model directory's config.json says, checked and in one spelling.

`HuggingFaceConfig` is the file as it was written: typed, with the old and the new names of a field. `ModelConfig` is
what the rest of the house reads: no spellings, no optional fields, nothing that the kernels could not honour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from tkernels.contract import Value
from tkernels.variant import AxisRanges
from tmodel.cache_kinds import CacheKind, Pages, check_kinds

if TYPE_CHECKING:  # it speaks of a ModelConfig's layers, and its formats raise ConfigError
    from tmodel.quantization import Quantization

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ConfigError(ValueError):
    """A model directory's config.json is missing, damaged, or asks for what is not supported; or its tokenizer is."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and constants.

    `windows[layer]` is the number of keys that a query of that layer sees, itself included, or None for all of them.
    `dtype` is the one that the checkpoint was saved for; a caller is free to load it as another. `quantization` says
    which linear layers are quantized, and how; None is none of them. `cache_kinds` says what a sequence keeps, by
    groups that share the layers out; an architecture that gives none keeps pages of keys and values in every layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    quantization: Quantization | None = None
    cache_kinds: tuple[CacheKind, ...] = ()

    def __post_init__(self) -> None:
        if not self.cache_kinds:
            pages = Pages(tuple(range(self.num_layers)), self.num_kv_heads, self.head_dim)
            object.__setattr__(self, "cache_kinds", (pages,))
        check_kinds(self.cache_kinds, self.num_layers)

    def kernel_axes(
        self, *, max_num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int
    ) -> dict[str, AxisRanges | tuple[AxisRanges, ...]]:
        """The ops that the model and its engine call, each with every axis they call it at: for `tkernels.select`.

        These are the widest ops; the parts of a composed fusion follow from them. A range is (low, high); an op that
        is called in several ways has one set of ranges for each. The limits are those of one step (tokens, sequences),
        of one sequence (`max_model_len`) and of the KV cache.
        """
        tokens, width = (1, max_num_tokens), -(-max_model_len // block_size)
        heads: dict[str, Value | tuple[int, int]] = {"Hq": self.num_heads, "Hkv": self.num_kv_heads, "D": self.head_dim}
        windows = {window or 0 for window in self.windows}
        attention = {
            **heads,
            "B": (1, max_num_seqs),
            "Dv": self.head_dim,
            "P": num_blocks,
            "S": block_size,
            "N": (1, width),
            "window": (min(windows), max(windows)),
            "k_scale": False,
            "v_scale": False,
            "return_lse": False,
        }
        qkv_width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        inputs = (self.hidden_size, self.num_heads * self.head_dim, self.intermediate_size)
        outputs = (self.hidden_size, qkv_width, self.vocab_size)
        axes: dict[str, AxisRanges | tuple[AxisRanges, ...]] = {
            "matmul": {
                "M": tokens,
                "N": (min(outputs), max(outputs)),
                "K": (min(inputs), max(inputs)),
                "bias": (False, self.attention_bias),
            },
            "rms_norm": {"T": tokens, "H": self.hidden_size},
            "add_rms_norm": {"T": tokens, "H": self.hidden_size},
            "qk_norm_rope_scatter": {
                **heads,
                "T": tokens,
                "Dv": self.head_dim,
                "R": self.rotary_dim,
                "L": self.max_position_embeddings,
                "P": num_blocks,
                "S": block_size,
                "q_weight": True,
                "k_weight": True,
                "interleaved": False,
                "k_scale": False,
                "v_scale": False,
            },
            "paged_decode": attention,
            "paged_prefill": {**attention, "T": tokens, "causal": True},
            "gate_up_swiglu": {"T": tokens, "H": self.hidden_size, "I": self.intermediate_size},
            "copy_pages": {
                "pairs": (0, num_blocks),
                "C": 2 * self.num_layers,
                "P": num_blocks,
                "S": block_size,
                "Hkv": self.num_kv_heads,
                "D": self.head_dim,
            },
            "step_inputs": {
                "R": max_num_seqs,
                "B": (0, max_num_seqs),
                "T": (0, max_num_tokens),
                "N": (1, width),
                "page_size": block_size,
            },
        }
        if self.quantization is not None:
            dense, quantized = self.quantization.gate_ups
            if quantized:
                axes["swiglu"] = {"T": tokens, "I": self.intermediate_size}
            if not dense:
                del axes["gate_up_swiglu"]
            if ways := self.quantization.kernel_axes(tokens):
                axes["dequant_gemm"] = ways
        return axes


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


class HuggingFaceConfig(BaseModel):
    """The fields of config.json that decide what is computed. Others (initializer_range, use_cache, …) are ignored.

    The field names, and what an absent one means, are those of transformers' `Qwen3Config`.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    max_position_embeddings: PositiveInt = 32768
    rope_theta: PositiveFloat | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    max_window_layers: int = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None

    @property
    def rope_kind(self) -> str:
        """The kind of rotary scaling; `default` is none: the angles are position * theta^(-2i/R)."""
        return (self.rope_scaling or self.rope_parameters or RopeParameters()).kind

    @property
    def rotary_factor(self) -> float:
        """The share of head_dim that is rotated."""
        in_parameters = self.rope_parameters.partial_rotary_factor if self.rope_parameters else None
        return in_parameters or self.partial_rotary_factor or 1.0

    def resolved_rope_theta(self) -> float:
        """The rotary base, from `rope_parameters` (transformers 5) or the top level (before)."""
        if self.rope_parameters is not None and self.rope_parameters.rope_theta is not None:
            return self.rope_parameters.rope_theta
        return self.rope_theta if self.rope_theta is not None else 10000.0

    def resolved_windows(self) -> tuple[int | None, ...]:
        """One window per layer; raises ConfigError where the fields contradict one another."""
        layer_types: Sequence[str] | None = self.layer_types
        if layer_types is None:
            first = self.max_window_layers if self.use_sliding_window else self.num_hidden_layers
            layer_types = [
                "sliding_attention" if i >= first else "full_attention" for i in range(self.num_hidden_layers)
            ]
        if len(layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(layer_types)} entries for num_hidden_layers={self.num_hidden_layers}"
            )
        if "sliding_attention" in layer_types and self.sliding_window is None:
            raise ConfigError("layer_types names sliding_attention, but sliding_window is not given")
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in layer_types)

    def resolved_dtype(self) -> torch.dtype:
        name = (self.dtype or self.torch_dtype or "float32").removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigError(f"dtype is {name!r}; supported are {', '.join(_DTYPES)}")
        return _DTYPES[name]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ConfigError names the file where it is missing, damaged, or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face model directory has one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def parse_config(raw: Mapping[str, Any]) -> HuggingFaceConfig:
    """`raw` with its types and ranges checked; ConfigError lists every field that is wrong."""
    try:
        return HuggingFaceConfig.model_validate(dict(raw))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(wrong) from error


def end_token_ids(directory: Path, config: HuggingFaceConfig) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json's where it names any, else config.json's.

    This is the order in which transformers' `generate` looks.
    """
    generation_file = directory / "generation_config.json"
    ids = read_json(generation_file).get("eos_token_id") if generation_file.exists() else None
    if ids is None:
        ids = config.eos_token_id
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < config.vocab_size:
            raise ConfigError(f"eos_token_id {token_id!r} is not a token id below vocab_size={config.vocab_size}")
    return tuple(dict.fromkeys(ids))
