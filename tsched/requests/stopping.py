"""Stopping criteria: a small protocol for user code that ends a request.

class Repeats:
    def __call__(self, prompt, output):
        return output.size >= 3 and len(set(output[-3:].tolist())) == 1

SamplingParams(stopping_criteria=[Repeats()])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tsched.requests.callbacks import Ints, attribute_failures
from tsched.requests.errors import RequestFault


class StoppingCriterion(Protocol):
    """Decides whether an output ends.

    It must be a function of its arguments alone, because a request's samples share it. The engine calls it once for
    each output token after the first min_tokens, in order.
    """

    def __call__(self, prompt: Ints, output: Ints, /) -> bool:
        """Decides whether the output ends here. Whatever it raises ends the request, as in a LogitsProcessor.

        Args:
            prompt: [n] int64, read-only. It never changes and may be kept.
            output: [m] int64, m >= 1, the same for the output's tokens so far.

        Returns:
            True ends the output with its last token and the finish_reason "stop".
        """


def should_stop(criteria: Sequence[StoppingCriterion], prompt: Ints, output: Ints) -> bool:
    """Asks all criteria whether the output ends.

    Args:
        criteria: Those of the request.
        prompt: [n] int64, its tokens.
        output: [m] int64, its tokens.

    Returns:
        Whether one of them returned True.

    Raises:
        RequestFault: One raised, or returned neither True nor False. The message names it.
    """
    for criterion in criteria:
        with attribute_failures("stopping criterion", criterion, output.size - 1) as where:
            answer = criterion(prompt, output)
            if not isinstance(answer, (bool, np.bool_)):
                raise RequestFault(f"{where} answered {answer!r}, which is neither True nor False")
            if answer:
                return True
    return False
