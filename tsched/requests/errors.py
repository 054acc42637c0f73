"""How requests fail, each for itself: others go on."""

from __future__ import annotations

from tsched.torch_free import TKernelsError


class RefusedError(TKernelsError, ValueError):
    """A request that could never run to its end here. The message says why."""


class RequestFault(TKernelsError):
    """A request's own logits processor or stopping criterion, or the tokenizer, failed. The message names it."""
