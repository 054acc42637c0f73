"""tmodel: a Hugging Face directory becomes a model over packed tokens, computed by the kernels it is given."""

import tkernels as _tkernels  # noqa: F401  before transformers: it decides whether Triton interprets
from tmodel.architectures import ArchitectureError, Architectures, architectures_with, known_architectures
from tmodel.batch import Batch, KVCache
from tmodel.cache_kinds import CacheKind, Pages, UnitPart, WindowedPages
from tmodel.config import Architecture, Limits, Model, ModelConfig, SplitModel
from tmodel.json_files import ConfigError
from tmodel.kernel_axes import kernel_axes
from tmodel.kernel_swap import with_kernels
from tmodel.kv_cache import (
    CachePages,
    CacheTensors,
    allocate_kv_cache,
    bytes_per_state,
    cache_window,
    kv_bytes_per_block,
    state_interval,
)
from tmodel.loading import load_config, load_model
from tmodel.model_names import ModelPlan, find_model
from tmodel.presets import PRESETS, make_model, make_random_model, preset_path
from tmodel.random_weights import RANDOM_PRESETS
from tmodel.train import Recipe, TrainingError, TrainingReport
from tmodel.weights import WeightError

__all__ = [
    "PRESETS",
    "RANDOM_PRESETS",
    "Architecture",
    "ArchitectureError",
    "Architectures",
    "Batch",
    "CacheKind",
    "CachePages",
    "CacheTensors",
    "ConfigError",
    "KVCache",
    "Limits",
    "Model",
    "ModelConfig",
    "ModelPlan",
    "Pages",
    "Recipe",
    "SplitModel",
    "TrainingError",
    "TrainingReport",
    "UnitPart",
    "WeightError",
    "WindowedPages",
    "allocate_kv_cache",
    "architectures_with",
    "bytes_per_state",
    "cache_window",
    "find_model",
    "kernel_axes",
    "known_architectures",
    "kv_bytes_per_block",
    "load_config",
    "load_model",
    "make_model",
    "make_random_model",
    "preset_path",
    "state_interval",
    "with_kernels",
]
