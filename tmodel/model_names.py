"""What a model's name means: a directory, a trained preset, a model of the Hugging Face hub, or random weights.

`find_model` takes the names that LLM and the command line take. An experiment's YAML says which of these it means, and
calls the other functions. None of them loads, makes or fetches weights: that is `ModelPlan.directory`'s.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tkernels.names import suggest_name
from tmodel.architectures import Architectures
from tmodel.config import ModelConfig
from tmodel.formats import refuse_gguf
from tmodel.hub import HubError, fetch_config, fetch_model, parse_hub_name
from tmodel.json_files import ConfigError
from tmodel.loading import load_config, parse_config
from tmodel.presets import PRESETS, preset_path
from tmodel.random_weights import RANDOM_PRESETS, num_parameters, random_config

RANDOM = "random:"
"""Before the name of a published shape, it asks for random weights of that shape."""


@dataclass(frozen=True)
class ModelPlan:
    """A model whose configuration is known, and whose weights need not be there yet.

    name            what it is called
    directory       the directory of its weights, which makes a preset or fetches a hub model's on its first call
    weights         that directory, where they are there already
    random_weights  how many weights a preset has that was never trained; 0 of every other model
    """

    name: str
    config: ModelConfig
    directory: Callable[[], Path]
    weights: Path | None = None
    random_weights: int = 0

    @property
    def architectures(self) -> Architectures:
        """The one that the directory needs, for whoever reads its configuration again."""
        return {self.config.architecture.name: self.config.architecture}


def find_model(model: str | Path, architectures: Architectures | None = None) -> ModelPlan:
    """The model called `model`: a directory, else a trained preset, else a hub id; or `random:` and a preset.

    Args:
        model: A name, or a Path, which is a directory alone.
        architectures: Those that it may be of; None is those of the house.

    Raises:
        ValueError: `model` is neither a str nor a Path, or it is empty.
        ConfigError: There is no such model, and the message says where it was looked for in which order, or its
            configuration cannot be served.
    """
    if not isinstance(model, str | Path) or model == "":  # Path("") would be the working directory
        raise ValueError(f"model must be a name or a path, got {model!r}")
    directory = Path(model)
    if _is_directory(directory) or isinstance(model, Path):
        return directory_model(directory, architectures)
    if model.startswith(RANDOM):
        return random_model(model.removeprefix(RANDOM))
    if model in PRESETS:
        return preset_model(model)
    if directory.exists():
        refuse_gguf(directory)
        raise ConfigError(f"model {model!r} is a file, not a directory with config.json and safetensors")
    names = [*PRESETS, *(RANDOM + preset for preset in RANDOM_PRESETS)]
    looked = f"model {model!r}: there is no directory {directory.absolute()}, no trained preset of that name"
    if parse_hub_name(model) is None:
        meant = f"; did you mean {RANDOM + model!r}?" if model in RANDOM_PRESETS else suggest_name(model, names)
        raise ConfigError(
            f"{looked}, and it is no hub id, owner/name or owner/name@revision; presets are {', '.join(names)}{meant}"
        )
    try:
        return hub_model(model, architectures)
    except HubError as error:
        raise ConfigError(f"{looked}, and {error}") from error.__cause__


def directory_model(directory: Path, architectures: Architectures | None = None) -> ModelPlan:
    """The model in `directory`. ConfigError where that is no directory, or its model cannot be served."""
    if not _is_directory(directory):
        refuse_gguf(directory)
        raise ConfigError(f"{directory} is not a directory")
    return ModelPlan(directory.name, load_config(directory, architectures), lambda: directory, directory)


def _is_directory(path: Path) -> bool:
    """Whether there is such a directory; ConfigError where the file system takes no such name, or does not say."""
    try:
        return path.is_dir()
    except OSError as error:
        raise ConfigError(f"model {reprlib.repr(str(path))}: {error.strerror}") from None


def preset_model(preset: str) -> ModelPlan:
    """A preset of presets.json, trained or of random weights. ConfigError where there is none of that name."""
    if preset in RANDOM_PRESETS:
        return random_model(preset)
    if preset not in PRESETS:
        known = [*PRESETS, *RANDOM_PRESETS]
        raise ConfigError(f"unknown preset {preset!r}: there is {', '.join(known)}{suggest_name(preset, known)}")
    return ModelPlan(preset, parse_config(PRESETS[preset].config), lambda: preset_path(preset))


def random_model(preset: str) -> ModelPlan:
    """Random weights of a published shape. ConfigError where there is none of that name."""
    name = RANDOM + preset
    if preset in PRESETS:
        raise ConfigError(
            f"{name!r}: {preset} is trained; its name alone asks for it, or {{preset: {preset}}} in a YAML"
        )
    if preset not in RANDOM_PRESETS:
        known = [RANDOM + name for name in RANDOM_PRESETS]
        raise ConfigError(f"unknown model {name!r}: there is {', '.join(known)}{suggest_name(name, known)}")
    shape = RANDOM_PRESETS[preset]
    return ModelPlan(preset, random_config(shape), lambda: preset_path(preset), random_weights=num_parameters(shape))


def hub_model(hub_id: str, architectures: Architectures | None = None) -> ModelPlan:
    """A model of the Hugging Face hub, or of its local cache.

    Args:
        hub_id: owner/name, or owner/name@revision: a branch, a tag or a commit.
        architectures: As for `find_model`.

    Raises:
        ConfigError: It is no such name, or its configuration cannot be served.
        HubError: Neither the hub nor its cache has it.
    """
    name = parse_hub_name(hub_id)
    if name is None:
        raise ConfigError(f"{hub_id!r} is no hub id, owner/name or owner/name@revision")
    folder = fetch_config(name)
    return ModelPlan(hub_id, load_config(folder, architectures), lambda: fetch_model(name, folder))
