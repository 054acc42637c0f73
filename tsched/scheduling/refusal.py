"""Who is turned away at the door: what could never run to its end must not block the queue for ever."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.window import Window


def find_max_length(
    prompt_len: int, params: SamplingParams, pool: BlockPool, max_model_len: int, window: Window | None = None
) -> int:
    """The tokens, prompt and output together, at which a request ends at the latest.

    Without a max_tokens it may run to what max_model_len and the whole pool allow; with a `window` that fits into the
    pool, its length asks for no more blocks. RefusedError where it could never run to its end, alone in the whole
    `pool`.
    """
    if prompt_len < 1:
        raise RefusedError("the prompt is empty: there is no token to go on from")
    if prompt_len >= max_model_len:
        raise RefusedError(
            f"the prompt has {prompt_len} tokens, max_model_len is {max_model_len} for prompt and output "
            f"together: a prompt may have {max_model_len - 1} at most"
        )
    if params.max_tokens is not None:
        longest = prompt_len + max(1, params.max_tokens)  # with 0, its step brings a token that is dropped
    elif window is not None and window.least_blocks <= pool.num_blocks:
        longest = max_model_len
    else:
        longest = max(prompt_len, pool.num_blocks * pool.block_size) + 1
    longest = min(longest, max_model_len)
    needed = pool.blocks_for(longest - 1)  # the last token is never fed back
    if window is not None:
        needed = min(needed, window.least_blocks)
    if needed > pool.num_blocks:
        raise RefusedError(
            f"a prompt of {prompt_len} tokens and an output up to {longest} in all need {needed} blocks of "
            f"{pool.block_size} tokens, the pool has {pool.num_blocks}"
        )
    return longest


def as_token_ids(prompt: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """`prompt` [n] as int64; RefusedError where it is anything else than one list of integers."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], bool):
        try:  # a third of the time that numpy takes to find out what the list is
            return np.frombuffer(struct.pack(f"{len(prompt)}q", *prompt), np.int64)
        except struct.error:
            pass  # numpy says what it is
    found = np.asarray(prompt) if len(prompt) else np.empty(0, dtype=np.int64)
    is_wide = found.dtype == np.uint64 and bool((found >> 63).any())
    if found.ndim != 1 or found.dtype.kind not in "iu" or is_wide:
        raise RefusedError(
            f"a prompt must be token ids, integers below 2**63, got {found.dtype} of {list(found.shape)}"
        )
    return found.astype(np.int64, copy=False)
