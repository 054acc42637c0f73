"""transformers' model of a checkpoint, one decoder layer at a time, over weights that are handed in.

The served model packs tokens, writes caches and calls kernels; calibration wants none of that. It wants to see what
each linear multiplies, to go on with a layer whose weights were changed, and to differentiate. transformers' own layers
give all of this for every architecture that it has. The model is made without memory for its weights: in memory are
those of one layer at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.func import functional_call

from tmodel.config import ModelConfig
from tmodel.json_files import ConfigError
from tmodel.quantization import LinearShape
from tmodel.transformers_models import new_transformers_model

Weights = Mapping[str, torch.Tensor]
"""A layer's tensors by what follows its prefix in a checkpoint, as in "mlp.up_proj.weight"."""

Observe = Callable[[int, torch.Tensor], None]
"""observe(group, x [tokens, K]): what the linears of a layer's group are about to multiply."""


def layer_groups(config: ModelConfig, index: int) -> tuple[LinearShape, ...]:
    """The linear layers of layer `index` in the order of computation, those of a shape sharing one input.

    Names are what follows the layer's prefix.
    """
    prefix = config.layer_prefix(index)
    shapes = [shape for shape in config.linears() if shape.names[0].startswith(prefix)]
    return tuple(
        replace(
            shape,
            names=tuple(name.removeprefix(prefix) for name in shape.names),
            fed_by=shape.fed_by and replace(shape.fed_by, name=shape.fed_by.name.removeprefix(prefix)),
        )
        for shape in shapes
    )


def layer_tensors(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of layer `index`, by the names of Weights."""
    prefix = config.layer_prefix(index)
    return {name.removeprefix(prefix): shape for name, shape in config.tensors().items() if name.startswith(prefix)}


def outer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that no layer has."""
    layers = f"{config.architecture.layers}."
    return {name: shape for name, shape in config.tensors().items() if not name.startswith(layers)}


class _PastTheLayers(Exception):
    """Ends a forward whose head nobody wants."""


class TransformersLayers:
    """The model of `config`, for windows of `num_tokens` that begin at position 0.

    Args:
        config: of the checkpoint.
        raw: its config.json.
        num_tokens: S, of a window.
        outer: the tensors that no layer has, by their names in the checkpoint.

    Raises:
        ConfigError: transformers has no such architecture, or not with the layers and linears that are declared.
    """

    def __init__(self, config: ModelConfig, raw: Mapping[str, Any], num_tokens: int, outer: Weights) -> None:
        self.config = config
        with torch.device("meta"):
            self._model = new_transformers_model(raw).eval().requires_grad_(False)
        self._fill_buffers()
        self._outer = self._by_parameter(outer)
        try:
            self._layers: list[torch.nn.Module] = list(self._model.get_submodule(config.architecture.layers))
            self._linears = [
                [layer.get_submodule(group.names[0]) for group in layer_groups(config, index)]
                for index, layer in enumerate(self._layers)
            ]
        except (AttributeError, TypeError) as error:
            name = config.architecture.name
            raise ConfigError(f"transformers' {name} has other modules than are declared: {error}") from None
        # Each layer is called as the model itself calls it: with its own mask and the positions of a window.
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        with self._instead_of_layers(self._record_call), torch.no_grad():
            self._call_model(torch.zeros((1, num_tokens), dtype=torch.int64))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n, S] -> the first layer's input [n, S, H]."""
        seen: list[torch.Tensor] = []

        def stop(index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(hidden)
            raise _PastTheLayers

        with self._instead_of_layers(stop), torch.no_grad():
            self._call_model(tokens)
        return seen[0]

    def __call__(
        self, weights: Weights, index: int, hidden: torch.Tensor, observe: Observe | None = None
    ) -> torch.Tensor:
        """hidden [n, S, H] -> [n, S, H] through layer `index` with `weights`, each window alone."""
        args, kwargs = self._calls[index]
        hooks = []
        for group, linear in enumerate(self._linears[index] if observe is not None else ()):

            def show(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], group: int = group) -> None:
                assert observe is not None
                observe(group, inputs[0].detach().flatten(0, -2))

            hooks.append(linear.register_forward_pre_hook(show))
        try:
            out: torch.Tensor = functional_call(self._layers[index], dict(weights), (hidden, *args), kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's output [n, S, H] -> [n, S, vocab]."""
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        with self._instead_of_layers(lambda index, *args, **kwargs: hidden):
            found: torch.Tensor = self._call_model(tokens)
        return found

    def _record_call(self, index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._calls.append((args, kwargs))
        if index == len(self._layers) - 1:
            raise _PastTheLayers
        return hidden

    def _call_model(self, tokens: torch.Tensor) -> Any:
        """The logits of tokens [n, S]; None where what stands for a layer ends the call."""
        options = {"input_ids": tokens, "use_cache": False}
        try:
            return functional_call(self._model, self._outer, (), options).logits
        except _PastTheLayers:
            return None

    @contextmanager
    def _instead_of_layers(self, call: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Within, call(index, hidden, ...) stands for each layer."""
        for index, layer in enumerate(self._layers):
            layer.forward = lambda *args, index=index, **kwargs: call(index, *args, **kwargs)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _fill_buffers(self) -> None:
        """Tables of positions are no weights: what computes them is made again, with memory."""
        for name, module in list(self._model.named_modules()):
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                try:
                    made = type(module)(self._model.config)
                except TypeError as error:
                    message = f"transformers' {self.config.architecture.name}.{name} cannot be made alone: {error}"
                    raise ConfigError(message) from None
                parent, _, own = name.rpartition(".")
                setattr(self._model.get_submodule(parent), own, made)

    def _by_parameter(self, outer: Weights) -> dict[str, torch.Tensor]:
        """Tensors that no layer has by the names of parameters. transformers calls some otherwise than their files: one
        whose name it has not is the one that is left of its shape.
        """
        layers = f"{self.config.architecture.layers}."
        wanted = {name: p for name, p in self._model.named_parameters() if not name.startswith(layers)}
        found = {name: outer[name] for name in wanted if name in outer}
        for name in (name for name in outer if name not in wanted):
            same = [one for one, p in wanted.items() if one not in found and p.shape == outer[name].shape]
            if len(same) != 1:
                raise ConfigError(f"transformers' {self.config.architecture.name} has no parameter {name!r}")
            found[same[0]] = outer[name]
        return found


def linear_names(groups: Sequence[LinearShape]) -> list[str]:
    """The linears of a layer, in the order of computation."""
    return [name for group in groups for name in group.names]
