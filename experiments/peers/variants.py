"""What the variants of other projects share: why one cannot run here, and what it makes once and keeps."""

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.variant import Variant

Made = TypeVar("Made")
Supports = Callable[[Axes, DeviceFacts], str | None]


def peer_variant(package: str | None, function: Callable[..., Any], **facts: Any) -> Variant:
    """The variant that is another project's kernel, for 16-bit tensors on a GPU of NVIDIA.

    Args:
        package: The module that has to be installed; None for torch itself.
        function: With the op's signature.
        facts: Of the `Variant`. `supports` refuses what the kernel does not take besides. What is not said is claimed
            to be neither deterministic nor batch-invariant.
    """
    more: Supports = facts.pop("supports", lambda axes, device: None)

    def supports(axes: Axes, device: DeviceFacts) -> str | None:
        if package is not None and importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if not device.arch.startswith("sm_"):
            return "it is for NVIDIA GPUs"
        dtype = axes.get("activation", axes.get("out"))  # of an op on codes it is the result's
        if dtype not in ("float16", "bfloat16"):
            return f"it takes float16 and bfloat16, not {dtype}"
        return more(axes, device)

    usual = {"wins": "a peer", "deterministic": False, "batch_invariant": False}
    return Variant(**{**usual, **facts}, function=function, supports=supports)


def refuse_other_codes(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a peer that reads nothing but 4-bit codes, each input at its own place, cannot take this weight."""
    if axes.get("bits", 4) != 4 or axes.get("coding", "uniform") != "uniform":
        return f"it reads uniform codes of 4 bits, not {axes.get('coding', 'uniform')} ones of {axes.get('bits', 4)}"
    for kind in ("permuted", "sparse"):
        if axes.get(kind, False):
            return f"it reads no {kind} weight"
    return None


def forget_made() -> None:
    """Frees what peers keep of the calls that were: gigabytes, on a device that something else is measured on next."""
    for keeper in _keepers:
        keeper.forget()


_keepers: list["MadeOnce[Any]"] = []


@dataclass
class MadeOnce(Generic[Made]):
    """Keeps what a peer makes of a call's arguments before its kernel can run, for the calls that were seen last.

    A timed call finds its own here; whoever compares must read the first call's time for what making it costs.
    """

    most: int = 64
    _kept: OrderedDict[Any, tuple[Made, Any]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        _keepers.append(self)

    def get(self, arguments: Mapping[str, Any], make: Callable[[], Made]) -> Made:
        """What `make` returned for these very tensors, unless one was written since."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        key = tuple((n, t.data_ptr(), t._version, t.shape, t.stride(), t.dtype) for n, t in tensors.items())
        if key not in self._kept:
            # The tensors are kept too: a freed one's address would be another's.
            self._kept[key] = (make(), tensors)
            if len(self._kept) > self.most:
                self._kept.popitem(last=False)
        return self._kept[key][0]

    def forget(self) -> None:
        """Keeps nothing any longer."""
        self._kept.clear()
