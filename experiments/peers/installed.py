"""Why a peer's kernel cannot run here, and what it makes once and keeps: the set-up that other projects ask for."""

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


def needs(package: str | None) -> Callable[[Axes, DeviceFacts], str | None]:
    """`supports` of a peer: its package is installed, the device is CUDA, the dtypes are 16 bits wide.

    Args:
        package: the module's name; None for torch itself.
    """

    def supports(axes: Axes, device: DeviceFacts) -> str | None:
        if package is not None and importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if not device.arch.startswith("sm_"):
            return "it is for NVIDIA GPUs"
        if axes.get("activation") not in ("float16", "bfloat16"):
            return f"it takes float16 and bfloat16, not {axes.get('activation')}"
        return None

    return supports


def elementwise_peer(package: str, function: Callable[..., Any]) -> Variant:
    """The variant that is another project's kernel for a norm or an activation, of tensors as they are."""
    return Variant(wins="a peer", function=function, supports=needs(package), deterministic=True, batch_invariant=False)


@dataclass
class MadeOnce(Generic[Made]):
    """Keeps what a peer makes of a call's arguments before its kernel can run, for the calls that were seen last.

    A timed call finds its own here; whoever compares must read the first call's time for what making it costs.
    """

    most: int = 64
    _kept: OrderedDict[Any, tuple[Made, Any]] = field(default_factory=OrderedDict)

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
