"""How callers' mistakes are told, and how requests fail, each for itself: others go on."""

from __future__ import annotations

from tsched.torch_free import TKernelsError


class ArgumentError(TKernelsError, ValueError):
    """An argument has a value that it cannot have. The message has its name."""


class ArgumentTypeError(TKernelsError, TypeError):
    """An argument has another type than it may have, or there is none of its name."""


class UsageError(TKernelsError, RuntimeError):
    """Something is asked for at the wrong time: of what is in use, closed, or another event loop's."""


class RefusedError(TKernelsError, ValueError):
    """A request that could never run to its end here. The message says why."""


class RequestFault(TKernelsError):
    """A request's own logits processor or stopping criterion, or the tokenizer, failed. The message names it."""
