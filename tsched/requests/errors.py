"""How requests fail, each for itself: others go on."""

from __future__ import annotations


class RefusedError(ValueError):
    """A request that could never run to its end here. The message says why."""


class RequestFault(Exception):
    """A request's own logits processor or stopping criterion, or the tokenizer, failed. The message names it."""
