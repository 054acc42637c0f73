"""A mixture of experts: of many gated MLPs each token gets a few, and their outputs are added up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tmodel.layers import ExpertsMLP, Linear
from tmodel.linear_reader import LinearReader
from tmodel.quantization import Feed, LinearShape
from tmodel.weights import WeightError

_NUMBER = re.compile(r"[0-9]{1,9}(?=\.)")
"""Of an expert, as names of tensors have it."""


@dataclass(frozen=True)
class Experts:
    """E gated MLPs of H to I and back, of which a router gives each token K.

    What an expert counts is the softmax over all experts' scores, in float32.

    Source: Shazeer et al., Outrageously Large Neural Networks, 2017.

    Attributes:
        hidden_size: H.
        intermediate_size: I, of one expert.
        num_experts: E.
        top_k: K.
        normalize: Whether what a token's experts count is divided by its sum.
        rounded: Whether it is rounded to the model's dtype.
        block: What the names of a layer's tensors call the mixture.
        router: What they call its router.
        projections: What they call an expert's gate, up and down projection; two names: gate and up are one, and each
            is one tensor of all experts (see LinearShape.stacked).
        bias: Whether router and experts have biases.
        limit: Of gate and up, in SwiGLU's clamped form; None is the other form.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    normalize: bool
    rounded: bool
    block: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] | tuple[str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    limit: float | None = None

    def routers(self, name: str) -> tuple[LinearShape]:
        """The projection to a score for each expert, which is dense in memory; `name` is the mixture's own."""
        return (LinearShape((f"{name}.{self.router}",), (self.num_experts,), self.hidden_size, self.bias),)

    def linears(self, name: str, fed_by: Feed) -> tuple[LinearShape, LinearShape]:
        """The experts' gate and up projections, and their down projections. The router reads what `fed_by` makes too,
        so no scale of their inputs can be taken out of it.
        """
        experts, hidden, width = self.num_experts, self.hidden_size, self.intermediate_size
        *gate_up, down = self.projections
        if len(gate_up) == 1:
            joint, last = f"{name}.experts.{gate_up[0]}", f"{name}.experts.{down}"
            one = partial(LinearShape, bias=self.bias, num_experts=experts, stacked=True)
            return one((joint,), (2 * width,), hidden, gated=True), one((last,), (hidden,), width)
        each = [f"{name}.experts.{number}" for number in range(experts)]
        gates_ups = tuple(f"{expert}.{projection}" for expert in each for projection in gate_up)
        downs = tuple(f"{expert}.{down}" for expert in each)
        return (
            LinearShape(gates_ups, (width,) * (2 * experts), hidden, gated=True, num_experts=experts),
            LinearShape(downs, (hidden,) * experts, width, num_experts=experts),
        )

    def build(self, name: str, fed_by: Feed, reader: LinearReader) -> ExpertsLayer:
        """The layer with its weights out of the checkpoint."""
        experts = f"{name}.experts."
        for tensor in reader.checkpoint.names:
            number = _NUMBER.match(tensor, len(experts)) if tensor.startswith(experts) else None
            if number is not None and int(number[0]) >= self.num_experts:
                raise WeightError(
                    f"{reader.checkpoint.directory}: tensor {tensor!r} is of expert {number[0]}, counted from 0, but "
                    f"config.json says that there are {self.num_experts}"
                )
        (router,) = self.routers(name)
        return ExpertsLayer(
            self, reader.router(router), reader.kernels.route, reader.experts(*self.linears(name, fed_by), self.limit)
        )


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """A layer's mixture of experts with its weights."""

    shape: Experts
    router: Linear  # H -> E
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    experts: ExpertsMLP  # H -> H

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        logits = self.router(hidden)  # [T, E]
        experts, weights = self.route(logits, self.shape.top_k, normalize=self.shape.normalize)  # [T, K] each
        if self.shape.rounded:
            weights = weights.to(hidden.dtype)
        return self.experts(hidden, experts, weights.float())
