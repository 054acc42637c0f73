"""What a request may do to its logits before a token is chosen: a small protocol for the user's own code.

class Bar:
    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, prompt, output, logits):
        logits[self.token_id] = -torch.inf
        return logits

SamplingParams(logits_processors=[Bar(7)])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tsched.sequence import Ints


class LogitsProcessor(Protocol):
    """Maps a request's logits to those that its token is chosen from. It must be a function of its arguments alone:
    it is shared by a request's samples, and it is called once for each output token, in their order.
    """

    def __call__(self, prompt: Ints, output: Ints, logits: torch.Tensor, /) -> torch.Tensor:
        """prompt [n] and output [m] int64: the tokens so far, read-only. logits [V] float64 on the engine's device,
        this request's own copy: change it or return another. -inf bars a token; one at least must stay finite.
        """


class RequestFault(Exception):
    """A logits processor or a stopping criterion failed; the message names it. It ends that request and no other."""


def name_of(callback: object) -> str:
    """A function's name, or the class of any other object."""
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))


def process(processors: Sequence[LogitsProcessor], prompt: Ints, output: Ints, logits: torch.Tensor) -> torch.Tensor:
    """`logits` [V] float64, which may change, after all of `processors`, in their order.

    Raises RequestFault, which names the processor, where one raises, or returns no logits of that shape, a NaN, or
    nothing finite to choose from.
    """
    for processor in processors:
        where = f"logits processor {name_of(processor)} at output token {output.size}"
        try:
            processed = processor(prompt, output, logits)
        except Exception as error:
            raise RequestFault(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(processed, torch.Tensor):
            raise RequestFault(f"{where} returned a {type(processed).__name__}, not a tensor of logits")
        if processed.shape != logits.shape or not processed.is_floating_point():
            raise RequestFault(
                f"{where} returned {processed.dtype} of shape {list(processed.shape)}, "
                f"not floating-point logits of shape {list(logits.shape)}"
            )
        logits = processed.to(logits)
    highest = float(logits.max())
    if not -torch.inf < highest < torch.inf:
        names = ", ".join(name_of(processor) for processor in processors)
        raise RequestFault(
            f"the logits that {names} left at output token {output.size} have the maximum {highest}: "
            "one of them at least must be finite, and none NaN"
        )
    return logits
