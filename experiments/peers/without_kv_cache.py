"""Serving without a KV cache: for every token the whole sequence again, through the same engine, weights and kernels.

Each token of each request is a request of its own, for one token after all that came before; nothing of it is kept. All
requests that go on are in one call, so that their prompts share steps, as the engine's own prefills do. What a call
writes into the engine's pages is read by that call alone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experiments.peers.comparable import check_comparable
from experiments.serving.requests import Request
from experiments.serving.rounds import Served
from tsched import LLM


@dataclass(frozen=True)
class RecomputingPeer:
    """An engine that forgets; calling it serves the whole workload once."""

    llm: LLM
    requests: tuple[Request, ...]

    @property
    def settings(self) -> Mapping[str, str]:
        return {"kv_cache": "none"}

    def __call__(self) -> Served:
        start = time.perf_counter()
        outputs: list[list[int]] = [[] for _ in self.requests]
        moments: list[list[float]] = [[] for _ in self.requests]
        wanted = [int(request.params.max_tokens or 0) for request in self.requests]
        while going := [i for i, output in enumerate(outputs) if len(output) < wanted[i]]:
            known = [[*self.requests[i].prompt, *outputs[i]] for i in going]
            params = [replace(self.requests[i].params, max_tokens=1) for i in going]
            found = self.llm.generate(known, params, progress=False)
            now = time.perf_counter() - start
            for i, one in zip(going, found, strict=True):
                if one.error is not None:
                    raise RuntimeError(one.error)
                outputs[i] += one.outputs[0].token_ids
                moments[i].append(now)
        seconds = time.perf_counter() - start
        prompt_tokens = sum(len(request.prompt) for request in self.requests)
        return Served(tuple(map(tuple, outputs)), prompt_tokens, seconds, tuple(map(tuple, moments)))


def make_peer(
    name: str,
    directory: Path,
    requests: Sequence[Request],
    device: torch.device,
    dtype: torch.dtype,
    settings: Mapping[str, str] | None = None,
    architectures_from: Sequence[Path] = (),
) -> RecomputingPeer:
    """The peer for `requests` (token ids) with the default kernels; it has no settings to choose from.

    Raises PeerUnsupportedError where a token would not depend on the tokens before it alone, or a request comes late.
    """
    check_comparable(requests)
    longest = max(len(request.prompt) + int(request.params.max_tokens or 0) for request in requests)
    llm = LLM(
        directory,
        device=device,
        dtype=dtype,
        max_num_seqs=len(requests),
        max_model_len=longest,
        prefix_cache="none",
        architectures_from=architectures_from,
    )
    return RecomputingPeer(llm, tuple(requests))
