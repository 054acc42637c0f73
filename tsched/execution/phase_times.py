"""Ranges that add up the seconds which an engine's host spends in each phase of its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tkernels.ranges import CapturedRanges, Category, Range, Ranges


class PhaseTimes:
    """Passes every name on to other ranges, and times phases and steps.

    Args:
        inner: Who listens besides.

    Attributes:
        seconds: Phase -> sum; "step" is the whole.
    """

    def __init__(self, inner: Ranges) -> None:
        self._inner = inner
        self.seconds: dict[str, float] = {}

    @property
    def listening(self) -> bool:
        return self._inner.listening

    def named(self, name: str, category: Category, *, launches: bool = True) -> Range:
        inner = self._inner.named(name, category, launches=launches)
        if category not in ("step", "phase"):
            return inner
        self.seconds.setdefault(name, 0.0)
        return _TimedRange(inner, inner, name, self.seconds)

    def captured(self) -> CapturedRanges:
        return self._inner.captured()


class _TimedRange:
    __slots__ = ("_entered", "_inner", "_name", "_named", "_seconds")

    def __init__(
        self, inner: AbstractContextManager[object] | Range, named: Range, name: str, seconds: dict[str, float]
    ) -> None:
        self._inner, self._named, self._name, self._seconds = inner, named, name, seconds
        self._entered: list[float] = []  # a range may be entered inside itself

    def __enter__(self) -> None:
        self._entered.append(time.perf_counter())
        self._inner.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self._inner.__exit__(kind, error, trace)
        began = self._entered.pop()
        if not self._entered:
            self._seconds[self._name] += time.perf_counter() - began

    def carrying(self, request_ids: Sequence[int]) -> _TimedRange:
        return _TimedRange(self._named.carrying(request_ids), self._named, self._name, self._seconds)
