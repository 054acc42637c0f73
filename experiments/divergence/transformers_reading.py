"""transformers' model of the same checkpoint, read place by place: as it runs, or with every part on given inputs."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from experiments.divergence.reading import Place, Reading
from experiments.document import ExperimentError
from experiments.peers.transformers_generate import load_transformers

Hook = Callable[..., Any]


def load_both(directory: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """transformers' model of a checkpoint, and the same model, with weights as rounded, in float64.

    Raises:
        ExperimentError: It cannot load the checkpoint.
    """
    try:
        model = load_transformers(directory, None, device, dtype)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ExperimentError([f"transformers cannot load {directory}: {type(error).__name__}: {reason}"]) from error
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the faster ones have no float64
    return model, exact


@torch.inference_mode()
def read_transformers(
    model: Any, sequences: Sequence[Sequence[int]], names: Sequence[str], given: Mapping[Place, torch.Tensor] | None
) -> Reading:
    """Reads sequences, each alone and at once.

    Args:
        model: transformers' model.
        sequences: Their tokens, R in all.
        names: The linear layers to listen at; those that the model does not have are left out.
        given: Place -> [R, width], what goes in and comes out there, in the place of what the model computes: each part
            then shows what it makes of these, whatever is before it. None is the model as it is.

    Returns:
        What it computed: where something is given, what it would have put there.
    """
    kept: dict[Place, list[torch.Tensor]] = {}
    logits = []
    with ExitStack() as hooks:
        taps = [_Tap(name, given or {}, kept) for name in names]
        for tap in taps:
            module = find_module(model, tap.name)
            if module is not None:
                hooks.callback(module.register_forward_pre_hook(tap.take_input).remove)
                hooks.callback(module.register_forward_hook(tap.take_output).remove)
        start = 0
        for tokens in sequences:
            for tap in taps:
                tap.rows = slice(start, start + len(tokens))
            logits.append(model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0])
            start += len(tokens)
    return Reading(sequences, torch.cat(logits), {place: torch.cat(parts) for place, parts in kept.items()})


def find_module(model: Any, name: str) -> Any:
    """The module of a layer's name; one whose name says more or less of its beginning where only one does.

    Checkpoints of GPT-2 come with "transformer." ahead of their names and without. None where there is no such module.
    """
    modules = dict(model.named_modules())
    if name in modules:
        return modules[name]
    near = [one for one in modules if one and (one.endswith(f".{name}") or name.endswith(f".{one}"))]
    return modules[near[0]] if len(near) == 1 else None


class _Tap:
    """Listens at one linear layer, for the rows of the sequence that is read."""

    def __init__(self, name: str, given: Mapping[Place, torch.Tensor], kept: dict[Place, list[torch.Tensor]]) -> None:
        self.name = name
        self.rows = slice(0)
        self._given, self._kept = given, kept

    def take_input(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the layer runs: inputs [1, S, K]."""
        return None if (given := self._take((self.name, "input"), inputs[0])) is None else (given, *inputs[1:])

    def take_output(self, module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
        """After it ran: output [1, S, N], or what begins with it: a router gives its choice after its scores."""
        place: Place = (self.name, "output")
        if not isinstance(output, tuple):
            return self._take(place, output)
        return None if (given := self._take(place, output[0])) is None else (given, *output[1:])

    def _take(self, place: Place, value: torch.Tensor) -> torch.Tensor | None:
        self._kept.setdefault(place, []).append(value.reshape(-1, value.shape[-1]).clone())
        given = self._given.get(place)
        return None if given is None else given[self.rows].to(value).view(value.shape)
