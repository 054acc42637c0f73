"""What an engine that is not ours is asked to serve, where its time means the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch

from experiments.peers import PEERS
from experiments.serving.requests import Request
from experiments.serving.rounds import Served
from tkernels.errors import TKernelsError


class PeerUnsupportedError(TKernelsError, ValueError):
    """A peer cannot serve this workload in a way that compares."""


class Peer(Protocol):
    """Serves the whole workload once per call, with its settings."""

    @property
    def settings(self) -> Mapping[str, str]: ...

    def __call__(self) -> Served: ...


@dataclass(frozen=True)
class PeerTask:
    """A peer by its name, the model in `directory`, and the workload, of token ids.

    settings: None are those that serve the requests fastest. architectures_from: folders of outside architectures.
    """

    name: str
    directory: Path
    requests: Sequence[Request]
    device: torch.device
    dtype: torch.dtype
    settings: Mapping[str, str] | None = None
    architectures_from: Sequence[Path] = ()


def make_peer(task: PeerTask) -> Peer:
    """The peer, ready to serve.

    Raises PeerUnsupportedError where a token would not depend on the tokens before it alone, or a request comes late.
    """
    for request in task.requests:
        if not (request.params.is_plain and request.params.ends_by_length):
            only = "greedy requests that ask for nothing else and run to their exact length (ignore_eos)"
            raise PeerUnsupportedError(f"only {only} are compared")
        if request.after:
            raise PeerUnsupportedError("only requests that come at once are compared")
    peer: Peer = import_module(PEERS[task.name]).make_peer(task)
    return peer
