"""transformers' model of a checkpoint, computed one decoder layer at a time with weights that the caller passes.

The served model packs tokens, writes caches and calls kernels, which calibration does not need. Calibration observes
the inputs of linears, changes a layer's weights and differentiates. transformers' own layers allow all of this, for
every architecture that it has. The model is made without memory for weights: one layer's are in memory at most.
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
"""A layer's tensors by what follows its prefix in a checkpoint, as in "mlp.up_proj.weight". Matrices are [N, K]."""

Observe = Callable[[int, torch.Tensor], None]
"""observe(group, x [tokens, K]) is called with the input of each group of linears."""


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


def transposed_matrices(config: ModelConfig, index: int) -> frozenset[str]:
    """The matrices of layer `index` that a checkpoint and transformers hold as [K, N], by the names of Weights."""
    groups = (group for group in layer_groups(config, index) if group.transposed)
    return frozenset(f"{name}.weight" for group in groups for name in group.names)


def outer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor outside layers."""
    layers = f"{config.architecture.layers}."
    return {name: shape for name, shape in config.tensors().items() if not name.startswith(layers)}


class _StopForward(Exception):
    """Ends a forward before the head, which is not needed."""


class TransformersLayers:
    """The model of `config`, for windows of `num_tokens` that begin at position 0.

    Args:
        config: Of the checkpoint.
        raw: Its config.json.
        num_tokens: S, of a window.
        outer: The tensors outside layers, by their names in the checkpoint.

    Raises:
        ConfigError: Transformers has no such architecture, or not with the layers and linears that are declared.
    """

    def __init__(self, config: ModelConfig, raw: Mapping[str, Any], num_tokens: int, outer: Weights) -> None:
        self.config = config
        with torch.device("meta"):
            self._model = new_transformers_model(raw).eval().requires_grad_(False)
        self._fill_buffers()
        self._outer = self._match_parameters(outer)
        try:
            self._layers: list[torch.nn.Module] = list(self._model.get_submodule(config.architecture.layers))
            self._linears = [
                [layer.get_submodule(group.names[0]) for group in layer_groups(config, index)]
                for index, layer in enumerate(self._layers)
            ]
        except (AttributeError, TypeError) as error:
            name = config.architecture.name
            raise ConfigError(f"transformers' {name} has other modules than are declared: {error}") from None
        self._transposed = [transposed_matrices(config, index) for index in range(len(self._layers))]
        # Each layer is called as the model itself calls it, with its own mask and the positions of a window.
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        with self._replace_layers(self._record_call), torch.no_grad():
            self._call_model(torch.zeros((1, num_tokens), dtype=torch.int64))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n, S] -> the first layer's input [n, S, H]."""
        seen: list[torch.Tensor] = []

        def stop(index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(hidden)
            raise _StopForward

        with self._replace_layers(stop), torch.no_grad():
            self._call_model(tokens)
        return seen[0]

    def __call__(
        self, weights: Weights, index: int, hidden: torch.Tensor, observe: Observe | None = None
    ) -> torch.Tensor:
        """Computes one layer.

        Args:
            weights: Of the layer.
            index: Which layer it is.
            hidden: [n, S, H], its input. Windows do not attend to one another.
            observe: Called with the input of each group of linears.

        Returns:
            [n, S, H].
        """
        args, kwargs = self._calls[index]
        hooks = []
        for group, linear in enumerate(self._linears[index] if observe is not None else ()):

            def show(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], group: int = group) -> None:
                assert observe is not None
                observe(group, inputs[0].detach().flatten(0, -2))

            hooks.append(linear.register_forward_pre_hook(show))
        try:
            theirs = {name: one.t() if name in self._transposed[index] else one for name, one in weights.items()}
            out: torch.Tensor = functional_call(self._layers[index], theirs, (hidden, *args), kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's output [n, S, H] -> [n, S, vocab]."""
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        with self._replace_layers(lambda index, *args, **kwargs: hidden):
            logits: torch.Tensor = self._call_model(tokens)
        return logits

    def _record_call(self, index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._calls.append((args, kwargs))
        if index == len(self._layers) - 1:
            raise _StopForward
        return hidden

    def _call_model(self, tokens: torch.Tensor) -> Any:
        """The logits of tokens [n, S]; None where a replaced layer ends the call."""
        options = {"input_ids": tokens, "use_cache": False}
        try:
            return functional_call(self._model, self._outer, (), options).logits
        except _StopForward:
            return None

    @contextmanager
    def _replace_layers(self, call: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Within the context, each layer calls call(index, hidden, ...) instead."""
        for index, layer in enumerate(self._layers):
            layer.forward = lambda *args, index=index, **kwargs: call(index, *args, **kwargs)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _fill_buffers(self) -> None:
        """Makes modules with buffers anew, with memory: tables of positions are computed, not loaded."""
        for name, module in list(self._model.named_modules()):
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                try:
                    made = type(module)(self._model.config)
                except TypeError as error:
                    message = f"transformers' {self.config.architecture.name}.{name} cannot be made alone: {error}"
                    raise ConfigError(message) from None
                parent, _, own = name.rpartition(".")
                setattr(self._model.get_submodule(parent), own, made)

    def _match_parameters(self, outer: Weights) -> dict[str, torch.Tensor]:
        """Parameter name -> tensor, for the tensors outside layers.

        transformers names some parameters otherwise than checkpoints do: such a tensor belongs to the only parameter of
        its shape that is left.
        """
        layers = f"{self.config.architecture.layers}."
        wanted = {name: p for name, p in self._model.named_parameters() if not name.startswith(layers)}
        matched = {name: outer[name] for name in wanted if name in outer}
        for name in (name for name in outer if name not in wanted):
            same = [one for one, p in wanted.items() if one not in matched and p.shape == outer[name].shape]
            if len(same) != 1:
                raise ConfigError(f"transformers' {self.config.architecture.name} has no parameter {name!r}")
            matched[same[0]] = outer[name]
        return matched


def linear_names(groups: Sequence[LinearShape]) -> list[str]:
    """The names of a layer's linears, in the order of computation."""
    return [name for group in groups for name in group.names]
