"""What may end a request besides tokens, strings and lengths: a small protocol for the user's own code.

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
    """Says whether an output is to end. It must be a function of its arguments alone: it is shared by a request's
    samples, and it is asked once for each output token past the first min_tokens, in their order.
    """

    def __call__(self, prompt: Ints, output: Ints, /) -> bool:
        """prompt [n] and output [m] int64, m >= 1: the tokens so far, read-only; they may be kept and stay as they are.
        True ends the output with its last token and the finish_reason "stop". What this raises ends the request, as it
        does in a LogitsProcessor.
        """


def is_met(criteria: Sequence[StoppingCriterion], prompt: Ints, output: Ints) -> bool:
    """Whether one of `criteria` ends the output.

    Raises RequestFault, which names the criterion, where one raises or answers neither True nor False.
    """
    for criterion in criteria:
        with attribute_failures("stopping criterion", criterion, output.size - 1) as where:
            answer = criterion(prompt, output)
            if not isinstance(answer, (bool, np.bool_)):
                raise RequestFault(f"{where} answered {answer!r}, which is neither True nor False")
            if answer:
                return True
    return False
