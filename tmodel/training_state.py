"""What a training run needs to go on after an interruption, in one safetensors file that is there whole or not at all.

No pickle is written: an optimizer's state is its tensors, by the number of the parameter that they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tkernels.files import replacing

_STEP, _ORDER, _TRAINING = "step", "order", "training"


def save_state(
    file: Path,
    step: int,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    order: torch.Generator,
    training: str,
) -> None:
    """Writes the state after `step` steps. `order` draws the windows; `training` names all that decides the result."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors[_ORDER] = order.get_state()
    for number, optimizer in enumerate(optimizers):
        for parameter, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{parameter}.{name}": value for name, value in values.items()}
    with replacing(file) as partial:
        save_file(tensors, partial, {_STEP: str(step), _TRAINING: training})


def load_state(
    file: Path,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    order: torch.Generator,
    training: str,
) -> int:
    """Takes up the state in `file`, returns its step; 0, with nothing changed, where there is none of this training."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get(_TRAINING) != training:
                return 0
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no mapping
    except (FileNotFoundError, SafetensorError):
        return 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    order.set_state(tensors[_ORDER])
    for number, optimizer in enumerate(optimizers):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": _optimizer_state(tensors, number), "param_groups": groups})
    return int(metadata[_STEP])


def _optimizer_state(tensors: Mapping[str, torch.Tensor], number: int) -> dict[int, dict[str, torch.Tensor]]:
    """Parameter's number -> name -> value, of one optimizer."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            owner, parameter, name = rest.split(".", 2)
            if int(owner) == number:
                state.setdefault(int(parameter), {})[name] = value
    return state
