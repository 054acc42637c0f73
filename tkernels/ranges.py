"""Names for what runs: a range is entered and left, and whoever listens sees when.

The default is NVTX, NVIDIA's annotations, which Nsight Systems and Nsight Compute read: one domain, "tkernels". Another
implementation of the same protocol records (see tkernels.recording). A `Ranges` is handed down explicitly, from
`tkernels.select` through the KernelSet to kernels, layers and the engine; each of them makes its names once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np
import nvtx

Category = Literal["step", "phase", "layer", "part", "op", "section"]
"""step: of an engine. phase: what it does in a step. layer: of a model. part: a part of a model that is no op (an
embedding, a linear layer by its weights' names). op: a kernel, as "op.variant". section: what of an op's work is told
apart, as "op section", by whichever variant."""

DOMAIN = "tkernels"
RECORD_GRAPH = "record graph"
"""The phase in which a CUDA graph is captured: what ranges are entered there name the graph's launches."""


class Range(Protocol):
    """One name, made once and entered many times, also inside itself."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...

    def carrying(self, request_ids: Sequence[int]) -> AbstractContextManager[object]:
        """The range for one entry, with the requests that it is about."""
        ...


class CapturedRanges(Protocol):
    """The ranges of one CUDA graph: those that are entered while it is captured, and come again with each replay."""

    def capture(self) -> AbstractContextManager[object]:
        """Around the capture."""
        ...

    def replay(self) -> AbstractContextManager[object]:
        """Around the launch of a replay."""
        ...


class Ranges(Protocol):
    """Makes ranges. What costs something to tell (`Range.carrying`) is only to be made where somebody listens."""

    @property
    def listening(self) -> bool: ...

    def named(self, name: str, category: Category, *, launches: bool = True) -> Range:
        """launches: whether work for the device is launched inside; the others take the host's time alone."""
        ...

    def captured(self) -> CapturedRanges: ...


class Silence:
    """A range, and a graph's ranges, that nobody listens to.

    It is entered and left by a builtin that takes whatever it is given and returns what is false: 70 ns together, where
    two methods of Python take 110. A step of the tiny model has 43 ranges in 750 us.
    """

    __slots__ = ()
    __enter__: Any = "".format
    __exit__: Any = "".format

    def carrying(self, request_ids: Sequence[int]) -> "Silence":
        return self

    def capture(self) -> "Silence":
        return self

    def replay(self) -> "Silence":
        return self


SILENCE = Silence()


class NvtxRanges:
    """Push-pop ranges in NVTX's domain "tkernels".

    Whether a tool listens is known when NVTX is first used in a process and does not change: without one a domain gives
    no attributes, and a range is SILENCE.
    """

    def __init__(self) -> None:
        self._domain = nvtx.get_domain(DOMAIN)
        self.listening = self._domain.get_event_attributes(message=DOMAIN) is not None

    def named(self, name: str, category: Category, *, launches: bool = True) -> Range:
        return NvtxRange(self._domain, name, category) if self.listening else SILENCE

    def captured(self) -> CapturedRanges:
        """A replay needs nothing here: with --cuda-graph-trace=node, Nsight Systems says when each node of a graph was
        created, which is inside the ranges of the capture (see experiments.profiling.nsys_export).
        """
        return SILENCE


class NvtxRange:
    """Attributes are made once: making them costs more than the range."""

    __slots__ = ("_attributes", "_domain", "_given", "_pop", "_push")

    def __init__(self, domain: Any, name: str, category: Category, request_ids: Sequence[int] | None = None) -> None:
        self._domain, self._given = domain, (name, category)
        payload = None if request_ids is None else np.asarray(request_ids, dtype=np.int64)
        self._attributes = domain.get_event_attributes(message=name, category=category, payload=payload)
        self._push, self._pop = domain.push_range, domain.pop_range

    def __enter__(self) -> None:
        self._push(self._attributes)

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self._pop()

    def carrying(self, request_ids: Sequence[int]) -> "NvtxRange":
        """With the ids as the event's payload, an array of int64."""
        return NvtxRange(self._domain, *self._given, request_ids)


NVTX: Ranges = NvtxRanges()
"""The default everywhere."""
