"""A step's tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from tkernels.runtime import Runtime
from tsched.execution.prompt_logprobs import ScoredPrompts
from tsched.execution.sampler import Sampled, TokenLogprobs
from tsched.scheduling.sequence import Ints


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's sampled tokens, on the host.

    Attributes:
        token_ids: [m] int64, below 0 where there is none.
        all_chosen: No token is below 0.
        logprobs: Entry -> its log-probabilities, for requests that ask for them.
        faults: Entry -> why its logits processors failed, or it may not share the prefix that it was to share.
    """

    token_ids: Ints
    all_chosen: bool
    logprobs: dict[int, TokenLogprobs]
    faults: dict[int, str]

    def failing(self, faults: Mapping[int, str], sampled_rows: Ints) -> Outcome:
        """The same without a token for rows with `faults`, by row; `sampled_rows` [m] are the tokens'."""
        if not faults:
            return self
        rows = enumerate(sampled_rows.tolist())
        entries = {entry: faults[row] for entry, row in rows if row in faults}
        token_ids = self.token_ids.copy()
        token_ids[list(entries)] = -1
        return replace(self, token_ids=token_ids, all_chosen=False, faults={**self.faults, **entries})


Readback = Callable[[], Outcome]  # waits for the copy and returns its result


class HostReader:
    """Copies sampled tokens to the host, as the `runtime` of their device does it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def start(self, sampled: Sampled) -> Readback:
        """Starts a copy, which begins once the device has computed `sampled`. The call does not wait."""
        wait = self._runtime.start_reading(_list_tensors(sampled))
        return lambda: _make_outcome(sampled, wait())

    def start_prompts(self, scored: ScoredPrompts) -> Callable[[], None]:
        """The same for the scores of prompts. The result waits for the copy and stores them."""
        wait = self._runtime.start_reading(scored.tensors)
        return lambda: scored.store(wait())


def _list_tensors(sampled: Sampled) -> list[torch.Tensor]:
    return [sampled.token_ids, *(() if sampled.logprobs is None else sampled.logprobs.tensors)]


def _make_outcome(sampled: Sampled, tensors: list[torch.Tensor]) -> Outcome:
    token_ids: Ints = tensors[0].numpy()
    logprobs: dict[int, TokenLogprobs] = {}
    if sampled.logprobs is not None:
        raw = sampled.logprobs
        columns = (tensor.tolist() for tensor in tensors[1:])
        for entry, n, chosen, rank, ids, values in zip(raw.entries, raw.num_top, *columns, strict=True):
            token, n = int(token_ids[entry]), min(n, len(ids))
            logprobs[entry] = TokenLogprobs([token, *ids[:n]], [chosen, *values[:n]], [rank, *range(1, n + 1)])
    return Outcome(token_ids, int(token_ids.min(initial=0)) == 0, logprobs, sampled.faults)
