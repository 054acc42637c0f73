"""A step's tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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
        faults: Entry -> why its logits processors failed.
    """

    token_ids: Ints
    all_chosen: bool
    logprobs: dict[int, TokenLogprobs]
    faults: dict[int, str]


Readback = Callable[[], Outcome]  # waits for the copy and returns its result


class HostReader:
    """Copies sampled tokens to the host.

    On a GPU copies run on a stream of their own into pinned memory, so neither they nor the next step wait for each
    other. On a CPU there is nothing to copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, sampled: Sampled) -> Readback:
        """Starts a copy, which begins once the device has computed `sampled`. The call does not wait."""
        wait = self._copy(_list_tensors(sampled))
        return lambda: _make_outcome(sampled, wait())

    def start_prompts(self, scored: ScoredPrompts) -> Callable[[], None]:
        """The same for the scores of prompts. The result waits for the copy and stores them."""
        wait = self._copy(list(scored.tensors))
        return lambda: scored.store(wait())

    def _copy(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Starts to copy `tensors` to the host. The result waits for the copies and returns them."""
        if self._stream is None:
            return lambda: tensors
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [_pinned_copy(tensor, self._stream) for tensor in tensors]
            done = torch.cuda.Event()
            done.record(self._stream)

        def wait() -> list[torch.Tensor]:
            done.synchronize()
            return copies

        return wait


def _pinned_copy(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)  # the allocator reuses its memory only after the copy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _list_tensors(sampled: Sampled) -> list[torch.Tensor]:
    return [sampled.token_ids, *(() if sampled.logprobs is None else sampled.logprobs.tensors)]


def _make_outcome(sampled: Sampled, tensors: list[torch.Tensor]) -> Outcome:
    token_ids: Ints = tensors[0].numpy()
    logprobs: dict[int, TokenLogprobs] = {}
    if sampled.logprobs is not None:
        raw = sampled.logprobs
        columns = (tensor.tolist() for tensor in tensors[1:])
        for entry, n, chosen, rank, values, ids in zip(raw.entries, raw.num_top, *columns, strict=True):
            token, n = int(token_ids[entry]), min(n, len(ids))
            logprobs[entry] = TokenLogprobs([token, *ids[:n]], [chosen, *values[:n]], [rank, *range(1, n + 1)])
    return Outcome(token_ids, int(token_ids.min(initial=0)) == 0, logprobs, sampled.faults)
