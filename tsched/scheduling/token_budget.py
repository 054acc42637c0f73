"""How a step's tokens are shared among decodes and prefills (chunked prefill: Sarathi-Serve, arXiv 2403.02310)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tsched.requests.errors import ArgumentError
from tsched.scheduling.sequence import Ints


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Rows with one token to compute are decodes and come first, so that no prefill delays them.

    num_tokens        tokens a step
    max_chunk_tokens  of one sequence's prefill in a step; None is no bound of its own
    decode_share      in [0, 1), of num_tokens: prefills may not take it while decodes run
    chunked           False: a prompt is computed whole in one step, and decodes get what the step's prompts leave;
                      after a step that left some of them out they go first, so that they advance in every second step
    """

    num_tokens: int
    max_chunk_tokens: int | None
    decode_share: float
    chunked: bool

    def check(self, max_model_len: int) -> None:
        """ArgumentError where the options do not go together."""
        if self.chunked:
            return
        if self.max_chunk_tokens is not None or self.decode_share:
            raise ArgumentError("max_chunk_tokens and decode_share divide prompts: they need chunked_prefill")
        if self.num_tokens < max_model_len:
            raise ArgumentError(
                f"without chunked_prefill a step must hold the longest prompt: max_num_batched_tokens must be at "
                f"least max_model_len, {max_model_len}, got {self.num_tokens}"
            )

    @property
    def chunk(self) -> int:
        """The most tokens of one prefill in a step."""
        return self.num_tokens if self.max_chunk_tokens is None else min(self.max_chunk_tokens, self.num_tokens)

    def share(self, wanted: Ints) -> tuple[Ints, int, int]:
        """What each row gets of the `wanted` [n] >= 0 tokens, the first rows first; the tokens that are left of the
        step; and how many of those prefills may take.
        """
        if wanted.size == 0:
            return wanted, self.num_tokens, self.num_tokens
        if wanted.size <= self.num_tokens and np.count_nonzero(wanted > 1) == 0:
            return wanted, *self._left(int(np.count_nonzero(wanted)), 0)
        decodes = wanted == 1
        num_decodes = min(int(np.count_nonzero(decodes)), self.num_tokens)
        counts = np.where(decodes & (np.cumsum(decodes) <= self.num_tokens), 1, 0)  # [n]
        prefills = np.flatnonzero(wanted > 1)
        if prefills.size:
            pieces = np.minimum(wanted[prefills], self.chunk)
            _, room = self._left(num_decodes, 0)
            counts[prefills] = np.clip(room - (np.cumsum(pieces) - pieces), 0, pieces)
        return counts, *self._left(num_decodes, int(counts.sum()) - num_decodes)

    def _left(self, num_decodes: int, num_prefill: int) -> tuple[int, int]:
        """Tokens left in the step, and those of them that prefills may take."""
        left = self.num_tokens - num_decodes - num_prefill
        kept_back = int(self.decode_share * self.num_tokens) if num_decodes else 0
        return left, max(0, min(left, self.num_tokens - kept_back - num_prefill))

    def after_prompts(self, counts: Ints, num_prompt_tokens: int) -> Ints:
        """`counts` [n] of running rows, cut to what `num_prompt_tokens` leave of the step, the first rows first."""
        room = self.num_tokens - num_prompt_tokens
        before = np.cumsum(counts) - counts
        return np.clip(room - before, 0, counts)
