"""The scratch memory of a launch: what a variant asks for, and the zeroed buffers that are kept from call to call."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch memory that a variant asks for: uninitialized and one call long, or `zeroed`.

    A zeroed buffer is zero when a launch begins and the launch leaves it at zero again, so that it needs no launch of
    its own to clear it: counters by which programs find out who is last. It is kept from call to call: see
    ZeroedBuffers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False


class ZeroedBuffers:
    """The zeroed buffers of one variant: one per name, device, stream and shape, at the same address for good.

    Launches of one stream run one after the other, so they can share a buffer that each leaves at zero; those of two
    streams cannot. All captures of CUDA graphs share one of their own, made beside the first eager one, because
    memory allocated during a capture would be cleared by that graph's replays alone. Two such graphs must not be
    replayed at once.

    Args:
        cuda: The module torch.cuda, or what behaves as it does.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def buffer(self, name: str, buffer: Buffer, device: torch.device) -> torch.Tensor:
        """The memory of any buffer for a launch now: what is not zeroed is new."""
        if buffer.zeroed:
            return self.take(name, buffer, device)
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)

    def take(self, name: str, buffer: Buffer, device: torch.device) -> torch.Tensor:
        """A zeroed buffer for a launch now.

        Raises:
            RuntimeError: A capture asks for a buffer that no launch before it has used.
        """
        place = (name, device, buffer.shape, buffer.dtype)
        if device.type != "cuda":
            return self._keep((*place, 0), buffer, device)
        capturing = self._cuda.is_current_stream_capturing()
        if capturing and (*place, "capture") not in self._kept:
            raise RuntimeError(
                f"workspace {name!r} {list(buffer.shape)} is not there yet: launch once before the capture"
            )
        if capturing:
            return self._kept[*place, "capture"]
        self._keep((*place, "capture"), buffer, device)
        return self._keep((*place, self._cuda.current_stream(device).cuda_stream), buffer, device)

    def _keep(self, key: tuple[Any, ...], buffer: Buffer, device: torch.device) -> torch.Tensor:
        found = self._kept.get(key)
        if found is None:
            with torch.inference_mode(False):  # or a launch that fails outside that mode could not clear it
                found = self._kept[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        return found

    def not_zero(self) -> list[str]:
        """Names of the buffers that some launch did not leave at zero. Waits for the device."""
        return sorted({key[0] for key, tensor in self._kept.items() if tensor.device.type != "meta" and tensor.any()})

    def clear(self) -> None:
        """Writes zeros again, after a launch that failed."""
        for tensor in self._kept.values():
            tensor.zero_()
