"""Which model an experiment or a command means."""

from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.document import ExperimentError
from experiments.schema import ModelSource
from tmodel import ArchitectureError, Architectures, architectures_with
from tmodel.model_names import ModelPlan, directory_model, find_model, hub_model, preset_model
from tmodel.weights import Checkpoint


def plan_model(source: ModelSource, folder: Path, architectures: Architectures | None = None) -> ModelPlan:
    """The model, with its configuration read; relative paths start from `folder`.

    Raises:
        ValueError: The preset is unknown, the directory is none, or the configuration cannot be served.
    """
    if source.preset is not None:
        return preset_model(source.preset)
    if source.path is not None:
        return directory_model(folder / source.path, architectures)
    assert source.hub is not None
    return hub_model(source.hub, architectures)


def open_architectures(folders: Sequence[Path]) -> Architectures:
    """The architectures of the house and of each folder.

    Raises:
        ExperimentError: A file is wrong; it says which and why.
    """
    try:
        return architectures_with(folders)
    except ArchitectureError as error:
        raise ExperimentError([f"--architectures-from: {error}"]) from None


def named_model(text: str, option: str, architectures_from: Sequence[Path] = ()) -> ModelPlan:
    """What a command line means by a model, see `find_model`.

    Raises:
        ExperimentError: It means none; the error names `option`.
    """
    architectures = open_architectures(architectures_from)
    try:
        return find_model(text, architectures)
    except ValueError as error:
        raise ExperimentError([f"{option}: {error}"]) from None


def check_headers(directory: Path) -> None:
    """Reads the headers of a checkpoint.

    Raises:
        WeightError: They show that it cannot be loaded; it names file and tensor.
    """
    with Checkpoint(directory, device="cpu", dtype=torch.float32):
        pass
