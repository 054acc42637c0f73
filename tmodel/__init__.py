"""tmodel: a Hugging Face directory becomes a model over packed tokens, computed by the kernels it is given."""

import tkernels as _tkernels  # noqa: F401  before transformers: it decides whether Triton interprets
from tmodel.architectures import Architecture, Model, known_architectures
from tmodel.batch import Batch
from tmodel.cache_kinds import CacheKind, Pages, UnitPart
from tmodel.config import ConfigError, ModelConfig
from tmodel.kv_cache import (
    CachePages,
    CacheTensors,
    KVCache,
    allocate_kv_cache,
    bytes_per_state,
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
    "Batch",
    "CacheKind",
    "CachePages",
    "CacheTensors",
    "ConfigError",
    "KVCache",
    "Model",
    "ModelConfig",
    "ModelPlan",
    "Pages",
    "Recipe",
    "TrainingError",
    "TrainingReport",
    "UnitPart",
    "WeightError",
    "allocate_kv_cache",
    "bytes_per_state",
    "find_model",
    "known_architectures",
    "kv_bytes_per_block",
    "load_config",
    "load_model",
    "make_model",
    "make_random_model",
    "preset_path",
    "state_interval",
]
