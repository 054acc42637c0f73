"""Serving without a KV cache: for every token the whole sequence again, through the same engine, weights and kernels.

Each token of each request is a request of its own, for one token after all that came before; nothing of it is kept. All
requests that go on are in one call, so that their prompts share steps, as the engine's own prefills do. What a call
writes into the engine's pages is read by that call alone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.peers.serving import PeerTask
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
            tokens = self._next_tokens(going, outputs)
            now = time.perf_counter() - start
            for i, token_ids in zip(going, tokens, strict=True):
                outputs[i] += token_ids
                moments[i].append(now)
        seconds = time.perf_counter() - start
        prompt_tokens = sum(len(request.prompt) for request in self.requests)
        return Served(tuple(map(tuple, outputs)), prompt_tokens, seconds, tuple(map(tuple, moments)))

    def _next_tokens(self, going: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[list[int]]:
        """The next token of each request that goes on, from all that came before it."""
        known = [[*self.requests[i].prompt, *outputs[i]] for i in going]
        params = [replace(self.requests[i].params, max_tokens=1) for i in going]
        found = self.llm.generate(known, params, use_tqdm=False)
        for one in found:
            if one.error is not None:
                raise RuntimeError(one.error)
        return [one.outputs[0].token_ids for one in found]


def make_peer(task: PeerTask) -> RecomputingPeer:
    """The peer, with the default kernels; it has no settings to choose from."""
    llm = LLM(
        task.directory,
        device=task.device,
        dtype=task.dtype,
        max_num_seqs=len(task.requests),
        max_model_len=max(len(request.prompt) + int(request.params.max_tokens or 0) for request in task.requests),
        prefix_cache="none",
        architectures_from=task.architectures_from,
    )
    return RecomputingPeer(llm, tuple(task.requests))
