"""FlashInfer's view of a paged cache, and the workspace that its wrappers share."""

from dataclasses import dataclass
from typing import Any

import torch

_WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends
_workspaces: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True)
class Pages:
    """indptr [B+1], indices [pages] and last_page_len [B], all int32, on the cache's device."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @staticmethod
    def of(arguments: dict[str, Any]) -> "Pages":
        """From block tables and context lengths."""
        tables, lengths = arguments["block_tables"], arguments["context_lens"]
        page = arguments["k_cache"].shape[1]
        counts = (lengths + page - 1) // page  # [B]
        live = torch.arange(tables.shape[1], device=tables.device) < counts[:, None]  # [B, N]
        indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=tables.device)
        indptr[1:] = counts.cumsum(0)
        return Pages(indptr, tables[live].contiguous(), (lengths - 1) % page + 1)


def workspace(device: torch.device) -> torch.Tensor:
    """One for all wrappers: they run one after the other."""
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device]
