"""The bytes that interpreted kernels pass, counted at every load and store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from tkernels.inputs import whole_storage
from tkernels.interpreter.accesses import watch_accesses


@contextmanager
def count_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[Counter[tuple[str, str]]]:
    """Counts what is passed while the context is open: (name of a tensor, or "other"; "load" or "store") -> bytes."""
    places = {}
    for name, tensor in tensors.items():
        whole = whole_storage(tensor, torch.uint8)
        places[name] = (whole.data_ptr(), whole.data_ptr() + whole.numel())
    passed: Counter[tuple[str, str]] = Counter()

    def note(addresses: np.ndarray, mask: np.ndarray, width: int, access: str) -> None:
        shape = np.broadcast_shapes(addresses.shape, mask.shape)
        mine = np.broadcast_to(addresses, shape)[np.broadcast_to(mask.astype(bool), shape)]  # some masks are bytes
        left = mine.size
        for name, (first, end) in places.items():
            count = int(((mine >= first) & (mine < end)).sum())
            passed[name, access] += width * count
            left -= count
        passed["other", access] += width * left

    with watch_accesses(note):
        yield passed
