"""Calling foreign code for one request, a user's callback or the tokenizer: its failure is that request's alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tsched.requests.errors import RequestFault

Ints = NDArray[np.int64]
"""The tokens of a request as its logits processors and stopping criteria see them."""


@contextmanager
def attribute_failures(what: str, callback: object, place: int) -> Iterator[str]:
    """Turns whatever the body raises, which calls `callback` and reads its answer, into a RequestFault.

    Reading an answer runs its code too, and none of it may end the requests of others.

    Args:
        what: The kind of callback.
        callback: Whose code the body runs.
        place: The index of the output token that it runs for.

    Yields:
        The words that name it and its place.

    Raises:
        RequestFault: The body raised. A KeyboardInterrupt on the main thread is the user's and passes through.
    """
    where = f"{what} {describe_callback(callback)} at output token {place}"
    with attribute_to(where):
        yield where


@contextmanager
def attribute_to(where: str) -> Iterator[None]:
    """Turns whatever the body raises into a RequestFault.

    Args:
        where: Names what the body runs, "the tokenizer's decode".

    Raises:
        RequestFault: The body raised. A KeyboardInterrupt on the main thread is the user's and passes through.
    """
    try:
        yield
    except RequestFault:
        raise
    except BaseException as error:
        if is_users_interrupt(error):
            raise
        raise RequestFault(f"{where} raised {_describe_error(error)}") from error


def is_users_interrupt(error: BaseException) -> bool:
    """Whether `error` is a KeyboardInterrupt of the user's.

    Signals reach the main thread alone: elsewhere it is foreign code that raised one.
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def describe_callback(callback: object) -> str:
    """A function's name, or the class of any other object."""
    try:
        return str(getattr(callback, "__qualname__", type(callback).__qualname__))
    except Exception:  # its own way to look up attributes
        return type(callback).__qualname__


def _describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own way to say what it is
        return type(error).__name__
