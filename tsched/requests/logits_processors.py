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

from tsched.requests.callbacks import Ints, attribute_failures, describe_callback
from tsched.requests.errors import RequestFault


class LogitsProcessor(Protocol):
    """Maps a request's logits to those that its token is chosen from. It must be a function of its arguments alone: it
    is shared by a request's samples, and it is called for each output token, in their order, once or more: a request
    that gives way to others while its newest token is under way has that token chosen anew when it is back, after the
    same tokens. One that keeps a state must therefore find it by `output.size`, and not count its calls.
    """

    def __call__(self, prompt: Ints, output: Ints, logits: torch.Tensor, /) -> torch.Tensor:
        """prompt [n] and output [m] int64: the tokens so far, read-only; they may be kept and stay as they are.
        logits [V] float64 on the engine's device, this call's own copy: change it or return another. -inf bars a token;
        one at least must stay finite.

        Whatever this raises ends the request, SystemExit too; KeyboardInterrupt does not where it is the user's, that
        is on the main thread: it ends `LLM.generate`.
        """


def process(processors: Sequence[LogitsProcessor], prompt: Ints, output: Ints, logits: torch.Tensor) -> torch.Tensor:
    """`logits` [V] float64, which may change, after all of `processors`, in their order.

    Raises RequestFault, which names the processor, where one raises, or returns no logits of that shape, a NaN, or
    nothing finite to choose from.
    """
    shape, dtype, device = logits.shape, logits.dtype, logits.device  # a processor may change those of `logits` itself
    for processor in processors:
        with attribute_failures("logits processor", processor, output.size) as where:
            processed = processor(prompt, output, logits)
            if not isinstance(processed, torch.Tensor):
                raise RequestFault(f"{where} returned a {type(processed).__name__}, not a tensor of logits")
            is_dense = processed.layout == torch.strided
            if processed.shape != shape or not processed.is_floating_point() or not is_dense:
                raise RequestFault(
                    f"{where} returned {processed.dtype} of shape {list(processed.shape)}, "
                    f"not dense floating-point logits of shape {list(shape)}"
                )
            logits = processed.to(dtype=dtype, device=device)
    highest = float(logits.max())
    if not -torch.inf < highest < torch.inf:
        names = ", ".join(map(describe_callback, processors))
        raise RequestFault(
            f"the logits that {names} left at output token {output.size} have the maximum {highest}: "
            "one of them at least must be finite, and none NaN"
        )
    return logits
