"""FlashInfer's attention over the same pages: its wrappers plan once for a call's tables and lengths, and then run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from experiments.peers.variants import MadeOnce

_WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends
_workspaces: dict[torch.device, torch.Tensor] = {}
_planned: MadeOnce[Any] = MadeOnce()


@dataclass(frozen=True)
class Pages:
    """A paged cache as FlashInfer sees it: indptr [B+1], indices [pages] and last_page_len [B], all int32, on the
    cache's device.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @staticmethod
    def of(block_tables: torch.Tensor, context_lens: torch.Tensor, page_size: int) -> "Pages":
        """From block tables [B, N] and context lengths [B] of at least one token."""
        counts = (context_lens + page_size - 1) // page_size  # [B]
        live = torch.arange(block_tables.shape[1], device=block_tables.device) < counts[:, None]  # [B, N]
        indptr = torch.zeros(len(context_lens) + 1, dtype=torch.int32, device=block_tables.device)
        indptr[1:] = counts.cumsum(0)
        return Pages(indptr, block_tables[live].contiguous(), (context_lens - 1) % page_size + 1)


def attend(
    make_wrapper: Callable[[torch.Tensor], Any],
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *starts: torch.Tensor,
    **options: Any,
) -> Any:
    """Runs a wrapper that was planned for these tensors.

    Args:
        make_wrapper: Given the workspace.
        q, caches, block_tables, context_lens, scale: The op's.
        starts: What its plan takes before the pages: a prefill's cu_seqlens_q.
        options: That its plan takes besides.
    """

    def planned() -> Any:
        (_, heads, dim), (_, page_size, heads_kv, _) = q.shape, caches[0].shape
        pages = Pages.of(block_tables, context_lens, page_size)
        wrapper = make_wrapper(_workspace(q.device))
        wrapper.plan(
            *starts, pages.indptr, pages.indices, pages.last_page_len, heads, heads_kv, dim, page_size,
            sm_scale=scale, q_data_type=q.dtype, kv_data_type=caches[0].dtype, **options,
        )  # fmt: skip
        return wrapper

    # The queries tell sets of data apart that share a table's address in turn.
    made_of = {"k_cache": caches[0], "block_tables": block_tables, "context_lens": context_lens, "q": q}
    return _planned.get({**made_of, "starts": starts[0] if starts else None}, planned).run(q, caches)


def _workspace(device: torch.device) -> torch.Tensor:
    """One for all wrappers: they run one after the other."""
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device]
