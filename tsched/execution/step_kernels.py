"""The ops that an engine calls beside its model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from tkernels import KernelSet
from tkernels.ops.logprobs.contract import baseline as logprobs
from tkernels.ops.sample.contract import baseline as sample
from tkernels.ops.step_inputs.contract import baseline as step_inputs

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepKernels:
    """Those of a KernelSet, by their names; torch's where none is given."""

    step_inputs: Callable[..., Tensors] = step_inputs
    sample: Callable[..., torch.Tensor] = sample
    logprobs: Callable[..., Tensors] = logprobs

    @classmethod
    def of(cls, kernels: KernelSet) -> StepKernels:
        return cls(**{op.name: getattr(kernels, op.name) for op in fields(cls)})


TORCH_KERNELS = StepKernels()
