"""transformers' `generate` on the same checkpoint: one request at a time, or all of them in one left-padded batch.

Which attention implementation and which cache serve it fastest differs by machine and mode, so every pair is tried on
the workload itself, and the fastest is the peer.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.peers.serving import PeerTask
from experiments.serving.requests import Request
from experiments.serving.rounds import Served, Server
from tmodel.json_files import read_json

ATTENTION = ("sdpa", "eager")
CACHES = ("dynamic", "static")

_TRIALS = 3
_NEAR = 1.5
"""Settings that take longer than that many times the fastest's first trial are not tried again. One trial of each chose
settings whose tokens per second were a fifth below the best, on a CPU with one thread.
"""


@dataclass(frozen=True)
class TransformersPeer:
    """A loaded model and how it is driven; calling it serves the whole workload once."""

    model: Any
    requests: tuple[Request, ...]
    batched: bool
    cache: str
    attention: str

    @property
    def settings(self) -> Mapping[str, str]:
        return {"attention": self.attention, "cache": self.cache}

    def __call__(self) -> Served:
        groups = [self.requests] if self.batched else [(request,) for request in self.requests]
        start = time.perf_counter()
        tokens = [row for group in groups for row in self._generate(group)]
        seconds = time.perf_counter() - start
        # One-at-a-time requests wait for one another and generate() hands out nothing before its end: no first token.
        return Served(tuple(tokens), sum(len(request.prompt) for request in self.requests), seconds, None)

    @torch.inference_mode()
    def _generate(self, group: Sequence[Request]) -> list[tuple[int, ...]]:
        """Each request's own tokens: what a padded batch generates past a request's length is nobody's."""
        lengths = [int(request.params.max_tokens or 0) for request in group]
        width = max(len(request.prompt) for request in group)
        ids = torch.zeros(len(group), width, dtype=torch.int64)  # [B, width], padding on the left
        mask = torch.zeros_like(ids)
        for row, request in enumerate(group):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        device = self.model.device
        out = self.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            cache_implementation="static" if self.cache == "static" else None,
        )
        generated = out[:, width:].tolist()
        return [tuple(row[:length]) for row, length in zip(generated, lengths, strict=True)]


def make_peer(task: PeerTask) -> TransformersPeer:
    """The peer. It has the architectures that transformers has."""
    batched, requests = task.name == "transformers_batched", tuple(task.requests)
    if task.settings is not None:
        attention = task.settings["attention"]
        model = load_transformers(task.directory, attention, task.device, task.dtype)
        return TransformersPeer(model, requests, batched, task.settings["cache"], attention)
    candidates = []
    for attention in _attentions_of(task.directory):
        model = load_transformers(task.directory, attention, task.device, task.dtype)
        for cache in CACHES:
            peer = TransformersPeer(model, requests, batched, cache, attention)
            # Whatever is made on first use is made here: by the whole batch, or by one of the single requests.
            (peer if batched else replace(peer, requests=requests[:1]))()
            candidates.append(peer)
    return candidates[fastest(candidates)]


def fastest(candidates: Sequence[Server]) -> int:
    """The index of the one whose seconds have the lowest median, over trials that take turns."""
    trials = [[one().seconds] for one in candidates]
    most = _NEAR * min(first for (first,) in trials)
    near = [index for index, (first,) in enumerate(trials) if first <= most]
    for _ in range(_TRIALS - 1 if len(near) > 1 else 0):
        for index in near:
            trials[index].append(candidates[index]().seconds)
    return min(near, key=lambda index: statistics.median(trials[index]))


def _attentions_of(directory: Path) -> tuple[str, ...]:
    """Those of ATTENTION that transformers has for a checkpoint's architecture: none with sinks has sdpa."""
    import transformers

    (name,) = read_json(directory / "config.json")["architectures"]
    return ATTENTION if getattr(transformers, name)._supports_sdpa else ("eager",)


def load_transformers(directory: Path, attention: str | None, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of a checkpoint, with one of its attention implementations; None is its own choice."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, use_safetensors=True, local_files_only=True,
        trust_remote_code=False,  # else it asks at the terminal
    )  # fmt: skip
    # The lengths are exact: no end-of-sequence token may cut one short.
    model.generation_config.eos_token_id = None
    return model.to(device).eval()
