"""The same model over other kernels: its layers again, with its weights shared and not copied."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from tkernels import KernelSet, SelectionError, prepared
from tkernels.launch import Kernel
from tkernels.quantized.stacked import interleaved_experts
from tkernels.quantized.weight import interleaved
from tkernels.variant import Variant, as_it_is
from tmodel.config import Model
from tmodel.layers import ExpertsMLP, Linear, ScaledMatmul
from tmodel.linear_reader import preparing_variant


def with_kernels(model: Model, kernels: KernelSet) -> Model:
    """Builds `model` again over `kernels`; the given one stays as it is, and both share their weights.

    Kernels are found in the attributes of the model and of its layers: in lists, tuples, dicts, partials, dataclasses
    and objects of the classes that stand in the model's own file.

    Args:
        model: Any architecture's.
        kernels: The ops of its KernelSet, by other variants.

    Raises:
        SelectionError: A variant wants its weights in a layout that cannot be made any more, because the loaded one is
            gone.
    """
    return _Rebinding(kernels, type(model).__module__).rebind(model)


class _Rebinding:
    """One walk over a model. What holds no kernel stays the same object; what two places share they share after."""

    def __init__(self, kernels: KernelSet, module: str) -> None:
        self._kernels = kernels
        self._module = module
        self._made: dict[int, Any] = {}  # address -> what a part became; the old model keeps the parts alive

    def rebind(self, part: Any) -> Any:
        if id(part) not in self._made:
            self._made[id(part)] = part  # an object may refer to itself
            self._made[id(part)] = self._rebind(part)
        return self._made[id(part)]

    def _rebind(self, part: Any) -> Any:
        if isinstance(part, KernelSet):
            return self._kernels
        if isinstance(part, Kernel):
            return self._kernels.kernels[part.variant.contract.name]
        if isinstance(part, Linear):
            return self._rebind_linear(part)
        if isinstance(part, ExpertsMLP):
            return self._rebind_experts(part)
        if isinstance(part, partial):
            function, args, keywords = self.rebind(part.func), self._rebind(part.args), self._rebind(part.keywords)
            return partial(function, *args, **keywords)
        if type(part) in (list, tuple):
            new = [self.rebind(one) for one in part]
            return part if _are_same(part, new) else type(part)(new)
        if type(part) is dict:
            new = [self.rebind(one) for one in part.values()]
            return part if _are_same(part.values(), new) else dict(zip(part, new, strict=True))
        if is_dataclass(part) and not isinstance(part, type):
            return self._rebind_attributes(part, [one.name for one in fields(part)])
        return self._rebind_attributes(part, list(vars(part))) if type(part).__module__ == self._module else part

    def _rebind_attributes(self, part: Any, names: list[str]) -> Any:
        new = {name: self.rebind(getattr(part, name)) for name in names}
        if _are_same([getattr(part, name) for name in names], new.values()):
            return part
        made = copy.copy(part)
        for name, value in new.items():
            object.__setattr__(made, name, value)  # a frozen dataclass too
        return made

    def _rebind_linear(self, part: Linear) -> Linear:
        matmul = self.rebind(part.matmul)
        old, new = _reader_of(part.matmul), _reader_of(matmul)
        weight = part.weight if old is None or new is None else _prepare_again(old.variant, new.variant, part.weight)
        return Linear(part.range, matmul, weight, part.bias)

    def _rebind_experts(self, part: ExpertsMLP) -> ExpertsMLP:
        moe_mlp = self.rebind(part.moe_mlp)
        old, new = preparing_variant(part.moe_mlp), preparing_variant(moe_mlp)
        gate_up, down = (_prepare_again(old, new, weight) for weight in (part.gate_up, part.down))
        return replace(part, moe_mlp=moe_mlp, gate_up=gate_up, down=down)


def _are_same(old: Any, new: Any) -> bool:
    return all(one is other for one, other in zip(old, new, strict=True))


def _reader_of(matmul: Any) -> Kernel | None:
    """The kernel that reads a linear layer's weight."""
    kernel = matmul.matmul if isinstance(matmul, ScaledMatmul) else matmul
    return kernel if isinstance(kernel, Kernel) else None


def _prepare_again(old: Variant, new: Variant, weight: Any) -> Any:
    """The weight that `old` reads, in the layout that `new` reads."""
    if new.prepare is old.prepare:
        return weight
    if _is_another_layout(old, weight):
        raise SelectionError(
            f"kernels.{new.contract.name}: variant {new.name!r} reads its weights in another layout than {old.name!r}, "
            f"which runs, and the loaded one is gone: swap to a variant of the same layout, or start with {new.name!r}"
        )
    made, _ = prepared(new, weight)
    return made


def _is_another_layout(old: Variant, weight: Any) -> bool:
    """Whether `old` keeps the weight in another layout than checkpoints do. Codes say so by their order; dense weights
    and e4m3 codes have none, and were never changed for it.
    """
    if old.prepare in (interleaved, interleaved_experts):
        return getattr(weight, "order", "sequential") != "sequential"
    return old.prepare is not as_it_is
