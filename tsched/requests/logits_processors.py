"""Logits processors: a small protocol for user code that changes a request's logits before a token is chosen.

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
    """Maps a request's logits to those that its token is chosen from.

    It must be a function of its arguments alone, because a request's samples share it. The engine calls it for each
    output token in order, once or more: a request that is preempted while its newest token is in flight chooses that
    token again later, after the same tokens. So a processor with state must look it up by `output.size` and not count
    its calls.
    """

    def __call__(self, prompt: Ints, output: Ints, logits: torch.Tensor, /) -> torch.Tensor:
        """Changes the logits of the next token.

        Whatever it raises ends the request, SystemExit too. Only a KeyboardInterrupt on the main thread is the user's:
        it ends `LLM.generate`.

        Args:
            prompt: [n] int64, read-only. It never changes and may be kept.
            output: [m] int64, the same for the output's tokens so far.
            logits: [V] float32 on the engine's device, or float64 if that is the model's dtype; a copy for this call.

        Returns:
            [V] floating, `logits` itself or another tensor. -inf bars a token; one at least must stay finite.
        """


def apply_processors(
    processors: Sequence[LogitsProcessor], prompt: Ints, output: Ints, logits: torch.Tensor
) -> torch.Tensor:
    """Calls all processors in order.

    Args:
        processors: Those of the request.
        prompt: [n] int64, its tokens.
        output: [m] int64, its tokens.
        logits: [V], which processors may change.

    Returns:
        [V] in the dtype and on the device of `logits`.

    Raises:
        RequestFault: One raised or returned no logits of that shape, or together they left a NaN or nothing finite.
            The message names them.
    """
    shape, dtype, device = logits.shape, logits.dtype, logits.device  # a processor may change `logits` in place
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
