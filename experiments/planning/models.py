"""Which model an experiment means: its configuration, at once; its directory, when weights are wanted."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.document import ExperimentError, nearest
from experiments.schema import ModelSource
from tmodel import ConfigError, ModelConfig, load_config
from tmodel.loading import config_of
from tmodel.presets import PRESETS, find_recipe, preset_path
from tmodel.random_weights import RANDOM_PRESETS, num_parameters, random_config
from tmodel.weights import Checkpoint

_DATA_FILES = ("*.json", "*.safetensors", "tokenizer.model")
"""All that is ever fetched of a hub model: no pickles, no code."""


@dataclass(frozen=True)
class ModelPlan:
    """`config` is known without any weights; `directory()` builds a preset, or fetches a hub model's weights.

    weights: the directory where they are already there, before they are asked for. random_weights: how many there are
    of a preset that was never trained.
    """

    name: str
    config: ModelConfig
    directory: Callable[[], Path]
    weights: Path | None = None
    random_weights: int = 0


def plan_model(source: ModelSource, folder: Path) -> ModelPlan:
    """The model, with its configuration read; relative paths start from `folder`.

    Raises ValueError for an unknown preset, a directory that is none, or a configuration that cannot be served.
    """
    if source.preset is not None:
        preset = source.preset
        if preset in RANDOM_PRESETS:
            shape = RANDOM_PRESETS[preset]
            return ModelPlan(
                preset, random_config(shape), lambda: preset_path(preset), random_weights=num_parameters(shape)
            )
        known = [*PRESETS, *RANDOM_PRESETS]
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}: there is {', '.join(known)}{nearest(preset, known)}")
        return ModelPlan(preset, config_of(find_recipe(preset).config), lambda: preset_path(preset))
    if source.path is not None:
        directory = folder / source.path
        if not os.path.isdir(directory):
            raise ValueError(f"{directory} is not a directory")
        return ModelPlan(directory.name, load_config(directory), lambda: directory, directory)
    assert source.hub is not None
    hub_id = source.hub
    return ModelPlan(hub_id, load_config(_fetch(hub_id, ("*.json",))), lambda: _fetch(hub_id, _DATA_FILES))


def named_model(text: str, option: str) -> ModelPlan:
    """What a command line means by a model: a directory, or else a preset's name. ExperimentError names `option`."""
    is_preset = text in PRESETS and not Path(text).exists()
    source = ModelSource(preset=text) if is_preset else ModelSource(path=Path(text))
    try:
        return plan_model(source, Path.cwd())
    except ValueError as error:
        hint = f" (presets: {', '.join(PRESETS)})" if not Path(text).exists() else ""
        raise ExperimentError([f"{option}: {error}{hint}"]) from None


def check_headers(directory: Path) -> None:
    """Raises WeightError, naming file and tensor, where the headers of a checkpoint show that it cannot be loaded."""
    with Checkpoint(directory, device="cpu", dtype=torch.float32):
        pass


def _fetch(hub_id: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{hub_id!r} cannot be fetched from the Hugging Face hub: {error}") from None
