"""Pages of simulated devices and of their hosts, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsched.scheduling.block_pool import BlockIds


@dataclass(frozen=True)
class ArrayPages:
    """Moves what is in `device` [num_blocks, ...] and in `host` [num_host_blocks, ...], in the order of the calls."""

    device: NDArray[Any]
    host: NDArray[Any]

    def swap_out(self, pages: BlockIds) -> None:
        _move(self.device, self.host, pages)

    def swap_in(self, pages: BlockIds) -> None:
        _move(self.host, self.device, pages)

    def copy(self, pages: BlockIds) -> None:
        assert not np.isin(pages[0], pages[1]).any(), "a page is copied to and from"
        _move(self.device, self.device, pages)


def _move(source: NDArray[Any], target: NDArray[Any], pages: BlockIds) -> None:
    assert np.unique(pages[1]).size == pages.shape[1], "two pages are copied to one place"
    target[pages[1]] = source[pages[0]]
